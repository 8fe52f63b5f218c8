"""One way to run the whole model: built and warmed up, with what that took."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config as inductor

from fusescout.capture.dynamo import forgotten
from fusescout.capture.protect import protected
from fusescout.errors import NO_SPACE
from fusescout.errors import DiskFull
from fusescout.errors import in_a_line
from fusescout.graphtrees import mend
from fusescout.patching import Backend
from fusescout.plan import Composition
from fusescout.rng import leave_capture
from fusescout.workload import Workload

EAGER = ("eager", "eager again")
"""Names of the model as its author wrote it, which is measured twice."""
GRAPHED_EAGER = "eager + CUDA graphs"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the whole model, built and warmed up."""

    name: str
    model: Callable[..., Any]
    step: Callable[[], Any]
    compile_s: float
    backend: Backend | None = None
    composition: Composition | None = None
    peak_bytes: int | None = None
    note: str = ""


@contextmanager
def compiling(workload: Workload) -> Iterator[None]:
    """Dynamo for the ways of one model: what it compiles inside is dropped after, and the model left as it was."""
    limits: Any = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}
    with torch._dynamo.config.patch(**limits), forgotten(), untouched(workload), _settled_memory():
        yield


@contextmanager
def _settled_memory() -> Iterator[None]:
    """Spare Python's garbage collector what is there already: walking it again and again takes 5 % of a compilation."""
    if gc.get_freeze_count():  # somebody has done so before, and will undo it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def warm(name: str, workload: Workload, model: Any) -> Way:
    """Call it until it is compiled: once, and on CUDA again, since CUDA graphs are captured in a later call.

    Memory is taken between the two, while what will be a CUDA graph still runs as code, in a pool of its own: the
    workspace of cuBLAS counts there, which other ways have got before.
    """
    step = stepper(replace(workload, model=model))
    cuda = workload.device.startswith("cuda")
    peak_bytes, again_s = None, 0.0
    with untouched(workload):
        first_s = seconds(step, workload.device)
        if cuda:
            with inductor.patch({"triton.force_cudagraphs_warmup": True}):
                peak_bytes = most_bytes(step, workload.device)
            again_s = seconds(step, workload.device)
    return Way(name, model, step, first_s + again_s, peak_bytes=peak_bytes)


def seconds(step: Callable[[], Any], device: str, count: int = 1) -> float:
    """Of one step, in a sample of several."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def most_bytes(step: Callable[[], Any], device: str) -> int | None:
    """Most memory one step holds beyond what is held before it; None where that isn't known.

    A step that takes none replays a CUDA graph, whose pool is held all the time and shared with other graphs.
    """
    if not device.startswith("cuda"):
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) or None


def untouched(workload: Workload) -> AbstractContextManager[None]:
    """Buffers, gradients and random state are put back after: each check and each way starts from the same model."""
    return protected(getattr(workload.model, "_orig_mod", workload.model))


def stepper(workload: Workload) -> Callable[[], Any]:
    """One step; in training the gradients are dropped first, as an optimizer's zero_grad does."""
    if workload.mode != "training":
        return workload.step
    parameters = list(workload.model.parameters())

    def step() -> Any:
        for parameter in parameters:
            parameter.grad = None
        return workload.step()

    return step


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def failure(name: str, workload: Workload, error: Exception) -> str:
    """Why a way can't run, with CUDA left as other ways need it; a full disk says nothing about it."""
    mend(workload.device)
    leave_capture(workload.device)
    if NO_SPACE in str(error):
        raise DiskFull(name, str(error)) from error
    return in_a_line(error)
