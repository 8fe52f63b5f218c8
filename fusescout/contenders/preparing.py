"""A contender with prepared constants, ready to run."""

from __future__ import annotations

import torch

from fusescout.constants import Parts
from fusescout.constants import Split
from fusescout.contenders.base import Built
from fusescout.contenders.base import Runner
from fusescout.reference import build


def prepared(split: Split, steady: Runner, source: str = "", compile_s: float = 0.0) -> Built:
    """Join a prepared sub-graph's parts.

    Args:
        split: the parts as plain data.
        steady: runs `split.steady`.
        source: what was generated.
        compile_s: seconds it took to build `steady`.
    """
    views = build(split.views) if split.views else None
    parts = Parts(split, _without_gradients(build(split.prepare)), steady, views)
    return Built(parts.run, compile_s, source, parts)


def _without_gradients(run: Runner) -> Runner:
    """Prepared values outlive the call, whatever mode it runs in, so they must be plain tensors without history."""

    def call(inputs: object) -> tuple[object, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return run(inputs)  # type: ignore[arg-type]

    return call
