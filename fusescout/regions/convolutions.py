"""Extends a region by the convolutions in front of it: their biases can be added in the region's pass."""

from __future__ import annotations

from fusescout.convolution import BIAS
from fusescout.convolution import CONVOLUTIONS
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec
from fusescout.nodekinds import REGROUPS

TURNS = REGROUPS | {"transpose", "permute", "t"}


def and_convolutions(graph: Graph, names: set[str]) -> set[str]:
    """With the convolutions that only this region reads, if they have a bias.

    Views of their results may lie between, as in front of ConvNeXt's layer norms.
    """
    whole = set(names)
    for name in {i for n in names for i in graph.by_name[n].inputs} - names:
        path: set[str] = set()
        while graph.by_name[name].op in TURNS and (names | path).issuperset(graph.users[name]):
            path.add(name)
            name = graph.by_name[name].inputs[0]
        own = name not in graph.outputs and (names | path).issuperset(graph.users[name])
        if own and _has_bias(graph.by_name[name]):
            whole |= path | {name}
    return whole


def _has_bias(node: Node) -> bool:
    plain = isinstance(node.out, TensorSpec) and not node.out.requires_grad
    return plain and node.op in CONVOLUTIONS and len(node.args) > BIAS and isinstance(node.args[BIAS], Ref)
