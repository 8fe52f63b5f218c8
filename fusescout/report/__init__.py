"""Reports: `render(session, format)`, one file per format. All that is shown comes from the `Session`."""

from fusescout.report.base import format_of
from fusescout.report.base import formats
from fusescout.report.base import render

__all__ = ["format_of", "formats", "render"]
