"""Runs something a few times under torch.profiler and gives the trace as tables."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import record_function

from fusescout import environ
from fusescout.errors import ProfilerBusy
from fusescout.profiling.sequence import CALL
from fusescout.profiling.trace import Trace
from fusescout.profiling.trace import read
from fusescout.session import write_atomic

Prepare = Callable[[], Callable[[], object]]
"""Makes one call ready and gives it; only the call itself is timed or attributed."""


def refuse_if_busy() -> None:
    """Raise `ProfilerBusy` if a profiler is active: the outer one would lose everything it has."""
    if torch._C._autograd._profiler_enabled():
        raise ProfilerBusy


def synchronize(device: str) -> None:
    """Wait until the device has done all it was told to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def record(prepare: Prepare, calls: int, device: str, keep: Path | None = None) -> Trace:
    """Profile `calls` calls, each inside an annotation and finished before the next.

    One call more runs first: the profiler may drop the first records after it starts. No shapes, stacks or memory are
    recorded, so what is profiled runs as undisturbed as it can.

    Args:
        prepare: gives the next call.
        calls: how many calls count.
        device: "cpu", "cuda:0", …
        keep: where to keep the trace as gzip, if anywhere.

    Raises:
        ProfilerBusy: another profiler is active.
    """
    refuse_if_busy()
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    quiet = {} if "KINETO_LOG_LEVEL" in os.environ else {"KINETO_LOG_LEVEL": "99"}  # its stage log isn't for users
    with environ.changed(**quiet), torch.profiler.profile(activities=activities) as profiler:
        for k in range(-1, calls):
            call = prepare()
            synchronize(device)
            with record_function(f"{CALL}{k}") if k >= 0 else nullcontext():
                call()
                synchronize(device)
    with tempfile.TemporaryDirectory(prefix="fusescout-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        data = file.read_bytes()
    if keep is not None:
        write_atomic(keep, gzip.compress(data, 5))
    return read(data)
