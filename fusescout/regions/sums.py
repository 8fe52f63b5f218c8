"""Finds linears and convolutions whose results are only summed up: the sum can be taken before (`sums.py`)."""

from __future__ import annotations

from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of
from fusescout.sums import BETWEEN
from fusescout.sums import PRODUCTS
from fusescout.sums import fits
from fusescout.sums import total


def find_sums(graph: Graph) -> list[tuple[str, set[str]]]:
    """Family and nodes: a product, factors and summands of its columns or channels behind it, and the sum."""
    found = []
    for node in graph.nodes:
        if node.op not in PRODUCTS or not node.is_op or not isinstance(node.out, TensorSpec):
            continue
        names = _to_sum(graph, node)
        if names:
            found.append(("gemm_epilogue" if node.op == "linear" else "conv_epilogue", names))
    return found


def _to_sum(graph: Graph, product: Node) -> set[str]:
    """The product and all up to the sum that alone reads it; nothing if something else comes first."""
    shape, names, last = shape_of(product), {product.name}, product
    assert shape is not None
    while len(graph.users[last.name]) == 1 and last.name not in graph.outputs:
        after = graph.by_name[graph.users[last.name][0]]
        what = total(after.op, after.args, after.kwargs, len(shape))
        if what is not None and not after.dead and isinstance(after.out, TensorSpec):
            return (
                {*names, after.name} if after.inputs == (last.name,) and fits(product.op, what, len(shape)) else set()
            )
        others = [graph.by_name[i].out for i in after.inputs if i != last.name]
        small = all(isinstance(s, TensorSpec) and s.numel <= max(shape) for s in others)
        if after.op not in BETWEEN or not is_pointwise(after) or shape_of(after) != shape or not small:
            return set()
        names.add(after.name)
        last = after
    return set()
