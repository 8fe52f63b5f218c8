"""Says of masks in buffers what they hold, where that is causal order: `torch.tril(ones)` as minGPT registers it.

Written-out attention that fills the scores behind such a mask with minus infinity is what the framework's causal
attention computes, without a mask in memory and without the scores that it hides. Only the values tell, so they are
read while a graph is captured, from the model's own buffer. A buffer may be written to later: `watched.py` finds out.

Nodes that are made of literals alone (a mask made in `forward`) are evaluated as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fusescout.capture.masks import MAX_NUMEL
from fusescout.capture.masks import for_real
from fusescout.capture.settled import settled
from fusescout.hoisting import CONTENT
from fusescout.hoisting import part_off
from fusescout.ir import LOWER
from fusescout.ir import UPPER

aten = torch.ops.aten
PLACE = {
    aten.masked_fill.Scalar: 1,
    aten.masked_fill.Tensor: 1,
    aten.where.self: 0,
    aten.where.ScalarOther: 0,
    aten.where.ScalarSelf: 0,
}
"""Operators that choose between scores and a number, and which argument chooses."""


def note_contents(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write into the meta of masks what they hold, if that is causal order; `inputs` that are fake tell nothing."""
    found = [node.args[PLACE[node.target]] for node in gm.graph.nodes if node.target in PLACE]
    known = settled(gm) if found else set()
    masks = [node for node in dict.fromkeys(found) if node in known and _may_be(node.meta["val"])]
    if not masks:
        return
    prepare, sources = part_off(gm, masks)
    given = [inputs[k] for k in sources]
    if not all(isinstance(t, Tensor) and not isinstance(t, FakeTensor) and not t.is_inference() for t in given):
        return
    with for_real():
        for node, value in zip(masks, prepare(*given), strict=True):
            if content := content_of(value):
                node.meta[CONTENT] = content


def content_of(mask: Tensor) -> str:
    """ "lower" if it is true on and below the diagonal of each matrix and nowhere else, "upper" if it's the reverse.

    Empty if it is neither. Rows count from the top left, as those of `is_causal` do.
    """
    below = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if bool((mask == below).all()):
        return LOWER
    return UPPER if bool((mask != below).all()) else ""


def _may_be(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.bool
        and value.dim() >= 2
        and 0 < value.numel() <= MAX_NUMEL
        and min(value.shape[-2:]) > 1
    )
