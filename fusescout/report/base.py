"""The report formats and the one way to render them.

A format is a module with `render(session) -> str`; it is imported when it is used, so that asking for JSON does not
load an HTML engine. Nothing here writes files: callers decide where text goes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import PurePath
from typing import cast

from fusescout.errors import UnknownReportFormat
from fusescout.session import Session

MODULES = {"text": "text", "html": "html", "json": "jsonfile", "markdown": "markdown"}
EXTENSIONS = {".txt": "text", ".html": "html", ".htm": "html", ".json": "json", ".md": "markdown"}


def formats() -> tuple[str, ...]:
    """Names that `render` takes."""
    return tuple(MODULES)


def format_of(path: PurePath | str) -> str:
    """The format a file name asks for by its extension.

    Raises:
        UnknownReportFormat: the extension belongs to no format.
    """
    suffix = PurePath(path).suffix.lower()
    if suffix not in EXTENSIONS:
        raise UnknownReportFormat(suffix or str(path), tuple(EXTENSIONS))
    return EXTENSIONS[suffix]


def render(session: Session, format: str = "text", **options: object) -> str:
    """Render one report.

    Args:
        session: what an analysis found.
        format: one of `formats()`.
        options: passed to the format. "text" takes `width` (columns, default 100) and `color` (default False).

    Raises:
        UnknownReportFormat: there is no such format.
    """
    if format not in MODULES:
        raise UnknownReportFormat(format, formats())
    module = import_module(f"fusescout.report.{MODULES[format]}")
    return cast(Callable[..., str], module.render)(session, **options)
