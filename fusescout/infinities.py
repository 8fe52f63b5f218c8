"""Where rounding decides what becomes of an infinity: inputs with huge finite numbers in place of infinite ones.

An infinite weight times a number is +inf, -inf or NaN by that number's sign. Where the number is zero within rounding,
as x - mean is in one of millions of rows of a norm, eager promises none of the three. With the infinities replaced,
such an element is finite and zero lies within its allowed error (`Allowance.undetermined`); elsewhere it is huge, or it
is zero as no rounding would change (-inf * sigmoid(-inf), x - x), and the class stays demanded.

No two infinities get the same number: +inf - inf is NaN whatever is added to it, and H - H + 1 would be taken for a 1
lost in rounding. They are between H and 2 H in size, spread by the golden ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import torch
from torch import Tensor

from fusescout.inputs import raw
from fusescout.tolerance import Allowance

HUGE = {torch.float16: 2.0**12, torch.bfloat16: 2.0**40, torch.float32: 2.0**40, torch.float64: 2.0**40}
"""H: its square is finite, but for float16, and a rounding error times H isn't small. 8-bit floats have none."""
Evaluate = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
GOLDEN = (5**0.5 - 1) / 2


def without_infinities(inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """The inputs, strides and the memory between elements included, with finite numbers for infinities of their sign.

    NaN stays NaN, 8-bit floats and what isn't floating stay themselves. None if there is no infinity.
    """
    made, count = [], 0
    for tensor in inputs:
        if tensor.dtype not in HUGE:
            made.append(tensor)
            continue
        stored = raw(tensor).clone().view(tensor.dtype)
        at = stored.isinf().nonzero().flatten()
        order = torch.arange(count, count + at.numel(), dtype=torch.float64, device=at.device)
        size = HUGE[tensor.dtype] * (1 + order * GOLDEN % 1)
        stored[at] = (size * stored[at].sign()).to(tensor.dtype)
        made.append(stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        count += at.numel()
    return made if count else None


class Infinities:
    """Finds, case by case and when asked, the elements at which rounding decides about an infinity.

    Args:
        eager: the sub-graph as the framework runs it.
        truth: the same in float64.
        fits: whether there is room to keep what was found.
    """

    def __init__(self, eager: Evaluate, truth: Evaluate, fits: Callable[[Sequence[Tensor]], bool]) -> None:
        self.eager, self.truth, self.fits = eager, truth, fits
        self._kept: dict[str, list[Tensor]] = {}

    def undetermined(self, case: str, inputs: Sequence[Tensor], output: int) -> Tensor | None:
        """Flat positions in an output on the inputs of a case; None where no input is infinite."""
        try:
            found = self._kept[case] if case in self._kept else self._find(inputs)
            if case not in self._kept and self.fits(found):
                self._kept[case] = found
        except Exception:  # isolation boundary: what can't be run, for want of memory say, excuses nothing
            return None
        return found[output] if found else None

    def _find(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """For each output; empty where no input is infinite.

        Elements beyond H^1.5 are made of more than one infinity. They are determined, and their errors, which are as
        far beyond all others, count for none: few neighbours are as large, so smaller elements would be held to them.
        """
        if (finite := without_infinities(inputs)) is None:
            return []
        limit = max(HUGE[t.dtype] for t in inputs if t.dtype in HUGE) ** 1.5
        found = []
        for e, t in zip(self.eager(finite), self.truth(finite), strict=True):
            known = t.masked_fill(t.abs() > limit, float("nan")) if t.is_floating_point() else t
            found.append(Allowance(e, known).undetermined())
        return found
