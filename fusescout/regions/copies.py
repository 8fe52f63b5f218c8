"""Extends a region by copies that lay its results out in another order: its kernel can write that order itself.

A model whose convolutions run channels-last ends in such copies, since what comes out of it has eager's strides.
"""

from __future__ import annotations

from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec

COPIES = frozenset({"clone", "contiguous"})


def reorders(node: Node, graph: Graph) -> bool:
    """Whether a node copies its input to other strides."""
    if node.op not in COPIES or node.dead or not isinstance(node.out, TensorSpec):
        return False
    given = graph.by_name[node.inputs[0]].out
    return isinstance(given, TensorSpec) and given.stride != node.out.stride and given.numel > 0


def and_copies(graph: Graph, names: set[str]) -> set[str]:
    """With the copies that alone read a result of the region; the same set where there are none."""
    whole = set(names)
    for end in graph.escapes(names):
        users = graph.users[end]
        if end not in graph.outputs and len(users) == 1 and reorders(graph.by_name[users[0]], graph):
            whole.add(users[0])
    return whole


def find_copies(graph: Graph) -> list[set[str]]:
    """Each such copy alone: PyTorch's own takes four times its bytes' time, and something may be in front of it."""
    copies = (node for node in graph.nodes if node.is_op and reorders(node, graph))
    return [{node.name} for node in copies if not graph.by_name[node.inputs[0]].is_parameter]  # those are made once
