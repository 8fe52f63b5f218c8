"""Rewrites a captured graph so that its convolutions run channels-last.

Convolution inputs are copied to channels-last memory where they aren't in it already, weights once, as prepared
constants (`hoisting.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload

from fusescout.convolution import CONVOLUTIONS
from fusescout.restride import Restride
from fusescout.restride import restride

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions."""


def channels_last(module: fx.GraphModule) -> str:
    """Rewrite an ATen graph in place.

    Returns:
        Why the graph stays as it is; empty if it was rewritten.
    """
    return restride(module, _ChannelsLast) if has_convolutions(module) else "it has no 2-D or 3-D convolution"


def has_convolutions(module: fx.GraphModule) -> bool:
    return any(_is_convolution(n) for n in module.graph.nodes)


def _is_convolution(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    value, name = node.meta.get("val"), node.target._schema.name.removeprefix("aten::")
    return name in CONVOLUTIONS and isinstance(value, Tensor) and value.dim() in FORMATS


class _ChannelsLast(Restride):
    def prepare(self, node: fx.Node) -> None:
        if _is_convolution(node):
            node.update_arg(0, self._last(node.args[0]))
            node.update_arg(1, self._last(node.args[1]))

    def _last(self, node: Any) -> fx.Node:
        """The value in channels-last memory."""
        value: Tensor = node.meta["val"]
        wanted = FORMATS[value.dim()]
        if value.is_contiguous(memory_format=wanted):
            return node  # type: ignore[no-any-return]
        order = (0, *range(2, value.dim()), 1)
        return self.in_order(node, order, wanted, self.is_constant(node))
