"""Reads written-out attention whose scores are filled with minus infinity behind a mask that is known to be causal."""

from __future__ import annotations

import math
from typing import Any

from fusescout.ir import LOWER
from fusescout.ir import UPPER
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import REORDERS

PRODUCTS = frozenset({"matmul", "bmm"})
CASTS = frozenset({"to", "_to_copy"})
COPIES = CASTS | {"contiguous", "clone", "expand"}
LOWEST = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": -3.4028234663852886e38}
HIDES = -1e9
"""A score of that or less weighs nothing beside any that a query has: models write it for minus infinity."""
Positions = tuple[int, int, int]
"""A dimension, the first of some places in it, and how many."""


def behind_order(graph: Subgraph, value: int) -> int | None:
    """The scores of which `value` takes out all that lie above the diagonal; None if it's something else."""
    op = graph.op_of(value)
    if op is None or len(op.args) != 3 or not isinstance(op.out, TensorSpec):
        return None
    if op.name == "masked_fill":
        scores, mask, number = op.args
        wanted = UPPER
    elif op.name == "where":
        mask, first, second = op.args
        wanted = LOWER if _fill(graph, second) is not None else UPPER
        scores, number = (first, second) if wanted == LOWER else (second, first)
    else:
        return None
    fill = _fill(graph, number)
    if not isinstance(scores, Ref) or not isinstance(mask, Ref) or fill is None:
        return None
    if not (fill <= HIDES or fill <= LOWEST.get(op.out.dtype, -math.inf)):
        return None
    told, read = graph.value(int(mask.to)), graph.value(int(scores.to))
    if not isinstance(told, TensorSpec) or not isinstance(read, TensorSpec) or told.content != wanted:
        return None
    if read.shape != op.out.shape or read.dtype != op.out.dtype or told.shape[-2:] != op.out.shape[-2:]:
        return None
    return int(scores.to)


def without_order(graph: Subgraph) -> tuple[Subgraph, bool]:
    """Written-out attention without its causal mask, and whether there was one; its inputs stay as they were.

    The mask must be the last thing before the softmax: what is computed of hidden scores would have to be known.
    """
    found = _ordered(graph)
    if found is None:
        return graph, False
    masked, scores, _ = found
    first = len(graph.inputs)
    kept = [v for v in range(first, first + len(graph.ops)) if v != masked]
    number = {v: k for k, v in enumerate((*range(first), *kept))}
    number[masked] = number[scores]
    ops = []
    for v in kept:
        op = graph.ops[v - first]
        kwargs = tuple((k, substitute(a, number)) for k, a in op.kwargs)
        ops.append(Op(op.target, substitute(op.args, number), kwargs, op.out))
    return Subgraph(graph.inputs, tuple(ops), tuple(number[o] for o in graph.outputs)), True


def special_positions(graph: Subgraph, index: int) -> Positions | None:
    """Where an input of such attention may hold NaN and infinities so that all ways to compute it agree.

    Values at their first position, which every query sees; keys in the second half; queries at the last, which sees
    every key.
    """
    found = _ordered(graph)
    if found is None:
        return None
    *_, product = found
    rows, keys = graph.tensor(product).shape[-2:]
    above = {v for v, op in enumerate(graph.ops, len(graph.inputs)) if op.name in PRODUCTS and v > product}
    wanted = [(v, 1, (-2, 0, 1)) for v in sorted(above)]
    wanted += [(product, 0, (-2, rows - 1, 1)), (product, 1, (-1, keys // 2, keys - keys // 2))]
    for value, place, (dim, start, count) in wanted:
        op = graph.op_of(value)
        at = op.args[place] if op is not None else None
        source = _traced_back(graph, int(at.to), dim) if isinstance(at, Ref) else None
        if source is not None and source[0] == index:
            return source[1], start, count
    return None


def _ordered(graph: Subgraph) -> tuple[int, int, int] | None:
    """(masked scores, scores, their product) of attention in a causal order that is known."""
    softmax = next((op for op in graph.ops if op.name in ("softmax", "_softmax")), None)
    if softmax is None:
        return None
    value = int(softmax.inputs[0])
    shape = graph.tensor(value).shape[-2:]
    while (op := graph.op_of(value)) and op.name in CASTS | REGROUPS:
        value = op.inputs[0]
    scores = behind_order(graph, value)
    if scores is None or graph.tensor(value).shape[-2:] != shape:
        return None
    product = _product(graph, scores, shape)
    return None if product is None else (value, scores, product)


def _product(graph: Subgraph, value: int, shape: tuple[int, ...]) -> int | None:
    """The product that scores come from, if their last two dimensions are its own."""
    while (op := graph.op_of(value)) is not None:
        if op.name in REORDERS or graph.tensor(value).shape[-2:] != shape:
            return None
        if op.name in PRODUCTS:
            return value
        numel = graph.tensor(value).numel
        wide = [i for i in op.inputs if isinstance(s := graph.value(i), TensorSpec) and s.numel == numel]
        if not wide:
            return None
        value = next((i for i in wide if graph.op_of(i)), wide[0])
    return None


def _traced_back(graph: Subgraph, value: int, dim: int) -> tuple[int, int] | None:
    """The input that a value is a view or copy of, and which of its dimensions, from the end, one of the value's is."""
    while (op := graph.op_of(value)) is not None:
        rank = len(graph.tensor(value).shape)
        if op.name == "transpose":
            pair = [int(a) % rank - rank for a in op.args[1:] if isinstance(a, int)]
            dim = pair[1 - pair.index(dim)] if dim in pair else dim
        elif op.name not in COPIES:
            return None
        value = op.inputs[0]
    return value, dim


def _fill(graph: Subgraph, arg: Any) -> float | None:
    """The number that an argument is, written out or made by `full`."""
    if isinstance(arg, Ref):
        op: Op | None = graph.op_of(int(arg.to))
        arg = op.args[1] if op is not None and op.name == "full" else None
    return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else None
