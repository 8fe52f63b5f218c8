"""Options that several verbs share, and how they become a `Config`.

None means "not given". Numbers stay text here: `config.load` checks every value, whatever source it comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import typer

from fusescout.cli.terminal import Terminal

if TYPE_CHECKING:
    from fusescout.config import Config

Device = Annotated[str | None, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where the model runs. [default: auto]")]
Dtype = Annotated[
    str | None, typer.Option(metavar="fp32|fp16|bf16|fp64", help="Cast floating weights and inputs. [default: keep]")
]
Mode = Annotated[str | None, typer.Option(metavar="inference|training", help="eval() or train(). [default: inference]")]
Effort = Annotated[str | None, typer.Option(metavar="quick|default|max", help="How long to search. [default: default]")]
Threshold = Annotated[
    str | None,
    typer.Option(metavar="X", help="Factor by which a chain's winner must beat every cheaper way. [default: 1.05]"),
]
MinGain = Annotated[
    str | None, typer.Option(metavar="X", help="End-to-end speed-up that must be reached, such as 1.01. [default: 1.0]")
]
Runs = Annotated[str | None, typer.Option(metavar="N", help="Profile repetitions. [default: 5]")]
Rounds = Annotated[str | None, typer.Option(metavar="N", help="Rounds of the end-to-end comparison. [default: 30]")]
Compose = Annotated[
    str | None,
    typer.Option(
        "--with",
        metavar="eager|inductor|cudagraph|replay|auto",
        help="What runs the rest of the model. [default: auto]",
    ),
]
AllowTf32 = Annotated[
    bool | None, typer.Option("--allow-tf32/--no-allow-tf32", help="Let float32 products use TF32. [default: no]")
]
Top = Annotated[str | None, typer.Option(metavar="N", help="Most candidates that are raced. [default: 12]")]
Templates = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", exists=True, file_okay=False, help="Folder with more templates; may be given again."),
]
CacheDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Where races are kept. [default: the user's cache]")]
UseCache = Annotated[
    bool | None, typer.Option("--use-cache/--no-use-cache", help="Reuse earlier races. [default: yes]")
]
Deadline = Annotated[
    str | None, typer.Option("--deadline-s", metavar="X", help="Seconds for each kernel that is tried. [default: 60]")
]
Jobs = Annotated[
    str | None, typer.Option("--jobs", "-j", metavar="N", help="Parallel compilations. [default: cores, at most 16]")
]
IncludeSource = Annotated[
    bool | None, typer.Option("--include-source/--no-include-source", help="Put model source in reports. [default: no]")
]
Seed = Annotated[str | None, typer.Option(metavar="N", help="Seed for weights, inputs and checks. [default: 0]")]
FailUnder = Annotated[
    str | None, typer.Option(metavar="X", help="Exit with 1 unless the end-to-end speed-up is certainly at least this.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace what is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Exactly one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; tracebacks of internal errors.")]


def spell(name: str) -> str:
    """How a setting is spelled as an option. `with` is a word of Python's, so the setting has another name."""
    return "--with" if name == "compose" else f"--{name.replace('_', '-')}"


def given(context: typer.Context) -> dict[str, Any]:
    """The settings among a command's options that the user gave."""
    from fusescout.config import Config

    return {k: v for k, v in context.params.items() if k in Config.model_fields and v not in (None, [], ())}


def config(context: typer.Context, beneath: dict[str, Any] | None = None) -> Config:
    """The configuration of this command; `beneath` are settings that options override."""
    from fusescout.config import load

    return load((beneath or {}) | given(context), kind="option", spell=spell)


def terminal(context: typer.Context, quiet: bool, verbose: bool) -> Terminal:
    """The process's `Terminal`, told how much to say."""
    found = context.find_root().obj
    assert isinstance(found, Terminal)
    found.quiet, found.verbose = quiet, verbose
    return found
