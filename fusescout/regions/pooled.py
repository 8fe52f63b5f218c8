"""Finds 1x1 convolutions that only an average pooling reads, with what is computed of each pixel in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusescout.convolution import CONVOLUTIONS
from fusescout.ir import Graph
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of

AVERAGES = frozenset({"avg_pool1d", "avg_pool2d", "avg_pool3d"})
PADDING, ROUNDS_UP, COUNTS, DIVISOR = 3, 4, 5, 6
"""Arguments of aten.avg_pool2d."""


def is_plain_average(name: str, args: Sequence[Any]) -> bool:
    """Whether each result is the mean of as many pixels: nothing is padded, cut off or divided otherwise."""
    padding = args[PADDING] if len(args) > PADDING else 0
    whole = not any(padding) if isinstance(padding, tuple) else padding == 0
    exact = len(args) <= ROUNDS_UP or args[ROUNDS_UP] is False
    return name in AVERAGES and whole and exact and (len(args) <= DIVISOR or args[DIVISOR] is None)


def pooled_share(graph: Subgraph, op: Op) -> float:
    """The part of a product's results that has to be computed: a 1x1 convolution's pixels may be averaged before."""
    value = len(graph.inputs) + graph.ops.index(op)
    users = graph.users(value)
    pool = graph.op_of(users[0]) if len(users) == 1 and value not in graph.outputs else None
    if pool is None or op.name not in CONVOLUTIONS or not is_plain_average(pool.name, pool.args):
        return 1.0
    whole, weight = op.out, graph.value(op.inputs[1])
    if not isinstance(whole, TensorSpec) or not isinstance(weight, TensorSpec) or any(n != 1 for n in weight.shape[2:]):
        return 1.0
    return pool.out.numel / whole.numel if isinstance(pool.out, TensorSpec) else 1.0


def find_pooled(graph: Graph) -> list[set[str]]:
    """For each: the convolution and the pooling, and both with everything pointwise that only they read."""
    found = []
    for node in graph.nodes:
        readers = graph.users[node.name]
        if node.op not in CONVOLUTIONS or len(readers) != 1 or node.name in graph.outputs or not node.is_op:
            continue
        pool, weight = graph.by_name[readers[0]], graph.by_name[node.inputs[1]].out
        if not is_plain_average(pool.op, pool.args) or not isinstance(weight, TensorSpec) or weight.dtype != "float32":
            continue
        if any(n != 1 for n in weight.shape[2:]) or not isinstance(node.args[0], Ref):
            continue
        names = {node.name, pool.name}
        found += [names, _with_front(graph, names, str(node.args[0].to))]
    return found


def _with_front(graph: Graph, names: set[str], first: str) -> set[str]:
    names, shape, todo = set(names), shape_of(graph.by_name[first]), [first]
    while todo:
        node = graph.by_name[todo.pop()]
        own = node.name not in graph.outputs and names.issuperset(graph.users[node.name])
        if node.name not in names and own and node.is_op and is_pointwise(node) and shape_of(node) == shape:
            names.add(node.name)
            todo += node.inputs
    return names
