"""Finds vocabulary heads with their loss: a matrix product whose scores only a cross entropy reads."""

from __future__ import annotations

from fusescout.flow import MAX_OPS
from fusescout.flow import Flow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import SLICES
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of
from fusescout.regions.rows import LOSSES

PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul"})
BETWEEN = REGROUPS | SLICES | {"contiguous", "clone", "transpose", "permute", "log_softmax", "_log_softmax"}
"""What may lie between the product and its loss, besides pointwise operators on the scores."""


def find_losses(flow: Flow) -> list[set[str]]:
    """Each loss with the product its scores come from and everything between, where nobody else reads any of it."""
    graph = flow.graph
    regions = []
    for node in graph.nodes:
        if node.op not in LOSSES or node.dead or node.mutates:
            continue
        path = _back_to_product(graph, node)
        if path:
            regions.append(path | {node.name})
    return regions


def _back_to_product(graph: Graph, loss: Node) -> set[str]:
    """Nodes from a product to what the loss reads; none if something else comes first."""
    path: set[str] = set()
    name = _scores(graph, loss)
    while name is not None and len(path) < MAX_OPS:
        node = graph.by_name[name]
        if node.mutates or name in graph.outputs or len(graph.users[name]) != 1:
            return set()
        path.add(name)
        if node.op in PRODUCTS:
            return path
        if node.op not in BETWEEN and not is_pointwise(node):
            return set()
        name = _scores(graph, node)
    return set()


def _scores(graph: Graph, node: Node) -> str | None:
    """The input that holds the scores: the first one, or of a pointwise operator's the one of its own shape."""
    if is_pointwise(node):
        return next((i for i in node.inputs if shape_of(graph.by_name[i]) == shape_of(node)), None)
    first = node.args[0] if node.args else None
    return str(first.to) if isinstance(first, Ref) else None
