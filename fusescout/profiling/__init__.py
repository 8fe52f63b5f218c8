"""Where the time of one step goes: profiling runs, trace reading, kernel → launch → operator → captured node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fusescout.profiling.result import KernelTime
from fusescout.profiling.result import NodeTime
from fusescout.profiling.result import Profile

if TYPE_CHECKING:
    from fusescout.capture import Capture
    from fusescout.workload import Workload

__all__ = ["KernelTime", "NodeTime", "Profile", "profile"]


def profile(workload: Workload, capture: Capture, *, runs: int = 5, trace_path: Path | None = None) -> Profile:
    """Profile one step of a model. Model, gradients, buffers and random state are left as they were found.

    Args:
        workload: the model and its inputs.
        capture: its captured graphs.
        runs: profiled calls per run; each time is the median over them.
        trace_path: where to keep the Chrome trace (gzip) of the model as the framework runs it.

    Raises:
        ProfilerBusy: a profiler is already active in this process.
    """
    from fusescout.profiling.run import run

    return run(workload, capture, runs, trace_path)
