"""Recognises a sum or mean over what a linear or a convolution gives, as plain data.

The sum can be taken first: of a linear's columns it is a sum of its weight's, made once, and one number a row is left
to compute; of a convolution's pixels it is a sum of its input's pixels. What each channel or column is multiplied by
or given besides, batch norm among it, may lie between: it goes into the weight before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusescout.convolution import CONVOLUTIONS
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

MATMULS = frozenset({"matmul", "mm"})
"""With a parameter on the right they are a linear whose weight lies the other way round."""
PRODUCTS = frozenset({"linear", *MATMULS, *CONVOLUTIONS})
TURNS = frozenset({"t", "transpose", "permute", "numpy_T"})
BETWEEN = frozenset({"add", "sub", "rsub", "mul", "div", "batch_norm"})
POOLS = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"})


@dataclass(frozen=True, slots=True)
class Total:
    """What a reduction adds up: dimensions in ascending order; whether they stay, of size 1; whether it divides."""

    dims: tuple[int, ...]
    keeps: bool
    mean: bool


def total(name: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], rank: int) -> Total | None:
    """The sum or mean that an operator is over some dimensions of its first argument, which has `rank` of them."""
    given = args[1] if len(args) > 1 else None
    if name in POOLS:
        sizes = given if isinstance(given, tuple) else (given,)
        dims = tuple(range(rank - int(name[-2]), rank))
        return Total(dims, True, True) if all(n == 1 for n in sizes) else None
    if name not in ("mean", "sum") or any(value is not None for key, value in kwargs if key == "dtype"):
        return None
    named = given if isinstance(given, tuple) else (given,)
    if not named or not all(isinstance(d, int) and not isinstance(d, bool) for d in named):
        return None
    dims = tuple(sorted(d % rank for d in named))
    return Total(dims, len(args) > 2 and args[2] is True, name == "mean")


def fits(product: str, what: Total, rank: int) -> bool:
    """Whether the sum is over a linear's dimensions, or over pixels of a convolution alone."""
    return product not in CONVOLUTIONS or (what.dims[0] >= 2 and rank > 2)


def following(graph: Subgraph, value: int) -> tuple[int, Total] | None:
    """The sum that alone reads a value, and nothing else of it."""
    users = graph.users(value)
    after = graph.op_of(users[0]) if len(users) == 1 and value not in graph.outputs else None
    spec = graph.value(value)
    if after is None or not isinstance(spec, TensorSpec) or not spec.numel or after.inputs != (value,):
        return None
    what = total(after.name, after.args, after.kwargs, len(spec.shape))
    return (users[0], what) if what else None


def weight_of(graph: Subgraph, op: Op) -> tuple[int, bool] | None:
    """The constant matrix that a matrix product multiplies rows by, and whether it lies as a linear's weight does."""
    if len(op.inputs) != 2 or any(len(graph.tensor(i).shape) < 2 for i in op.inputs):
        return None
    weight, turn = op.inputs[1], graph.op_of(op.inputs[1])
    spec, source = graph.tensor(weight), turn.inputs[0] if turn and turn.name in TURNS else weight
    if len(spec.shape) != 2 or source >= len(graph.inputs) or not graph.inputs[source].constant:
        return None
    turned = source != weight
    if turned and (graph.inputs[source].shape, graph.inputs[source].stride) != (spec.shape[::-1], spec.stride[::-1]):
        return None
    return source, turned


def is_summed(graph: Subgraph) -> bool:
    """Whether each product of a sub-graph is only summed up, so that nobody has to compute it."""
    found = False
    for value, op in enumerate(graph.ops, len(graph.inputs)):
        if op.name not in PRODUCTS:
            continue
        if op.name in MATMULS and weight_of(graph, op) is None:
            return False
        rank, last = len(graph.tensor(value).shape), value
        while (users := graph.users(last)) and len(users) == 1 and last not in graph.outputs:
            if graph.ops[users[0] - len(graph.inputs)].name not in BETWEEN:
                break
            last = users[0]
        sum_ = following(graph, last)
        if sum_ is None or not fits(op.name, sum_[1], rank):
            return False
        found = True
    return found
