"""Lays attention masks out in memory so that a fused attention kernel can read them.

PyTorch's fused kernels want a mask whose last dimension is adjacent in memory; given any other they aren't used, and
attention runs as some twenty kernels in float32: 1233 µs a layer in T5-base's encoder, whose bias comes out of a table
with the heads last (16x512, bf16, H200), 1042 µs in a traced ViT-B/16, whose mask is expanded along the keys (64x197).
A dense copy of the mask is made once for all layers that read it, and without the dimensions it is broadcast along.
On a GPU its rows start at multiples of 16 elements: of any other mask each layer makes a padded copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload

from fusescout.capture.encode import target_name
from fusescout.capture.masks import ATTENTION
from fusescout.capture.masks import Arguments
from fusescout.capture.masks import aten
from fusescout.capture.masks import mask_of
from fusescout.capture.masks import with_mask
from fusescout.capture.settled import is_pure
from fusescout.capture.settled import memory
from fusescout.capture.settled import written_memory
from fusescout.flops import op_class

ALIGNMENT = 16
"""Elements. torch's `aligned_tensor` in sdp_utils asks it of every stride but the last."""


def lay_out_masks(gm: fx.GraphModule) -> dict[fx.Node, Arguments]:
    """Give attention nodes masks that fused kernels take, in place. Nodes need `meta["val"]`; new ones have none.

    Returns:
        The former arguments of each attention node that was changed.
    """
    changed: dict[fx.Node, Arguments] = {}
    made: dict[fx.Node, fx.Node] = {}
    touched = written_memory(gm)
    for node in gm.graph.find_nodes(op="call_function", target=ATTENTION):
        mask = mask_of(node)
        if not isinstance(mask, fx.Node) or memory(mask) & touched or _is_readable(mask):
            continue
        if mask not in made:
            with gm.graph.inserting_before(node):
                made[mask] = _Writer(gm.graph, node, touched).dense(mask)
        changed[node] = (node.args, dict(node.kwargs))
        with_mask(node, made[mask])
    return changed


def _is_readable(mask: fx.Node) -> bool:
    value = mask.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2 or not all(type(n) is int for n in value.shape):
        return True
    if value.stride(-1) != 1:
        return value.size(-1) == 1
    return value.device.type != "cuda" or all(stride % ALIGNMENT == 0 for stride in value.stride()[:-1])


class _Writer:
    """Writes the operators of one mask, where nodes are being inserted."""

    def __init__(self, graph: fx.Graph, near: fx.Node, touched: set[int]) -> None:
        self.graph, self.touched = graph, touched
        self.meta = {k: v for k, v in near.meta.items() if k in ("nn_module_stack", "stack_trace")}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(self.meta)
        return node

    def dense(self, mask: fx.Node) -> fx.Node:
        """The mask over dense memory, expanded along what it is constant along."""
        value: Tensor = mask.meta["val"]
        cut = not torch.is_grad_enabled()  # else the mask's own gradient would be that of its first element alone
        constant = _constant(mask, self.touched, {}) - {-1, -2} if cut else set()
        source = self.without(mask, constant)
        short = -value.size(-1) % ALIGNMENT if value.device.type == "cuda" else 0
        if short:
            padded = self.call(aten.constant_pad_nd.default, source, [0, short])
            dense = self.call(aten.slice.Tensor, padded, value.dim() - 1, 0, value.size(-1))
        else:
            dense = self.call(aten.contiguous.default, source)
        return self.call(aten.expand.default, dense, list(value.shape)) if constant else dense

    def without(self, node: fx.Node, dims: set[int]) -> fx.Node:
        """The value with those dimensions, counted from the last, cut to their first element.

        A pointwise operator's operands are cut instead of its result, so that the whole is never made.
        """
        value: Tensor = node.meta["val"]
        dims = {d for d in dims if -d <= value.dim() and value.size(d) > 1}
        if dims and not all(value.stride(d) == 0 for d in dims):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.without(n, dims))
            return self.call(node.target, *args, **kwargs)
        for d in sorted(dims):
            node = self.call(aten.slice.Tensor, node, value.dim() + d, 0, 1)
        return node


def _constant(node: fx.Node, touched: set[int], known: dict[fx.Node, set[int]]) -> set[int]:
    """The dimensions, counted from the last, of more than one element along which a value is the same by its making.

    What is made of memory that something writes to (`touched`) is not made again.
    """
    value = node.meta.get("val")
    if node in known or not isinstance(value, Tensor):
        return known.get(node, set())
    wide = {d for d in range(-value.dim(), 0) if value.size(d) > 1}
    found = {d for d in wide if value.stride(d) == 0}
    if _is_pointwise(node) and not any(memory(n) & touched for n in node.all_input_nodes):
        for source in node.all_input_nodes:
            operand = source.meta["val"]
            same = _constant(source, touched, known)
            wide = {d for d in wide if -d > operand.dim() or operand.size(d) == 1 or d in same}
        found |= wide
    known[node] = found
    return found


def _is_pointwise(node: fx.Node) -> bool:
    return (
        isinstance(node.target, OpOverload)
        and is_pure(node)  # dropout draws for each element
        and op_class(target_name(node)) == "pointwise"
        and bool(node.all_input_nodes)
        and all(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    )
