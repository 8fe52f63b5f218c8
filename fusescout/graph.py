"""The operators of all captured graphs as one networkx graph, each with its cost, its time and its physical bound.

Node ids are "graph:node", the same names as in the kernel table of a profile. No torch, and networkx is imported only
when a graph is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from fusescout.device import Device
from fusescout.flops import Cost
from fusescout.flops import cost
from fusescout.flops import op_class
from fusescout.ir import FLOAT8
from fusescout.ir import FLOATS
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Out
from fusescout.ir import TensorSpec
from fusescout.session import EdgeRow
from fusescout.session import OpRow

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

    from fusescout.profiling.result import Profile

_ROW = (
    "graph",
    "node",
    "op",
    "module",
    "source",
    "shapes",
    "time_us",
    "kernels",
    "flops",
    "bytes",
    "bound",
    "bound_share",
)
_MATMULS = frozenset({"gemm", "conv", "attention"})


def node_id(graph: int, node: str) -> str:
    """The id of a node across graphs."""
    return f"{graph}:{node}"


@dataclass(frozen=True)
class OpGraph:
    """Operators (no inputs, no parameters) and their data flow.

    Attributes:
        digraph: a `networkx.DiGraph`; per node graph, node, op, kind, module, source, spec, flops, bytes, time_us,
            backward_us, kernels, bound ("memory", "compute", "launch", "free" or ""), bound_us and bound_share.
    """

    digraph: nx.DiGraph
    total_us: float

    @classmethod
    def build(cls, graphs: Sequence[Graph], profile: Profile | None, device: Device) -> OpGraph:
        """Join captured graphs, measured times and measured ceilings.

        Args:
            graphs: captured graphs, each with its own index.
            profile: times of the nodes, or None: then every time is 0 and only costs and bounds are known.
            device: the ceilings; a rate of 0 means unknown.
        """
        import networkx as nx

        digraph = nx.DiGraph()
        for graph in graphs:
            for node in graph.nodes:
                if not node.is_op:
                    continue
                specs = [graph.by_name[i].out for i in node.inputs]
                spent = profile.node(graph.index, node.name) if profile else None
                time_us = spent.time_us if spent else 0.0
                price = cost(node, specs)
                bound, bound_us = physical_bound(node, specs, price, device)
                digraph.add_node(
                    node_id(graph.index, node.name),
                    graph=graph.index,
                    node=node.name,
                    op=node.op,
                    kind=op_class(node.target),
                    module=node.module,
                    source=node.source,
                    spec=node.out,
                    shapes=_shapes(specs, node.out),
                    flops=price.flops,
                    bytes=price.bytes,
                    time_us=time_us,
                    backward_us=spent.backward_us if spent else 0.0,
                    kernels=spent.kernels if spent else 0,
                    bound=bound,
                    bound_us=bound_us,
                    bound_share=min(bound_us / time_us, 1.0) if time_us > 0 else 0.0,
                )
                for name in node.inputs:
                    if graph.by_name[name].is_op:
                        digraph.add_edge(node_id(graph.index, name), node_id(graph.index, node.name))
        return cls(digraph, profile.kernel_us if profile else 0.0)

    def time_us(self, graph: int, node: str) -> float:
        """Forward time of one node in one step; 0 for inputs and for what was not seen."""
        return float(self._value(graph, node, "time_us"))

    def backward_us(self, graph: int, node: str) -> float:
        """Time of the backward kernels of one node in one step; 0 in inference."""
        return float(self._value(graph, node, "backward_us"))

    def rows(self) -> list[OpRow]:
        """One row per operator, in graph order."""
        return [
            OpRow(share=a["time_us"] / self.total_us if self.total_us else 0.0, **{name: a[name] for name in _ROW})
            for _, a in self.digraph.nodes(data=True)
        ]

    def edges(self) -> list[EdgeRow]:
        """Data flow between operators of one graph."""
        nodes = self.digraph.nodes
        return [
            EdgeRow(graph=nodes[a]["graph"], source=nodes[a]["node"], target=nodes[b]["node"])
            for a, b in self.digraph.edges
        ]

    def to_pandas(self) -> pd.DataFrame:
        """All node attributes as a frame, indexed by "graph:node"."""
        import pandas as pd

        return pd.DataFrame.from_dict(dict(self.digraph.nodes(data=True)), orient="index")

    def _value(self, graph: int, node: str, name: str) -> Any:
        key = node_id(graph, node)
        return self.digraph.nodes[key][name] if key in self.digraph else 0.0


def physical_bound(node: Node, specs: Sequence[Out], price: Cost, device: Device) -> tuple[str, float]:
    """What limits one execution of a node, and the µs it can't go below.

    "launch" means that the work itself would take less than the host needs to launch it.
    """
    if price.flops == 0 and price.bytes == 0:
        return ("free", 0.0) if op_class(node.target) in ("view", "copy", "pointwise") else ("", 0.0)
    memory_us = price.bytes / device.copy_bytes_per_s * 1e6 if device.copy_bytes_per_s else 0.0
    compute_us = 0.0
    if op_class(node.target) in _MATMULS:
        # Only matrix products can reach the matmul rate; what else computes is limited by memory long before.
        rate = device.flops_per_s.get(_dtype(specs, node.out), 0.0)
        compute_us = price.flops / rate * 1e6 if rate else 0.0
    bound_us = max(memory_us, compute_us)
    if bound_us == 0:
        return "", 0.0
    if bound_us < device.launch_us:
        return "launch", bound_us
    return ("compute" if compute_us > memory_us else "memory"), bound_us


def _dtype(specs: Sequence[Out], out: Out) -> str:
    found = [s.dtype for s in (*specs, out) if isinstance(s, TensorSpec) and s.dtype in FLOATS | FLOAT8]
    return found[0] if found else ""


def _shapes(specs: Sequence[Out], out: Out) -> str:
    return f"{', '.join(map(_text, specs))} → {_text(out)}" if specs else _text(out)


def _text(out: Out) -> str:
    if isinstance(out, tuple):
        return f"({', '.join(map(_text, out))})"
    return str(out) if out is not None else "?"
