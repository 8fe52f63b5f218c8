"""`fusescout templates`: list, show and check the fused templates that can be found here."""

from __future__ import annotations

import fnmatch
import inspect
import json
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from fusescout.cli import options
from fusescout.cli.terminal import Terminal
from fusescout.errors import EXIT_GATE
from fusescout.errors import EXIT_OK
from fusescout.errors import UsageProblem

if TYPE_CHECKING:
    from fusescout.registry import Registry
    from fusescout.template import Template

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and check fused templates.")
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Names, such as 'gemm*'.")]


@app.command("list")
def list_(
    context: typer.Context,
    pattern: Pattern = "*",
    templates: options.Templates = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """List templates: name, family, what they cover, where they come from."""
    terminal = options.terminal(context, quiet, verbose)
    registry, names = _find(context, terminal, pattern)
    rows = [
        {
            "name": name,
            "family": str(registry.templates[name].FAMILY),
            "summary": _doc(registry.templates[name]).partition("\n")[0],
            "origin": registry.origins[name],
        }
        for name in names
    ]
    if as_json:
        terminal.out(json.dumps({"templates": rows, "warnings": registry.warnings}, indent=1))
        return EXIT_OK
    width = {column: max(len(row[column]) for row in rows) for column in ("name", "family")}
    for row in rows:
        start = f"{row['name']:<{width['name']}}  {row['family']:<{width['family']}}"
        terminal.out(f"{start}  {row['summary']}  ({row['origin']})")
    for warning in registry.warnings:
        terminal.warn(warning)
    return EXIT_OK


@app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    templates: options.Templates = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Show what a template covers; with --verbose its source too."""
    terminal = options.terminal(context, quiet, verbose)
    registry, names = _find(context, terminal, name)
    for found in names:
        template = registry.templates[found]
        terminal.out(f"{found}  (family {template.FAMILY}, from {registry.origins[found]})\n\n{_doc(template)}")
        if verbose:
            terminal.out(f"\n{registry.source(found)}")
    return EXIT_OK


@app.command()
def check(
    context: typer.Context,
    pattern: Pattern = "*",
    templates: options.Templates = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Check that templates load and keep the contract; exits with 1 if one doesn't."""
    terminal = options.terminal(context, quiet, verbose)
    registry, names = _find(context, terminal, pattern)
    with terminal.stdout_reserved():
        problems = {name: _broken_promise(registry, name) for name in names}
    for name, problem in problems.items():
        terminal.out(f"{name}: {problem or 'ok'}")
    for warning in registry.warnings:
        terminal.warn(warning)
    return EXIT_GATE if registry.warnings or any(problems.values()) else EXIT_OK


def _find(context: typer.Context, terminal: Terminal, pattern: str) -> tuple[Registry, list[str]]:
    from fusescout.registry import load

    folders = options.config(context).templates
    with terminal.stdout_reserved():
        registry = load(folders)
    names = [name for name in registry.templates if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise UsageProblem(
            f"No template is called {pattern}.",
            " ".join(registry.warnings),
            f"There are: {', '.join(registry.templates) or 'none'}.",
        )
    return registry, names


def _doc(template: Template) -> str:
    return inspect.getdoc(template) or ""


def _broken_promise(registry: Registry, name: str) -> str:
    """What of the contract the template breaks, or ""."""
    from fusescout.device import Device
    from fusescout.ir import Op
    from fusescout.ir import Ref
    from fusescout.ir import Subgraph
    from fusescout.ir import TensorSpec

    # TileLang reads a kernel's annotations as values; postponed ones are text.
    if "\nfrom __future__ import annotations" in registry.source(name):
        return "It must not have `from __future__ import annotations`."
    spec = TensorSpec((2, 3), "float32", (3, 1))
    foreign = Subgraph((spec,), (Op("nobody.knows_this.default", (Ref(0),), (), spec),), (1,))
    try:
        answer = registry.templates[name].supports(foreign, Device("cpu", "any", "any", 1))
    # An isolation boundary: a template is foreign code.
    except Exception as error:
        return f"supports() raised for an operator it can't know: {type(error).__name__}: {error}"
    return "" if answer and isinstance(answer, str) else "supports() must refuse an unknown operator with a sentence."
