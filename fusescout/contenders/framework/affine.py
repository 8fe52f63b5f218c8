"""Weight and bias behind a norm that has none."""

from __future__ import annotations

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec


def affine(graph: Subgraph) -> Step | None:
    """Weight and bias that follow a norm without them go into the norm."""
    for index, op in numbered(graph):
        slots = {"rms_norm": 2, "layer_norm": 3}
        if op.name not in slots or len(op.args) <= slots[op.name] or (op.name == "rms_norm" and op.args[2] is not None):
            continue
        users = graph.users(index)
        if len(users) != 1 or index in graph.outputs or not (after := graph.op_of(users[0])):
            continue
        slot = 2 if op.args[2] is None and after.name == "mul" else 3 if op.name == "layer_norm" else 0
        scaled = (
            slot == 3 and after.name == "add" and op.args[2] is not None and op.args[3] is None and not after.kwargs
        )
        if not (slot == 2 or scaled):
            continue
        others = [i for i in after.inputs if i != index]
        spec = graph.value(others[0]) if len(others) == 1 else None
        if not isinstance(spec, TensorSpec) or spec.shape != graph.tensor(index).shape[-1:] or after.out is None:
            continue
        if spec.dtype != graph.tensor(index).dtype or graph.tensor(users[0]).dtype != spec.dtype:
            continue
        args = tuple(Ref(others[0]) if k == slot else a for k, a in enumerate(op.args))
        return f"{op.name} weight" if slot == 2 else f"{op.name} bias", splice(
            graph, {index, users[0]}, users[0], [Op(op.target, args, op.kwargs, after.out)]
        )
    return None
