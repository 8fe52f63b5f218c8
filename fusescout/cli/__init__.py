"""The command line: `main` runs one verb and gives the process's exit code. One file per verb; this one wires them."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from fusescout import __version__
from fusescout.cli import analyze
from fusescout.cli import apply
from fusescout.cli import bench
from fusescout.cli import doctor
from fusescout.cli import report
from fusescout.cli import templates
from fusescout.cli.terminal import Terminal
from fusescout.errors import EXIT_INTERRUPTED
from fusescout.errors import EXIT_OK
from fusescout.errors import FuseScoutError
from fusescout.errors import OutOfMemory
from fusescout.errors import UsageProblem
from fusescout.room import out_of_memory

EXIT_INTERNAL, EXIT_CLOSED_PIPE, EXIT_TERMINATED = 70, 141, 143
RARELY = (50_000, 10, 10)
"""New objects before the garbage collector runs: with Python's 700 it takes 2.5 s of a run, most of it in imports."""
EPILOG = """\b
Exit codes:
    0  done
    1  it ran, but a gate failed (--fail-under, verification, templates check)
    2  wrong usage, settings or target
    3  this machine can't do it (no GPU, a missing package, a full disk, too
       little memory)
    4  the model or script raised
   70  internal error: a bug in FuseScout
  130  interrupted
  141  whatever read the output stopped reading
  143  terminated

\b
Settings come from [tool.fusescout] in pyproject.toml, FUSESCOUT_* variables
and options; the later wins."""

app = typer.Typer(
    name="fusescout",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
STOPS_AT_TARGET = {"allow_interspersed_args": False}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusescout {__version__}")
        raise typer.Exit


@app.callback()
def _fusescout(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the operator chains of a PyTorch model that are worth fusing, and prove it."""


app.command("analyze", context_settings=STOPS_AT_TARGET, epilog=EPILOG)(analyze.analyze)
app.command("report")(report.report)
app.command("apply", context_settings=STOPS_AT_TARGET)(apply.apply)
app.add_typer(templates.app, name="templates")
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


def _terminated(*_: object) -> None:
    """End as an exception does, so that nothing half-written and no child is left."""
    raise SystemExit(EXIT_TERMINATED)


def console() -> None:
    """The program: `main`, then an end without Python's own clean-up, which takes 1.7 s where compilers were loaded.

    Files and children are closed by then; they belong to context managers.
    """
    gc.set_threshold(*RARELY)
    code = main()
    with suppress(OSError):  # a closed pipe has been told of already
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name (default: `sys.argv[1:]`).

    Returns:
        The exit code; see `EPILOG`.
    """
    with suppress(ValueError):  # not in the main thread: whoever runs this there handles signals
        signal.signal(signal.SIGTERM, _terminated)
    terminal = Terminal()
    command = typer.main.get_command(app)
    listed = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = command.main(listed, prog_name="fusescout", standalone_mode=False, obj=terminal)
    except FuseScoutError as error:
        terminal.error(error)
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "fusescout"
        terminal.error(UsageProblem(error.format_message(), "", f"Try '{path} --help'."))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except SystemExit as stop:
        # Typer ends with 1 there, which is a failed gate's; 141 is what a shell says of a program that SIGPIPE ended.
        code = EXIT_CLOSED_PIPE if isinstance(stop.__context__, BrokenPipeError) else stop.code
    # The last isolation boundary: whatever is left is a bug of FuseScout's and is reported as one.
    except Exception as error:
        if out_of_memory(error):
            full = OutOfMemory("There was no memory left for the analysis.", error)
            terminal.error(full)
            return full.exit_code
        terminal.internal_error(error)
        return EXIT_INTERNAL
    if code == EXIT_INTERRUPTED:
        terminal.warn("Interrupted; nothing was written.")
    return code if isinstance(code, int) else EXIT_OK
