"""`fusescout templates`: list, show and check the fused templates that can be found here."""

from __future__ import annotations

import fnmatch
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from fusescout.cli import options
from fusescout.errors import EXIT_GATE
from fusescout.errors import EXIT_OK
from fusescout.errors import UsageProblem

if TYPE_CHECKING:
    from fusescout.registry import Found

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and check fused templates.")
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Names, such as 'gemm*'.")]


def _find(context: typer.Context, pattern: str = "*") -> list[Found]:
    from fusescout.registry import discover

    found = discover(options.config(context).templates)
    chosen = [f for f in found if fnmatch.fnmatchcase(f.name, pattern)]
    if not chosen:
        names = ", ".join(f.name for f in found) or "none"
        raise UsageProblem(f"No template is called {pattern}.", "", f"There are: {names}.")
    return chosen


@app.command("list")
def list_(
    context: typer.Context,
    pattern: Pattern = "*",
    templates: options.Templates = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """List templates with their family and where they come from."""
    terminal = options.terminal(context, quiet, verbose)
    with terminal.stdout_reserved():
        found = _find(context, pattern)
    if as_json:
        keys = ("name", "family", "origin", "path", "summary", "problem")
        terminal.out(json.dumps([{k: getattr(f, k) for k in keys} for f in found], indent=1))
        return EXIT_OK
    width = max(len(f.name) for f in found)
    for item in found:
        terminal.out(f"{item.name:<{width}}  {item.summary or item.problem}  ({item.origin})")
        if item.problem:
            terminal.warn(f"{item.name} can't be used: {item.problem}")
    return EXIT_OK


@app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    templates: options.Templates = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Show what a template covers, and with --verbose its source."""
    terminal = options.terminal(context, quiet, verbose)
    with terminal.stdout_reserved():
        found = _find(context, name)
    for item in found:
        text = inspect.getdoc(item.module) if item.module else item.problem
        terminal.out(f"{item.name}  family {item.family or '?'}  from {item.origin}\n{item.path}\n\n{text or ''}")
        if verbose and item.path:
            terminal.out(Path(item.path).read_text(encoding="utf-8"))
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
    with terminal.stdout_reserved():
        results = [(item, item.problem or _broken_promise(item)) for item in _find(context, pattern)]
    for item, problem in results:
        terminal.out(f"{item.name}: {problem or 'ok'}")
    return EXIT_GATE if any(problem for _, problem in results) else EXIT_OK


def _broken_promise(item: Found) -> str:
    """What of the contract the template breaks, or ""."""
    from fusescout.device import Device
    from fusescout.ir import Op
    from fusescout.ir import Ref
    from fusescout.ir import Subgraph
    from fusescout.ir import TensorSpec

    assert item.module is not None
    # TileLang reads a kernel's annotations as values; postponed ones are text.
    if "\nfrom __future__ import annotations" in Path(item.path).read_text(encoding="utf-8"):
        return "It must not have `from __future__ import annotations`."
    spec = TensorSpec((2, 3), "float32", (3, 1))
    foreign = Subgraph((spec,), (Op("nobody.knows_this.default", (Ref(0),), (), spec),), (1,))
    try:
        answer = item.module.supports(foreign, Device("cpu", "any", "any", 1))
    # An isolation boundary: a template is foreign code.
    except Exception as error:
        return f"supports() raised for an operator it can't know: {type(error).__name__}: {error}"
    return "" if answer and isinstance(answer, str) else "supports() must refuse an unknown operator with a sentence."
