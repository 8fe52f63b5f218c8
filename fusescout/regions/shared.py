"""Regions of several matrix products that read one input, each with parameters: q, k and v, gate and up."""

from __future__ import annotations

from collections import defaultdict

from fusescout.flow import Flow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.shared_input import projection

MOST = 8
"""Products of one region. An encoder's output is read by every layer of a decoder; that is no reason to compute keys
and values of all layers at once."""


def find_shared(flow: Flow, gated: list[set[str]]) -> list[set[str]]:
    """All products of an input, and those of each module by itself, except for what is one of `gated` already."""
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in flow.graph.nodes:
        if x := _input(flow.graph, node):
            readers[x].append(node)
    regions = []
    for nodes in readers.values():
        owners: dict[str, list[Node]] = defaultdict(list)
        for node in nodes:
            owners[node.module.rpartition(".")[0]].append(node)
        for members in (nodes, *owners.values()):
            names = {n.name for n in members}
            if 2 <= len(names) <= MOST and not any(names <= region for region in gated):
                regions.append(names)
    return regions


def _input(graph: Graph, node: Node) -> str | None:
    """What a node multiplies, if it does so with parameters only and no gradient is asked for."""
    found = projection(node)
    if found is None or node.dead or not isinstance(node.out, TensorSpec) or node.out.requires_grad:
        return None
    constants = [graph.by_name[str(v)] for v in (found.weight, found.bias) if v is not None]
    if not all(c.is_parameter for c in constants) or graph.by_name[str(found.x)].is_parameter:
        return None
    return str(found.x) if _suits(graph.by_name[str(found.x)], constants[0], node) else None


def _suits(x: Node, weight: Node, product: Node) -> bool:
    """One dtype, and one matrix as weight."""
    specs = [s for n in (x, weight, product) if isinstance(s := n.out, TensorSpec)]
    return len(specs) == 3 and len({s.dtype for s in specs}) == 1 and len(specs[1].shape) == 2
