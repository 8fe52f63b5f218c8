"""A contender with prepared constants, ready to run; preparing counts as compile time, not in the race's samples."""

from __future__ import annotations

import time

import torch

from fusescout.constants import Parts
from fusescout.constants import Split
from fusescout.contenders.base import Built
from fusescout.contenders.base import Runner
from fusescout.device import Device
from fusescout.inputs import InputSource
from fusescout.reference import build


def prepared(split: Split, steady: Runner, device: Device, source: str = "", compile_s: float = 0.0) -> Built:
    """Join a prepared sub-graph's parts.

    Args:
        split: the parts as plain data.
        steady: runs `split.steady`.
        device: where it runs.
        source: what was generated.
        compile_s: seconds it took to build `steady`.
    """
    prepare = without_gradients(build(split.prepare))
    example = InputSource(split.prepare, None, device.kind, 0).make("constant")
    start = time.perf_counter()
    prepare(example)
    if device.kind == "cuda":
        torch.cuda.synchronize()
    parts = Parts(split, prepare, steady)
    return Built(parts.run, compile_s + time.perf_counter() - start, source, parts)


def without_gradients(run: Runner) -> Runner:
    """Prepared values outlive the call, whatever mode it runs in, so they must be plain tensors without history."""

    def call(inputs: object) -> tuple[object, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return run(inputs)  # type: ignore[arg-type]

    return call
