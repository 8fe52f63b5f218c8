"""`fusescout report`: render a session again, in any format, on a machine without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from fusescout.cli import options
from fusescout.errors import OutputExists
from fusescout.errors import Unwritable
from fusescout.errors import UsageProblem

if TYPE_CHECKING:
    from fusescout.session import Session


def report(
    context: typer.Context,
    session: Annotated[
        Path, typer.Argument(metavar="SESSION", help="A session.json, or the run folder it is in.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write here; .html, .json, .md or .txt picks the format."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="text|html|json|markdown", help="The format, whatever the file is called."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Also copy the kept trace there, as TensorBoard reads it."),
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Show a finished analysis."""
    terminal = options.terminal(context, quiet, verbose)
    from fusescout.report import format_of
    from fusescout.report import render
    from fusescout.session import Session
    from fusescout.session import write_atomic

    if as_json and format not in (None, "json"):
        raise UsageProblem(f"--json and --format {format} exclude each other.", "", "Give one of them.")
    form = "json" if as_json else format or (format_of(output) if output else "text")
    loaded = Session.load(session)
    if tensorboard is not None:
        terminal.note(f"Wrote {_for_tensorboard(loaded, session, tensorboard)}")
    if output is None:
        if form == "html" and sys.stdout.isatty():
            raise UsageProblem("HTML isn't for a terminal.", "", "Use -o report.html, or send stdout to a file.")
        look = {"width": terminal.width(), "color": terminal.color()} if form == "text" else {}
        terminal.out(render(loaded, form, **look))
        return 0
    text = render(loaded, form)
    if output.is_dir():
        raise UsageProblem(f"{output} is a folder.", "", f"Give a file in it: -o {output / 'report.html'}")
    if output.exists() and not force:
        raise OutputExists(str(output), "Use --force to replace it, or another name.")
    try:
        write_atomic(output, text.encode())
    except OSError as error:
        raise Unwritable("report", str(output), error.strerror or str(error), "Make room, or name another.") from error
    terminal.note(f"Wrote {output}")
    return 0


def _for_tensorboard(loaded: Session, session: Path, folder: Path) -> Path:
    from fusescout.report.tensorboard import write_for_tensorboard

    if not loaded.profile.trace:
        raise UsageProblem(
            "This session has no trace.", "It was made without a run folder.", "Run `fusescout analyze`."
        )
    run = session if session.is_dir() else session.parent
    try:
        return write_for_tensorboard(run / loaded.profile.trace, folder)
    except OSError as error:
        raise Unwritable("trace", str(folder), error.strerror or str(error), "Make room, or name another.") from error
