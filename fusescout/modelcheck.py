"""Holds a way of running the whole model against the float64 model, by the same rule as a single chain.

What fails eager's rule may still be as exact as the framework's compiler is. That happens without a fault: an untrained
batch norm multiplies by 1 / sqrt(1 + 1e-5). Eager rounds that product back to 16 bits, so that a residual sum often
lies half way between two numbers and is rounded to even; code that doesn't round in between, Inductor's and ours, finds
every such sum just below half way and rounds down. In a bfloat16 ResNet of 50 layers, emulated with float32 sums, that
made 1.8 to 2.4 times eager's error; with eps = 0 or with statistics that aren't all 0 and 1 it made none. On a CPU,
Inductor's plain float32 sum over an image had 8 times the error of eager's pairwise one. So `torch.compile`'s outputs
are a second opinion: within `SANE` times what eager allows, its error counts as one that the framework itself makes.

Other opinions are the model itself with its float32 convolutions or matrix products in TF32, forwards and backwards,
where the settings allow it (`admissible`), and with its 16-bit group norms in float32, as autocast has them
(`exact_moments`). They need no bound on their own error, and are run where something fails first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusescout.admissible import TF32
from fusescout.admissible import CutToTF32
from fusescout.capture.protect import protected
from fusescout.errors import in_a_line
from fusescout.exact_moments import FULL_MOMENTS
from fusescout.exact_moments import FullMoments
from fusescout.exact_scaled import ExactScaled
from fusescout.exact_scaled import widened
from fusescout.nest import convert
from fusescout.nest import tensors
from fusescout.numerics import tf32_kinds
from fusescout.room import out_of_memory
from fusescout.session import ErrorStats
from fusescout.tolerance import Sample
from fusescout.verify import check_model_outputs
from fusescout.workload import Workload

SEED = 0
SANE = 8.0
"""A compiled model this much further off than eager's rule allows is taken to be wrong, not imprecise."""
BESIDE = 1.25
"""How much further off than such a compiled model another way may be; of eager's own error it is twice as much."""


class ModelJudge:
    """Knows the truth of the workload's own inputs and what eager makes of them.

    Attributes:
        truth_dtype: "float64"; "float32" where memory or the model forbids it (then said so in the report); "" where
            they forbid both.
        unknown: why there is no truth, so that nothing can be checked; empty if there is one.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.eager = collect(workload)
        self.truth_dtype, self.truth, self.unknown = _truth(workload)
        self.opinions: dict[str, list[Tensor]] = {}
        """Outputs of the framework's ways that fail eager's rule but are sane."""
        self._measured: dict[str, list[Sample]] = {}

    def hear(self, name: str, model: Any) -> str:
        """Check one of the framework's own ways; says how it fails eager's rule, empty if it does not."""
        outputs = collect(replace(self.workload, model=model))
        if self.unknown:
            return self.unknown
        verdict = check_model_outputs(outputs, self.eager, self.truth, others=self._others)
        if not isinstance(verdict, str):
            return ""
        if not isinstance(check_model_outputs(outputs, self.eager, self.truth, factor=SANE), str):
            self.opinions[name] = outputs
        return verdict

    def check(self, model: Any) -> ErrorStats | str:
        """Error statistics of another callable for the same model, or the sentence that says what is wrong."""
        if self.unknown:
            return self.unknown
        outputs = collect(replace(self.workload, model=model))
        verdict = check_model_outputs(outputs, self.eager, self.truth, others=self._others)
        for name, opinion in self.opinions.items():
            if not isinstance(verdict, str):
                break
            beside = check_model_outputs(outputs, opinion, self.truth, factor=BESIDE / 2)
            if not isinstance(beside, str):
                verdict = beside.model_copy(update={"against": name})
        return verdict

    def _others(self) -> Iterator[list[Sample]]:
        """How far from the truth the model itself is, as settings or autocast allow it; each is run when asked for."""
        for name, sample in ((TF32, self._sample_tf32), (FULL_MOMENTS, self._sample_full_moments)):
            if name not in self._measured:
                try:
                    self._measured[name] = sample()
                except Exception:  # isolation boundary: what doesn't run so, for want of memory say, is no measure
                    self._measured[name] = []
            if self._measured[name]:
                yield self._measured[name]

    def _sample_tf32(self) -> list[Sample]:
        """The error of each output in TF32; none where nothing may be."""
        if not (kinds := tf32_kinds(self.workload.device)):
            return []
        with CutToTF32(kinds, self.workload.device) as mode:
            outputs = collect(self.workload)
        return [Sample(o, t, TF32) for o, t in zip(outputs, self.truth, strict=True)] if mode.cut else []

    def _sample_full_moments(self) -> list[Sample]:
        """The error of each output with group norms in float32; none where there is none in 16 bits."""
        with FullMoments() as mode:
            outputs = collect(self.workload)
        return [Sample(o, t, FULL_MOMENTS) for o, t in zip(outputs, self.truth, strict=True)] if mode.count else []


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


def _truth(workload: Workload) -> tuple[str, list[Tensor], str]:
    """The same step in the highest precision that can be had, or why there is none."""
    reasons = []
    for name in ("float64", "float32"):
        dtype = getattr(torch, name)
        try:
            model = copy.deepcopy(workload.model)
            model._apply(partial(widened, dtype=dtype))  # type: ignore[no-untyped-call]
            memo: dict[int, tuple[Any, Any]] = {}
            args = convert(workload.args, None, dtype, memo)
            kwargs = convert(workload.kwargs, None, dtype, memo)
            with ExactScaled(dtype):
                return name, collect(replace(workload, model=model, args=args, kwargs=kwargs, dtype=name)), ""
        except Exception as error:  # isolation boundary: a model may not run in float64 at all, or not fit
            why = "out of memory" if out_of_memory(error) else in_a_line(error, 120)
            reasons.append(f"{name}: {why}")
    return "", [], f"the model can't be run with more precision to check it by ({'; '.join(reasons)})"
