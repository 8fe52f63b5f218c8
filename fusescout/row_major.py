"""Rewrites a captured graph so that pointwise operators work on row-major memory.

A residual stream that begins with a transpose, as behind the patch or frame convolution of a vision or audio model,
stays transposed through the whole model: each sum takes its layout from the stream, and each norm copies its input.
Whisper's `add` of a transposed and a plain tensor takes 44 µs where its bytes take 9 (8x1500x512, bf16, H200). Here
the operands of a pointwise operator that would give transposed memory are copied to row-major memory first.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload

from fusescout.capture.encode import target_name
from fusescout.flops import op_class
from fusescout.restride import Restride
from fusescout.restride import restride


def row_major(module: fx.GraphModule) -> str:
    """Rewrite an ATen graph in place.

    Returns:
        Why the graph stays as it is; empty if it was rewritten.
    """
    if not transposed(module):
        return "its pointwise operators give row-major memory"
    return restride(module, _RowMajor)


def transposed(module: fx.GraphModule) -> list[fx.Node]:
    """The pointwise operators whose results are dense, but not in row-major order. Nodes need `meta["val"]`."""
    return [n for n in module.graph.nodes if _is_pointwise(n) and _is_turned(n.meta.get("val"))]


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and op_class(target_name(node)) == "pointwise"


def _is_turned(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_contiguous()


class _RowMajor(Restride):
    def prepare(self, node: fx.Node) -> None:
        if not _is_pointwise(node) or not _is_turned(self.value(node)):
            return
        value: Tensor = node.meta["val"]
        order = tuple(range(value.dim()))
        for source in node.all_input_nodes:
            operand = source.meta.get("val")
            if _is_turned(operand) and operand.shape == value.shape:
                copy = self.in_order(source, order, torch.contiguous_format, self.is_constant(source))
                node.replace_input_with(source, copy)
