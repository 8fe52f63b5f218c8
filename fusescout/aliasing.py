"""Which values of a captured graph share memory, and whether a region may be computed into memory of its own.

A fused kernel writes new tensors. Where the region's results shared memory with each other or with an input, and
somebody writes to that memory later, the two would drift apart silently; such regions are no candidates.
"""

from __future__ import annotations

from collections.abc import Collection

from fusescout.flops import op_class
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec

MAY_RETURN_ARGUMENT = frozenset(
    {
        "positive",
        "pin_memory",
        "_reshape_alias",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "mH",
        "matrix_H",
        "linalg_diagonal",
    }
)
"""Operators outside the view class whose result may live in their argument's memory.

`to` and `contiguous` aren't among them: capture leaves out those that give back their argument.
"""
STATISTICS = {"batch_norm": (3, 4), "instance_norm": (3, 4)}
"""Arguments that operators write though their schema doesn't say so."""


class Aliases:
    """Memory of a graph's values.

    Attributes:
        root: for each value the one whose memory it lives in; itself where an operator makes new memory.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.root: dict[str, str] = {}
        self._written: dict[str, int] = {}
        """Root → position of the last node that writes to it."""
        for position, node in enumerate(graph.nodes):
            self.root[node.name] = self._root_of(node)
            for name in _written_by(node):
                self._written[self.root[name]] = position
        self._position = {n.name: k for k, n in enumerate(graph.nodes)}
        self._returned = {self.root[name] for name in graph.outputs if name in self.root}

    def _root_of(self, node: Node) -> str:
        shares = node.mutates or op_class(node.target) == "view" or node.op in MAY_RETURN_ARGUMENT
        if node.is_op and shares and node.args and isinstance(node.args[0], Ref):
            return self.root[str(node.args[0].to)]
        return node.name

    def separable(self, region: Collection[str]) -> bool:
        """Whether new memory for each result, made from inputs that stay as they are, changes nothing."""
        results = [self.root[name] for name in self.graph.escapes(region)]
        watched = {root for root in results if root in self._written or root in self._returned}
        if any(root not in region or results.count(root) > 1 for root in watched):
            return False
        return not (self._needs_gradients(region) and self._overwritten(region))

    def _needs_gradients(self, region: Collection[str]) -> bool:
        outs = (self.graph.by_name[name].out for name in region)
        return any(isinstance(out, TensorSpec) and out.requires_grad for out in outs)

    def _overwritten(self, region: Collection[str]) -> bool:
        """Whether an input is written later: the backward pass, which recomputes from them, would find other values."""
        first = min(self._position[name] for name in region)
        inputs = {i for name in region for i in self.graph.by_name[name].inputs if i not in region}
        return any(self._written.get(self.root[name], -1) > first for name in inputs)


def _written_by(node: Node) -> tuple[str, ...]:
    """The values a node writes to; all its inputs where that isn't known."""
    if not node.mutates:
        return ()
    places: tuple[int, ...] | None = STATISTICS.get(node.op)
    if places is None and node.target.startswith("aten.") and node.op.endswith("_") and not node.op.endswith("__"):
        places = (0,)
    if places is None:
        return node.inputs
    given = (node.args[k] for k in places if k < len(node.args))
    return tuple(str(a.to) for a in given if isinstance(a, Ref))
