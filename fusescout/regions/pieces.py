"""Finds pointwise chains in which a tensor is taken to pieces and put together again: rotary embeddings, pooling."""

from __future__ import annotations

import math

from fusescout.flow import Flow
from fusescout.flow import grow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import SLICES
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of

JOINS = frozenset({"cat", "stack"})
WINDOWS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"})
VIEWS = REGROUPS | SLICES
MOST_PIECES = 16


def find_pieces(flow: Flow) -> list[set[str]]:
    """For each `cat`, `stack` and pooling the pointwise operators around it, on the whole and on its pieces."""
    graph = flow.graph
    taken: set[str] = set()
    regions = []
    for node in graph.nodes:
        if node.op in WINDOWS and isinstance(node.out, TensorSpec) and node.out.numel:
            regions.append(_around_window(flow, node))
        if node.op not in JOINS or node.name in taken or not isinstance(node.out, TensorSpec) or not node.out.numel:
            continue
        region = _without_rim(graph, _around(flow, node, node.out))
        taken |= {n for n in region if graph.by_name[n].op in JOINS}
        if node.name in region and any(is_pointwise(graph.by_name[n]) for n in region):
            regions.append(region)
    return regions


def _around_window(flow: Flow, node: Node) -> set[str]:
    """A pooling operator with what is computed of its result, and element by element in front of it."""
    graph = flow.graph
    shapes = {shape_of(node), shape_of(graph.by_name[node.inputs[0]])}
    return grow(flow, {node.name}, lambda n: is_pointwise(n) and shape_of(n) in shapes, backward=True)


def _around(flow: Flow, node: Node, whole: TensorSpec) -> set[str]:
    """Grow from a join over what has the same dimensions in front of the joined one, and is as large or a piece."""
    joined = node.args[1] if len(node.args) > 1 else 0
    front = whole.shape[: (joined if isinstance(joined, int) else 0) % len(whole.shape)]

    def fits(other: Node) -> bool:
        shape = shape_of(other)
        if other.op == "unsqueeze":  # what queries and keys are multiplied with alike
            return True
        if shape is None or other.mutates or shape[: len(front)] != front:
            return False
        small, large = sorted((math.prod(shape), whole.numel))
        if small == 0 or large % small or large // small > MOST_PIECES:
            return False
        return is_pointwise(other) or other.op in VIEWS or other.op in JOINS

    return grow(flow, {node.name}, fits, backward=True)


def _without_rim(graph: Graph, names: set[str]) -> set[str]:
    """Drop what would be returned as a view, or smaller than the rest."""
    names = set(names)
    while True:
        largest = max((_numel(graph.by_name[name]) for name in names), default=0)
        loose = set()
        for name in names:
            node = graph.by_name[name]
            escapes = name in graph.outputs or any(u not in names for u in graph.users[name])
            if escapes and (node.op in VIEWS or _numel(node) < largest):
                loose.add(name)
        if not loose:
            return names
        names -= loose


def _numel(node: Node) -> int:
    return node.out.numel if isinstance(node.out, TensorSpec) else 0
