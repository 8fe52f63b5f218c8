"""From a model to its ATen graphs, as modules and as plain data."""

from fusescout.capture.capture import Capture
from fusescout.capture.capture import CapturedGraph
from fusescout.capture.capture import capture

__all__ = ["Capture", "CapturedGraph", "capture"]
