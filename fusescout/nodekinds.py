"""What kind of node one is to the region finders: pointwise, or only another view of the same memory."""

from __future__ import annotations

from fusescout.flops import op_class
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.randomness import draws

REGROUPS = frozenset({"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"})
REORDERS = frozenset({"t", "transpose", "permute"})
SLICES = frozenset({"slice", "select", "narrow"})


def shape_of(node: Node) -> tuple[int, ...] | None:
    return node.out.shape if isinstance(node.out, TensorSpec) else None


def is_pointwise(node: Node) -> bool:
    """True for element-by-element operators with one tensor result and no side effect."""
    if node.mutates or node.dead or not isinstance(node.out, TensorSpec) or node.out.numel == 0:
        return False
    if draws(node):
        return False
    if node.op == "batch_norm":
        return len(node.args) > 5 and node.args[5] is False
    return op_class(node.target) == "pointwise"
