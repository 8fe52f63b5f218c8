"""Surgery on sub-graphs as plain data: cut out, put in, drop what nobody reads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

Step = tuple[str, Subgraph]
"""A rewriting: its name and the sub-graph after it."""


def splice(graph: Subgraph, members: set[int], at: int, new: list[Op]) -> Subgraph:
    """Put `new` in the place of `members`, whose last value `at` it replaces; `Ref(-k)` in it is its own k-th op."""
    number: dict[Any, Any] = {k: k for k in range(len(graph.inputs))}
    ops: list[Op] = []

    def emit(op: Op) -> int:
        kwargs = tuple((k, substitute(v, number)) for k, v in op.kwargs)
        ops.append(Op(op.target, substitute(op.args, number), kwargs, op.out))
        return len(graph.inputs) + len(ops) - 1

    for index, op in numbered(graph):
        if index == at:
            for k, one in enumerate(new):
                number[-1 - k] = emit(one)
            number[at] = number[-len(new)]
        elif index not in members:
            number[index] = emit(op)
    return prune(Subgraph(graph.inputs, tuple(ops), tuple(number[o] for o in graph.outputs)))


def prune(graph: Subgraph) -> Subgraph:
    """Without operators whose value nobody reads any more."""
    dead = {i for i, _ in numbered(graph) if not graph.users(i) and i not in graph.outputs}
    if not dead:
        return graph
    kept = [(i, op) for i, op in numbered(graph) if i not in dead]
    number = {k: k for k in range(len(graph.inputs))} | {i: len(graph.inputs) + k for k, (i, _) in enumerate(kept)}
    ops = tuple(
        Op(o.target, substitute(o.args, number), tuple((k, substitute(v, number)) for k, v in o.kwargs), o.out)
        for _, o in kept
    )
    return prune(Subgraph(graph.inputs, ops, tuple(number[o] for o in graph.outputs)))


def cut(graph: Subgraph, source: int, members: list[int]) -> Subgraph:
    number = {source: 0, **{m: 1 + k for k, m in enumerate(members)}}
    ops = [graph.ops[m - len(graph.inputs)] for m in members]
    renamed = tuple(
        Op(op.target, substitute(op.args, number), tuple((k, substitute(v, number)) for k, v in op.kwargs), op.out)
        for op in ops
    )
    return Subgraph((graph.tensor(source),), renamed, (len(members),))


def numbered(graph: Subgraph) -> list[tuple[int, Op]]:
    return list(enumerate(graph.ops, len(graph.inputs)))


def is_plain(graph: Subgraph, index: int) -> bool:
    """Whether a value is its input, at most in another dtype: a cast, dropout in eval mode, a no-op copy."""
    op = graph.op_of(index)
    return op is not None and (
        op.name in ("to", "_to_copy", "detach", "alias", "contiguous")
        or (op.name == "dropout" and op.args[-1] is False)
    )


def swapped(spec: TensorSpec) -> TensorSpec:
    *shape, a, b = spec.shape
    *stride, s, t = spec.stride
    return replace(spec, shape=(*shape, b, a), stride=(*stride, t, s))


def dense(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """The spec of a new contiguous tensor."""
    return TensorSpec(shape, dtype, tuple(math.prod(shape[k + 1 :]) for k in range(len(shape))))


def ints(arg: Any) -> list[int]:
    return [a for a in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(a, int)]


def numbers(op: Op) -> list[float]:
    return [float(a) for a in op.args if isinstance(a, int | float) and not isinstance(a, bool)]
