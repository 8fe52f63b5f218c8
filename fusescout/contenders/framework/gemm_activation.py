"""A matrix product with bias and activation as one call into cuBLASLt."""

from __future__ import annotations

import math
from dataclasses import replace

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.contenders.framework.surgery import swapped
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph


def gemm_activation(graph: Subgraph) -> Step | None:
    """linear or addmm with a bias, then relu or tanh-GELU: one call into cuBLASLt."""
    for index, op in numbered(graph):
        gelu = op.name == "gelu" and op.kwarg("approximate", "none") == "tanh"
        before = graph.op_of(op.inputs[0]) if gelu or op.name == "relu" else None
        if before is None or before.name not in ("linear", "addmm") or len(before.args) != 3 or None in before.args:
            continue
        gemm = op.inputs[0]
        if graph.users(gemm) != (index,) or gemm in graph.outputs or before.kwargs:
            continue
        out = graph.tensor(index)
        new: list[Op] = []
        if before.name == "linear":
            x, weight = graph.tensor(before.inputs[0]), graph.tensor(before.inputs[1])
            if not all(isinstance(a, Ref) for a in before.args) or not x.is_contiguous:
                continue
            rows, inner, columns = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
            flat = replace(out, shape=(rows, columns), stride=(columns, 1))
            new = [
                Op(
                    "aten.view.default",
                    (before.args[0], (rows, inner)),
                    (),
                    replace(x, shape=(rows, inner), stride=(inner, 1)),
                ),
                Op("aten.t.default", (before.args[1],), (), swapped(weight)),
                Op("aten._addmm_activation.default", (before.args[2], Ref(-1), Ref(-2)), (("use_gelu", gelu),), flat),
                Op("aten.view.default", (Ref(-3), out.shape), (), out),
            ]
        else:
            new = [Op("aten._addmm_activation.default", before.args, (("use_gelu", gelu),), out)]
        return "_addmm_activation", splice(graph, {gemm, index}, index, new)
    return None
