"""Reports: one function, `render(session, format)`, and one file per format. Everything shown comes from the `Session`."""

from fusescout.report.base import format_of
from fusescout.report.base import formats
from fusescout.report.base import render

__all__ = ["format_of", "formats", "render"]
