"""`max` and `min` over a dimension whose places nobody reads, as the plain reductions that they are then."""

from dataclasses import replace

from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Subgraph

PLAIN = {"max": "amax", "min": "amin"}


def plain_extremes(graph: Subgraph) -> Subgraph:
    """`graph` with `amax` and `amin` for `max` and `min` over one or all dimensions; values keep their indices.

    Raises:
        Unsupported: the places of the extremes are read.
    """
    if not any(reduces(op) for op in graph.ops):
        return graph
    ops = []
    for k, op in enumerate(graph.ops, start=len(graph.inputs)):
        if reduces(op):
            users = [u for u in graph.users(k) if graph.users(u) or u in graph.outputs]
            if isinstance(op.out, tuple) and any(graph.op_of(u).args[1] != 0 for u in users):
                raise Unsupported(f"{op.target} whose indices are read")
            out = op.out[0] if isinstance(op.out, tuple) else op.out
            op = replace(op, target=f"aten.{PLAIN[op.name]}.default", out=out)
        elif op.name == "getitem" and reduces(graph.op_of(op.args[0].to)):
            op = replace(op, target="aten.alias.default", args=op.args[:1])
        ops.append(op)
    return Subgraph(graph.inputs, tuple(ops), graph.outputs)


def reduces(op: Op | None) -> bool:
    """Whether it is `max` or `min` over one or all dimensions, not of two tensors."""
    return op is not None and op.name in PLAIN and op.target.rpartition(".")[2] in ("dim", "default")
