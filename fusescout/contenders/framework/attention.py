"""Hand-written attention as one call of scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import replace

from fusescout.causal import behind_order
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import dense
from fusescout.contenders.framework.surgery import ints
from fusescout.contenders.framework.surgery import is_plain
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import numbers
from fusescout.contenders.framework.surgery import splice
from fusescout.contenders.framework.surgery import swapped
from fusescout.ir import Arg
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import refs
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import REORDERS

MOST_STEPS = 12
"""Operators between a product and its softmax."""


def attention(graph: Subgraph) -> Step | None:
    """matmul, scale, mask, softmax, matmul as one call of scaled_dot_product_attention."""
    for index, op in numbered(graph):
        if op.name not in ("softmax", "_softmax") or op.args[1] not in (-1, len(graph.tensor(index).shape) - 1):
            continue
        members, weights = {index}, index
        while (users := graph.users(weights)) and len(users) == 1 and _is_same(graph, users[0]):
            weights = users[0]
            members.add(weights)
        last = graph.op_of(users[0]) if len(users) == 1 and not members & set(graph.outputs) else None
        if last is None or last.name not in ("matmul", "bmm") or last.args[0] != Ref(weights):
            continue
        found = _scores(graph, op.inputs[0])
        if found is None:
            continue
        query, key, mask, scale, causal, inner = found
        product = graph.tensor(min(inner)).shape  # in between it may have other shapes, of the same rows
        if product != graph.tensor(weights).shape or product[-1] != graph.tensor(index).shape[-1]:
            continue
        if not _keep_order(graph, sorted(inner)) or not _keep_order(graph, sorted(members)):
            continue
        members |= inner | {users[0]}
        if any(i in graph.outputs or not set(graph.users(i)) <= members for i in members - {users[0]}):
            continue
        value = int(next(refs(last.args[1])))
        specs = [graph.value(i) for i in (query, key, value, *(() if mask is None else (mask,)))]
        if len({s.dtype for s in specs if isinstance(s, TensorSpec)}) != 1 or specs[-1] is None:
            continue
        call = _Call(graph, last)
        shown = None if mask is None else Ref(mask)
        new = call.ops(Ref(query), call.straight_key(key), Ref(value), shown, scale, causal)
        return "scaled_dot_product_attention", splice(graph, members, users[0], new)
    return None


class _Call:
    """Writes the operators of one call. Fused kernels take four dimensions only, so others get a batch of one."""

    def __init__(self, graph: Subgraph, last: Op) -> None:
        self.graph, self.last = graph, last
        self.new: list[Op] = []
        self.specs: dict[int | str, TensorSpec] = {}

    def _put(self, target: str, args: tuple[Arg, ...], out: TensorSpec, **kwargs: Arg) -> Ref:
        self.new.append(Op(target, args, tuple(kwargs.items()), out))
        self.specs[-len(self.new)] = out
        return Ref(-len(self.new))

    def _spec(self, ref: Ref) -> TensorSpec:
        return self.specs[ref.to] if ref.to in self.specs else self.graph.tensor(int(ref.to))

    def straight_key(self, key: int) -> Ref:
        turn, rank = self.graph.op_of(key), len(self.graph.tensor(key).shape)
        if turn and turn.name == "transpose" and {d % rank for d in ints(turn.args[1:])} == {rank - 2, rank - 1}:
            return Ref(turn.inputs[0])
        turned = swapped(self.graph.tensor(key))
        straight = self._put("aten.transpose.int", (Ref(key), -1, -2), turned)
        if turned.stride[-1] == 1:
            return straight
        return self._put("aten.contiguous.default", (straight,), dense(turned.shape, turned.dtype))  # for fused kernels

    def _batched(self, ref: Ref, rank: int) -> Ref:
        spec = self._spec(ref)
        if rank != 3 or len(spec.shape) != 3:
            return ref
        out = replace(spec, shape=(1, *spec.shape), stride=(spec.shape[0] * spec.stride[0], *spec.stride))
        return self._put("aten.unsqueeze.default", (ref, 0), out)

    def ops(self, query: Ref, key: Ref, value: Ref, mask: Ref | None, scale: float, causal: bool) -> list[Op]:
        out = self.last.out
        assert isinstance(out, TensorSpec)
        rank = len(self._spec(query).shape)
        operands = [self._batched(r, rank) for r in (query, key, value)]
        masked = None if mask is None else self._batched(mask, rank)
        shape = (1, *out.shape) if rank == 3 else out.shape
        made = dense(shape, out.dtype)
        call = (*operands, masked, 0.0, causal)
        result = self._put("aten.scaled_dot_product_attention.default", call, made, scale=scale)
        if rank == 3:
            result = self._put("aten.squeeze.dim", (result, 0), out)
        # Some kernels give another layout than matmul does.
        self._put("aten.contiguous.default", (result,), out)
        return self.new


def _is_same(graph: Subgraph, index: int) -> bool:
    """Whether a value is its input, at most in another dtype or seen in other dimensions."""
    op = graph.op_of(index)
    return is_plain(graph, index) or (op is not None and op.name in REGROUPS | REORDERS)


def _keep_order(graph: Subgraph, path: list[int]) -> bool:
    """Whether operators one after the other leave the elements in their order.

    An einsum puts dimensions of size 1 in and out again, turns some and turns them back, and makes one of several.
    """
    views = [(v, op) for v in path if (op := graph.op_of(v)) and op.name in REGROUPS | REORDERS]
    shape: tuple[int, ...] = ()
    came: list[int] = []  # where each dimension of `shape` was, as long as they only change places
    for value, op in views:
        shape, new = graph.tensor(op.inputs[0]).shape, graph.tensor(value).shape
        came = came or list(range(len(shape)))
        long = [d for d, n in zip(came, shape, strict=True) if n != 1]
        if op.name in REORDERS:
            came = [came[d] for d in _order(op, len(shape))]
        elif long == sorted(long):
            came = list(range(len(new)))
        elif [n for n in shape if n != 1] == [n for n in new if n != 1]:
            left = iter(long)
            came = [next(left) if n != 1 else -1 for n in new]
        else:
            return False
        shape = new
    long = [d for d, n in zip(came, shape, strict=True) if n != 1]
    return long == sorted(long)


def _order(op: Op, rank: int) -> list[int]:
    dims, order = [d % rank for a in op.args[1:] for d in ints(a)], list(range(rank))
    if op.name == "permute":
        return dims
    first, second = dims or (0, rank - 1)
    order[first], order[second] = order[second], order[first]
    return order


def _scores(graph: Subgraph, index: int) -> tuple[int, int, int | None, float, bool, set[int]] | None:
    """(query, transposed key, mask, scale, is causal, members) of the scores that go into a softmax.

    `masked_fill` is no mask here: it takes a NaN out of a hidden score, to which attention adds -inf. Of one that is
    known to be causal order attention makes the same: it takes hidden scores out too.
    """
    members: set[int] = set()
    mask, scale, order = None, 1.0, None
    for _ in range(MOST_STEPS):
        op = graph.op_of(index)
        if op is None:
            return None
        members.add(index)
        found = numbers(op)
        if op.name in ("matmul", "bmm"):
            views = {o.name for o in map(graph.op_of, members) if o} & (REGROUPS | REORDERS)
            if mask is not None and (views or order):
                return None
            if order and (views & REORDERS or order != graph.tensor(index).shape[-2:]):
                return None
            return int(op.inputs[0]), int(next(refs(op.args[1]))), mask, scale, order is not None, members
        if op.name in ("mul", "div") and len(op.inputs) == 1 and len(found) == 1 and op.args[0] == Ref(op.inputs[0]):
            scale *= found[0] if op.name == "mul" else 1 / found[0]
        elif op.name == "add" and len(op.inputs) == 2 and mask is None and scale == 1.0 and not op.kwargs:
            inner = [i for i in op.inputs if graph.tensor(i).shape == graph.tensor(index).shape and graph.op_of(i)]
            if not inner:
                return None
            mask = next(i for i in op.inputs if i != inner[0])
            index = inner[0]
            continue
        elif (below := behind_order(graph, index)) is not None and mask is None and order is None and scale == 1.0:
            order = graph.tensor(index).shape[-2:]
            index = below
            continue
        elif not _is_same(graph, index):
            return None
        index = op.inputs[0]
    return None
