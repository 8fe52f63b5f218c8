"""Hand-written attention as one call of scaled_dot_product_attention."""

from __future__ import annotations

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import ints
from fusescout.contenders.framework.surgery import is_plain
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import numbers
from fusescout.contenders.framework.surgery import splice
from fusescout.contenders.framework.surgery import swapped
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import refs


def attention(graph: Subgraph) -> Step | None:
    """matmul, scale, mask, softmax, matmul as one call of scaled_dot_product_attention."""
    for index, op in numbered(graph):
        if op.name not in ("softmax", "_softmax") or op.args[1] not in (-1, len(graph.tensor(index).shape) - 1):
            continue
        members, weights = {index}, index
        while (users := graph.users(weights)) and len(users) == 1 and is_plain(graph, users[0]):
            weights = users[0]
            members.add(weights)
        last = graph.op_of(users[0]) if len(users) == 1 and not members & set(graph.outputs) else None
        if last is None or last.name not in ("matmul", "bmm") or last.args[0] != Ref(weights):
            continue
        found = _scores(graph, op.inputs[0])
        if found is None:
            continue
        query, key, mask, scale, inner = found
        members |= inner | {users[0]}
        if any(i in graph.outputs or not set(graph.users(i)) <= members for i in members - {users[0]}):
            continue
        specs = [
            graph.value(i) for i in (query, key, *map(int, refs(last.args[1])), *(() if mask is None else (mask,)))
        ]
        if len({s.dtype for s in specs if isinstance(s, TensorSpec)}) != 1 or specs[-1] is None:
            continue
        turn = graph.op_of(key)
        new: list[Op] = []
        rank = len(graph.tensor(key).shape)
        if turn and turn.name == "transpose" and {d % rank for d in ints(turn.args[1:])} == {rank - 2, rank - 1}:
            straight: Ref = Ref(turn.inputs[0])
        else:
            new.append(Op("aten.transpose.int", (Ref(key), -1, -2), (), swapped(graph.tensor(key))))
            straight = Ref(-1)
        masked = None if mask is None else Ref(mask)
        call = (Ref(query), straight, last.args[1], masked, 0.0, False)
        new.append(Op("aten.scaled_dot_product_attention.default", call, (("scale", scale),), last.out))
        # Some kernels give another layout than matmul does.
        new.append(Op("aten.contiguous.default", (Ref(-len(new)),), (), last.out))
        return "scaled_dot_product_attention", splice(graph, members, users[0], new)
    return None


def _scores(graph: Subgraph, index: int) -> tuple[int, int, int | None, float, set[int]] | None:
    """(query, transposed key, mask, scale, members) of the scores that go into a softmax."""
    members: set[int] = set()
    mask, scale = None, 1.0
    for _ in range(6):
        op = graph.op_of(index)
        if op is None:
            return None
        members.add(index)
        found = numbers(op)
        if op.name in ("matmul", "bmm"):
            return int(op.inputs[0]), int(next(refs(op.args[1]))), mask, scale, members
        if op.name in ("mul", "div") and len(op.inputs) == 1 and len(found) == 1 and op.args[0] == Ref(op.inputs[0]):
            scale *= found[0] if op.name == "mul" else 1 / found[0]
        elif op.name == "add" and len(op.inputs) == 2 and mask is None and scale == 1.0 and not op.kwargs:
            inner = [i for i in op.inputs if graph.tensor(i).shape == graph.tensor(index).shape and graph.op_of(i)]
            if not inner:
                return None
            mask = next(i for i in op.inputs if i != inner[0])
            index = inner[0]
            continue
        elif not is_plain(graph, index):
            return None
        index = op.inputs[0]
    return None
