"""The sum of two convolutions with constant biases: one bias for both, as the shortcut of a residual block has it."""

from __future__ import annotations

from dataclasses import replace

from fusescout import convolution
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.convolution import BIAS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph


def shared_bias(graph: Subgraph) -> Step | None:
    """`conv(x, w, b) + conv(y, v, c)` becomes `conv(x, w, b + c) + conv(y, v)`."""
    for index, op in numbered(graph):
        if op.name != "add" or op.kwargs or len(op.args) != 2 or len(op.inputs) != 2:
            continue
        first, second = op.inputs
        ops = [graph.op_of(first), graph.op_of(second)]
        read = [convolution.read(graph, o) if o else None for o in ops]
        if any(r is None or r.bias is None for r in read) or any(
            graph.users(v) != (index,) or v in graph.outputs or graph.tensor(v).requires_grad for v in (first, second)
        ):
            continue
        one, other = ops
        assert one is not None
        assert other is not None
        if any(len(o.args) <= BIAS or not isinstance(o.args[BIAS], Ref) for o in (one, other)):
            continue
        spec = graph.tensor(int(one.args[BIAS].to))  # type: ignore[union-attr]
        if graph.tensor(first).shape != graph.tensor(second).shape or spec.dtype != graph.tensor(first).dtype:
            continue
        new = [
            Op("aten.add.Tensor", (one.args[BIAS], other.args[BIAS]), (), replace(spec, constant=False)),
            replace(one, args=(*one.args[:BIAS], Ref(-1), *one.args[BIAS + 1 :])),
            replace(other, args=(*other.args[:BIAS], None, *other.args[BIAS + 1 :])),
            replace(op, args=(Ref(-2), Ref(-3))),
        ]
        return "shared bias", splice(graph, {first, second, index}, index, new)
    return None
