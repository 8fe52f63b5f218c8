"""Holds a way of running the whole model against the float64 model, by the same rule as a single chain."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusescout.capture.protect import protected
from fusescout.nest import convert
from fusescout.nest import tensors
from fusescout.session import ErrorStats
from fusescout.verify import check_model_outputs
from fusescout.verify import out_of_memory
from fusescout.workload import Workload

SEED = 0


class ModelJudge:
    """Knows the truth of the workload's own inputs and what eager makes of them.

    Attributes:
        truth_dtype: "float64"; "float32" where memory or the model forbids it (then said so in the report).
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.eager = collect(workload)
        self.truth_dtype, self.truth = _truth(workload)

    def check(self, model: Any) -> ErrorStats | str:
        """Error statistics of another callable for the same model, or the sentence that says what is wrong."""
        return check_model_outputs(collect(replace(self.workload, model=model)), self.eager, self.truth)


def collect(workload: Workload) -> list[Tensor]:
    """Copies of all tensors of one step: outputs, and in training each parameter's gradient.

    Gradients, buffers and the random state are put back.
    """
    own = workload.model if isinstance(workload.model, torch.nn.Module) else None
    parameters = list(own.parameters()) if own is not None else []
    with protected(getattr(own, "_orig_mod", own)):
        torch.manual_seed(SEED)
        for parameter in parameters:
            parameter.grad = None
        found = [t.detach().clone() for t in tensors(workload.step())]
        if workload.mode == "training":
            found += [p.grad.detach().clone() for p in parameters if p.grad is not None]
    return found


def _truth(workload: Workload) -> tuple[str, list[Tensor]]:
    """The same step in the highest precision that can be had."""
    reasons = []
    for name in ("float64", "float32"):
        dtype = getattr(torch, name)
        try:
            model = copy.deepcopy(workload.model)
            model._apply(lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
            memo: dict[int, tuple[Any, Any]] = {}
            args = convert(workload.args, None, dtype, memo)
            kwargs = convert(workload.kwargs, None, dtype, memo)
            return name, collect(replace(workload, model=model, args=args, kwargs=kwargs, dtype=name))
        except Exception as error:  # isolation boundary: a model may not run in float64 at all, or not fit
            reasons.append(f"{name}: {'out of memory' if out_of_memory(error) else str(error).splitlines()[0][:120]}")
    raise TruthUnavailable("; ".join(reasons))


class TruthUnavailable(Exception):
    """The model runs neither in float64 nor in float32."""
