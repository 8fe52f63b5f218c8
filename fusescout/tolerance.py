"""How large an error is allowed: twice what the framework itself makes, plus one rounding step of the output type.

Truth t is the sub-graph in float64, e eager's output, o the contender's. Nothing here is a constant that was tuned.

1. Classes. Where o is NaN, +inf or -inf, e or the rounded truth must be the same there; where o is finite, one of
   them must be finite. (So float16 may overflow as eager does, or not overflow where the truth doesn't.)
   Where e and o are both NaN or infinite, but not the same, and only there, rounding may have decided: e and t are
   computed once more with huge finite numbers for the infinite inputs (`infinities`). If that t isn't zero, and zero is
   within 2 E + step(t) of it, then its sign, and what infinity is made of it, is nothing that eager promises.
2. Each element. |o - t| <= 2 E + step(t). E is the largest eager error among elements of about the same size: those
   within a factor of two of |t|, widened both ways until at least `NEIGHBOURS` non-zero elements are in. A tiny output
   can't hide behind a large one's error. step(t) is the distance of neighbouring numbers of the output type at |t|;
   for float32 and bfloat16 it ends at the smallest normal number, since GPUs flush smaller ones. It also ends at
   eps^2 rms(t), an error of second order: GELU's tail may go to zero where it is 1e-8 of the size of the outputs.
3. Root mean square, per output. rms(o - t) <= 2 rms(e - t) + (eps / 4) rms(t), eps the output type's relative step:
   (eps / 4) is about the rms of one rounding; of n elements alone it may be 1 + 1/sqrt(n) times that, so the nearest
   number always passes. It sees errors that are small everywhere, as of a low-precision sum.

For small outputs eager's error is sampled on more inputs of the same kind (`Allowance.add`), as a maximum over a
handful of elements says little; what eager makes on the inputs in question is among it, so eager passes its own rule.
rms(e - t) is then the largest of any one set of inputs: the rms of a handful of errors is itself a matter of luck, and
one scalar's error held to the mean of eager's would refuse right kernels every now and then. Integer and boolean
outputs must equal eager's, element by element.

Eager's error is not always what the framework may make: its library chose an algorithm without TF32 where the settings
allow TF32, or a result that was rounded twice lies exactly on a kink. Where a contender fails by eager's error, and
only there, other evaluations that the framework may make (`admissible`) are run on the same inputs. E is then the
larger of eager's error and theirs, each looked up among its own elements, and so is rms(e - t); all else stays.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EAGER = "eager"
NEIGHBOURS = 256
TABLES = 256
_BUCKETS = 1 << 11
"""One for each float64 exponent; the first one holds zero."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How one output did. `ratio`: worst error over the allowed, at most 1 passes; errors are relative to rms(t).

    `against` names the last evaluation whose error was counted.
    """

    ratio: float
    contender: float
    eager: float
    informative: bool
    reason: str = ""
    against: str = EAGER

    @property
    def imprecise(self) -> bool:
        """Whether it fails by the size of an error, which another evaluation may make as well, not by its class."""
        return bool(self.reason) and math.isfinite(self.ratio)


class Sample:
    """How far one evaluation is from the truth: its largest error by size of the element, and the root mean square.

    Args:
        out: one of its outputs, floating.
        truth: the same in float64.
        name: the evaluation's.
    """

    def __init__(self, out: Tensor, truth: Tensor, name: str = EAGER) -> None:
        self.name = name
        self.peaks = torch.zeros(_BUCKETS, dtype=torch.float64, device=out.device)
        self.counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=out.device)
        self.rms = 0.0
        self.add(out, truth)

    def add(self, out: Tensor, truth: Tensor) -> None:
        """Sample the error on one more set of inputs."""
        sizes = truth.detach().double().flatten()
        error = (out.detach().double().flatten() - sizes).abs_()
        if not bool((known := error.isfinite()).all()):
            error, sizes = error[known], sizes[known]
        bucket = _bucket(sizes)
        self.peaks = torch.maximum(self.peaks, _peaks(bucket, error, TABLES if error.is_cuda else 1))
        self.counts += torch.bincount(bucket, minlength=_BUCKETS)
        if error.numel():
            self.rms = max(self.rms, math.sqrt(float(error.square().mean())))

    def near(self) -> Tensor:
        """Per bucket the largest error of the elements of about that size."""
        counts, peaks = self.counts.tolist(), self.peaks.tolist()
        used = [k for k in range(1, _BUCKETS) if counts[k]]
        near = torch.full((_BUCKETS,), peaks[0], dtype=torch.float64)
        for k in (0, *used) if used else ():
            start = max(k, used[0])
            low, high = bisect_left(used, start - 1), bisect_right(used, start + 1)
            while sum(counts[b] for b in used[low:high]) < NEIGHBOURS and (low > 0 or high < len(used)):
                low, high = max(low - 1, 0), high + 1
            zeros = peaks[0] if low == 0 else 0.0
            near[k] = max(zeros, *(peaks[b] for b in used[low:high]))
        return near


class Allowance:
    """What eager and the truth allow for one output on one set of inputs.

    Args:
        eager: eager's output.
        truth: the same in float64 (for integer outputs: in any type).
        slack: factor on eager's error, where it could be sampled on a few elements only.
    """

    def __init__(self, eager: Tensor, truth: Tensor, slack: float = 1.0) -> None:
        self.eager, self.truth, self.slack = eager.detach(), truth.detach(), slack
        self.exact = not eager.dtype.is_floating_point
        if not self.exact:
            self.sample = Sample(eager, truth)

    def add(self, eager: Tensor, truth: Tensor) -> None:
        """Sample eager's error on one more set of inputs."""
        if not self.exact:
            self.sample.add(eager, truth)

    def undetermined(self) -> Tensor:
        """Flat positions at which zero is within the allowed error of the truth, which is finite and isn't zero.

        What is below the smallest step of the type is zero to it. Rule 2's floor of second order doesn't count: it goes
        by the size of all outputs, among which a few are huge here.
        """
        if self.exact:
            return torch.empty(0, dtype=torch.int64, device=self.eager.device)
        size = self.truth.double().flatten().abs()
        step = _step(size, self.eager.dtype)
        allowed = 2 * self.slack * self.sample.near().to(size.device)[_bucket(size)] + step
        smallest = float(_step(size.new_zeros(1), self.eager.dtype))
        return ((size > smallest) & (size <= allowed)).nonzero().flatten()

    def judge(
        self,
        out: Tensor,
        beside: Sequence[Sample] = (),
        undetermined: Callable[[], Tensor | None] = lambda: None,
    ) -> Errors:
        """Hold one output of a contender against the rule; its shape and dtype are right already.

        Args:
            out: the output.
            beside: of evaluations whose error counts like eager's.
            undetermined: gives the flat positions at which rounding decides what is made of an infinity; called where
                nothing but the kind of a NaN or infinity is wrong.
        """
        if self.exact:
            wrong = int((out != self.eager).sum())
            reason = f"{wrong} of {out.numel()} values differ from eager's" if wrong else ""
            return Errors(math.inf if wrong else 0.0, float(wrong), 0.0, True, reason)
        target, value = self.truth.double().flatten(), out.detach().double().flatten()
        own = (self.eager if self.eager.dtype.itemsize > 1 else self.eager.float()).flatten()  # 8 bits can't be asked
        if not bool((value.isfinite() & target.isfinite() & own.isfinite()).all()):
            eager, rounded = self.eager.double().flatten(), self.truth.to(out.dtype).double().flatten()
            if reason := _classes(value, eager, rounded, undetermined):
                return Errors(math.inf, math.inf, 0.0, True, reason)
            target = torch.where(target.isfinite(), target, eager)
            known = value.isfinite() & target.isfinite()
            value, target = value[known], target[known]
        if target.numel() == 0:
            return Errors(0.0, 0.0, 0.0, informative=out.numel() == 0)
        error = (value - target).abs()
        size, eps = math.sqrt(float(target.square().mean())), torch.finfo(out.dtype).eps
        step = _step(target, out.dtype).clamp_min(eps * eps * size)
        samples = (self.sample, *beside)
        near = torch.stack([s.near() for s in samples]).amax(0)
        allowed = 2 * self.slack * near.to(target.device)[_bucket(target)] + step
        rms = math.sqrt(float(error.square().mean()))
        rounding = eps / 4 * (1 + 1 / math.sqrt(target.numel()))
        smallest = float(_step(target.new_zeros(1), out.dtype))
        allowed_rms = 2 * self.slack * max(s.rms for s in samples) + rounding * size + smallest
        ratio = error / allowed
        worst = float(ratio.max())
        scale = size or 1.0
        found = (float(error.max()) / scale, float(self.sample.peaks.max()) / scale)
        reason = ""
        if worst > 1:
            at = int(ratio.argmax())
            reason = (
                f"an error of {float(error[at]):.3g} where {float(allowed[at]):.3g} is allowed"
                f" (got {float(value[at]):.6g}, true {float(target[at]):.6g})"
            )
        elif rms > allowed_rms:
            reason = f"a root-mean-square error of {rms:.3g} where {allowed_rms:.3g} is allowed"
        return Errors(max(worst, rms / allowed_rms), *found, True, reason, samples[-1].name)


def _classes(value: Tensor, eager: Tensor, rounded: Tensor, undetermined: Callable[[], Tensor | None]) -> str:
    """Why NaN and infinity positions don't agree, or nothing."""
    odd = ~value.isfinite()
    agrees = _same(value, eager) | _same(value, rounded)
    both_odd = ~eager.isfinite() & ~rounded.isfinite()
    bad = (odd & ~agrees) | (~odd & both_odd)
    by_kind = bool(bad.any()) and not bool((bad & ~(odd & ~eager.isfinite())).any())
    if by_kind and (excused := undetermined()) is not None:
        bad[excused] = False
    count = int(bad.sum())
    if not count:
        return ""
    at = int(bad.flatten().int().argmax())
    got, expected = float(value.flatten()[at]), float(eager.flatten()[at])
    return f"{count} of {value.numel()} values have the wrong class (got {got:.6g} where eager gives {expected:.6g})"


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a.isnan() & b.isnan()) | (a == b)


def _bucket(sizes: Tensor) -> Tensor:
    """Power-of-two bucket of |size| (float64): its exponent bits."""
    return (sizes.view(torch.int64) >> 52) & (_BUCKETS - 1)


def _peaks(bucket: Tensor, error: Tensor, tables: int) -> Tensor:
    """The largest error of each bucket. Neighbours go to different tables, or they would wait for each other on a GPU:
    nearly all sizes are in a handful of buckets, and a maximum in float64 is a loop of compare and swap there."""
    if tables > 1:
        bucket = bucket + torch.arange(bucket.numel(), device=bucket.device) % tables * _BUCKETS
    found = torch.zeros(tables * _BUCKETS, dtype=torch.float64, device=bucket.device)
    return found.scatter_reduce_(0, bucket, error, "amax").view(tables, _BUCKETS).amax(0)


def _step(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next number of `dtype` at each |size| (float64)."""
    info = torch.finfo(dtype)
    smallest = info.tiny if dtype in (torch.float32, torch.bfloat16) else info.tiny * info.eps
    power = (sizes.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return (power * info.eps).clamp_min(smallest)
