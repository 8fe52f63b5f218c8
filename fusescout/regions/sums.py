"""Finds linears and convolutions whose results are only summed up: the sum can be taken before (`sums.py`).

What is left of a linear's columns is a row's reduction of its input, so what follows in the shape of a sum or of that
input, as a residual is, can be computed beside it.
"""

from __future__ import annotations

from fusescout.convolution import CONVOLUTIONS
from fusescout.flow import Flow
from fusescout.flow import grow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.ir import refs
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of
from fusescout.sums import BETWEEN
from fusescout.sums import MATMULS
from fusescout.sums import PRODUCTS
from fusescout.sums import TURNS
from fusescout.sums import fits
from fusescout.sums import total


def find_sums(flow: Flow) -> list[tuple[str, set[str]]]:
    """Family and nodes: a product, factors and summands of its columns or channels behind it, and the sum.

    Behind a linear's the same also with everything pointwise that follows.
    """
    graph, found = flow.graph, []
    for node in graph.nodes:
        if node.op not in PRODUCTS or not node.is_op or not isinstance(node.out, TensorSpec):
            continue
        names = _to_sum(graph, node)
        if not names:
            continue
        found.append(("conv_epilogue" if node.op in CONVOLUTIONS else "gemm_epilogue", names))
        if node.op not in CONVOLUTIONS and (more := _with_followers(flow, node, names)) != names:
            found.append(("gemm_epilogue", more))
    return found


def _with_followers(flow: Flow, linear: Node, names: set[str]) -> set[str]:
    """With what is pointwise in the shape of the sum or of the linear's input, as far as one value leaves it."""
    (end,) = flow.graph.escapes(names)
    shapes = {shape_of(flow.graph.by_name[end]), shape_of(flow.graph.by_name[str(next(refs(linear.args[0])))])}
    whole = grow(flow, names, lambda n: is_pointwise(n) and shape_of(n) in shapes, backward=False)
    while len(flow.graph.escapes(whole)) > 1:
        whole.discard(next(n.name for n in reversed(flow.graph.nodes) if n.name in whole))
    return whole


def _to_sum(graph: Graph, product: Node) -> set[str]:
    """The product and all up to the sum that alone reads it; nothing if something else comes first."""
    shape, names, last = shape_of(product), {product.name}, product
    assert shape is not None
    if product.op in MATMULS:
        weight = graph.by_name[product.inputs[-1]]
        if weight.op in TURNS:  # a view of a parameter
            names.add(weight.name)
            weight = graph.by_name[weight.inputs[0]]
        if not weight.is_parameter or len(product.inputs) != 2 or len(shape_of(weight) or ()) != 2:
            return set()
    while len(graph.users[last.name]) == 1 and last.name not in graph.outputs:
        after = graph.by_name[graph.users[last.name][0]]
        what = total(after.op, after.args, after.kwargs, len(shape))
        if what is not None and not after.dead and isinstance(after.out, TensorSpec):
            return (
                {*names, after.name} if after.inputs == (last.name,) and fits(product.op, what, len(shape)) else set()
            )
        others = [graph.by_name[i].out for i in after.inputs if i != last.name]
        small = all(isinstance(s, TensorSpec) and s.numel <= max(shape) for s in others)
        small = small and not (others and product.op in MATMULS)
        if after.op not in BETWEEN or not is_pointwise(after) or shape_of(after) != shape or not small:
            return set()
        names.add(after.name)
        last = after
    return set()
