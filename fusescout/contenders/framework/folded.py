"""Factors and summands that follow a convolution or a linear, one for each channel, folded into its weight and bias.

Batch norm in eval mode is one of these, as are a scale, a bias and numbers. What they come to is computed in float64
and rounded to the operator's dtype once (`batch_norm.py` tells why).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusescout import convolution
from fusescout.contenders.framework.batch_norm import FLOAT64
from fusescout.contenders.framework.batch_norm import MEAN
from fusescout.contenders.framework.batch_norm import TRAINING
from fusescout.contenders.framework.batch_norm import WIDE
from fusescout.contenders.framework.batch_norm import Emit
from fusescout.contenders.framework.batch_norm import emitter
from fusescout.contenders.framework.batch_norm import is_constant
from fusescout.contenders.framework.batch_norm import is_foldable
from fusescout.contenders.framework.batch_norm import scale_and_shift
from fusescout.contenders.framework.batch_norm import scaled_weight
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import dense
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.convolution import BIAS
from fusescout.convolution import Convolution
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

Term = Ref | float | None
"""A float64 row with one number for each channel, one number for all, or nothing."""


def folded_affine(graph: Subgraph) -> Step | None:
    """The first convolution or linear with constant parameters that factors and summands follow.

    A batch norm alone behind a convolution is left to `folded_batch_norm`.
    """
    for value, op in numbered(graph):
        read = read_product(graph, op)
        if read is None or not all(is_constant(graph, p) for p in (read.weight, *_given(read.bias))):
            continue
        chain = affine_chain(graph, value)
        names = [graph.ops[v - len(graph.inputs)].name for v in chain]
        single = op.name in convolution.CONVOLUTIONS and names == ["batch_norm"]
        if not chain or single or not is_foldable(graph, chain[-1], value, read):
            continue
        kind = "linear" if op.name == "linear" else "convolution"
        return f"{', '.join(names)} folded into {kind}", splice(
            graph, {value, *chain}, chain[-1], _folded(graph, value, op, read, chain)
        )
    return None


def _given(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def read_product(graph: Subgraph, op: Op) -> Convolution | None:
    """Operands of a convolution, or of a linear as one without spatial dimensions."""
    if op.name != "linear":
        return convolution.read(graph, op)
    if not all(isinstance(a, Ref) or a is None for a in op.args) or len(graph.tensor(op.inputs[1]).shape) != 2:
        return None
    x, weight, *rest = op.inputs
    return Convolution(x, weight, rest[0] if rest else None, (), (), (), (), 1, False)


def affine_chain(graph: Subgraph, value: int) -> list[int]:
    """What follows a product, one after the other, and multiplies or adds constants of its columns or channels."""
    op, found = graph.op_of(value), list[int]()
    assert op is not None
    channels = 1 if op.name in convolution.CONVOLUTIONS else len(graph.tensor(value).shape) - 1
    while True:
        users = graph.users(value)
        after = graph.op_of(users[0]) if len(users) == 1 else None
        if after is None or value in graph.outputs or not _is_affine(graph, value, after, channels):
            return found
        value = users[0]
        found.append(value)


def _is_affine(graph: Subgraph, value: int, op: Op, channels: int) -> bool:
    spec, out = graph.tensor(value), op.out
    if not isinstance(out, TensorSpec) or (out.shape, out.dtype) != (spec.shape, spec.dtype):
        return False
    if op.name == "batch_norm":
        known = op.args[TRAINING] is False and isinstance(op.args[MEAN], Ref) and op.inputs[0] == value
        return known and channels == 1 and all(is_constant(graph, i) for i in op.inputs[1:])
    if op.name not in ("add", "sub", "rsub", "mul", "div") or len(op.args) < 2 or op.kwarg("rounding_mode"):
        return False
    left, right = op.args[:2]
    other = right if left == Ref(value) else left  # of rsub the left one is subtracted
    if other == Ref(value) or (op.name == "div" and left != Ref(value)):
        return False
    number = _number(graph, other)
    if number is not None:
        return op.name != "div" or number != 0
    return isinstance(other, Ref) and _is_row(graph, int(other.to), spec, channels)


def _is_row(graph: Subgraph, value: int, spec: Any, channels: int) -> bool:
    """Whether a constant has one number, or one for each channel."""
    row = graph.tensor(value)
    at = len(row.shape) - (len(spec.shape) - channels)
    numbers = row.shape[at] if 0 <= at < len(row.shape) else 1
    return is_constant(graph, value) and row.numel == numbers and numbers in (1, spec.shape[channels])


def _number(graph: Subgraph, arg: Any) -> float | None:
    """A number, given as one or as a tensor that the chain makes of it."""
    made = graph.op_of(int(arg.to)) if isinstance(arg, Ref) else None
    if made is not None and made.name == "full" and not graph.tensor(int(arg.to)).shape:
        arg = made.args[1]
    return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else None


def _folded(graph: Subgraph, value: int, op: Op, read: Convolution, chain: list[int]) -> list[Op]:
    """Operators in the place of all; the last one is the convolution or linear."""
    out, weight = graph.tensor(value), graph.tensor(read.weight)
    ops: list[Op] = []
    emit = emitter(ops)
    dtype = Const("dtype", out.dtype)
    new_weight, shift = wide_parameters(graph, value, read, chain, emit)
    if new_weight != Ref(read.weight):
        new_weight = emit(
            "_to_copy.default", (new_weight,), TensorSpec(weight.shape, out.dtype, weight.stride), dtype=dtype
        )
    bias: tuple[Any, ...] = (None,)
    if shift is not None:
        bias = (emit("_to_copy.default", (shift,), dense((channels_of(graph, value, read),), out.dtype), dtype=dtype),)
    kwargs = tuple((k, a) for k, a in op.kwargs if k != "bias")
    result = graph.tensor(chain[-1])
    ops.append(Op(op.target, (op.args[0], new_weight, *bias, *op.args[BIAS + 1 :]), kwargs, result))
    return ops


def channels_of(graph: Subgraph, value: int, read: Convolution) -> int:
    """How many columns or channels a product has."""
    return graph.tensor(value).shape[1 if read.stride else -1]


def wide_parameters(
    graph: Subgraph, value: int, read: Convolution, chain: Sequence[int], emit: Emit
) -> tuple[Ref, Ref | None]:
    """Weight and bias of a product with all of `chain` in them, in float64; a weight that nothing scales as it is."""
    weight, channels = graph.tensor(read.weight), channels_of(graph, value, read)
    row = dense((channels,), WIDE)

    def widened(source: Any) -> Ref:
        """One float64 number for each channel."""
        spec = graph.tensor(int(source.to))
        wide = emit("_to_copy.default", (source,), TensorSpec(spec.shape, WIDE, spec.stride), dtype=FLOAT64)
        flat = emit("view.default", (wide, (spec.numel,)), dense((spec.numel,), WIDE))
        return (
            flat if spec.numel == channels else emit("expand.default", (flat, (channels,)), replace(row, stride=(0,)))
        )

    def combined(name: str, a: Term, b: Term) -> Term:
        if a is None or b is None:
            return b if a is None else a
        if not isinstance(a, Ref) and not isinstance(b, Ref):
            return a * b if name == "mul" else a + b
        a, b = (a, b) if isinstance(a, Ref) else (b, a)
        return emit(f"{name}.{'Tensor' if isinstance(b, Ref) else 'Scalar'}", (a, b), row)

    scale: Term = None
    shift: Term = None if read.bias is None else widened(Ref(read.bias))
    for before, v in zip((value, *chain), chain, strict=False):
        factor, summand = _terms(graph, graph.ops[v - len(graph.inputs)], before, channels, emit, widened)
        scale = combined("mul", scale, factor)
        shift = None if shift is None else combined("mul", shift, factor)
        shift = combined("add", shift, summand)
    new_weight = Ref(read.weight)
    if scale is not None:
        wide = TensorSpec(weight.shape, WIDE, weight.stride)
        new_weight = emit("_to_copy.default", (new_weight,), wide, dtype=FLOAT64)
        if isinstance(scale, Ref):
            new_weight = scaled_weight(read, new_weight, scale, wide, emit)
        else:
            new_weight = emit("mul.Scalar", (new_weight, scale), wide)
    if shift is not None and not isinstance(shift, Ref):  # made of the weight, so that it counts as a constant
        shift = emit("new_full.default", (Ref(read.weight), (channels,), shift), row, dtype=FLOAT64)
    return new_weight, shift


def _terms(
    graph: Subgraph, op: Op, before: int, channels: int, emit: Emit, widened: Callable[[Any], Ref]
) -> tuple[Term, Term]:
    """What an operator multiplies value `before` by, and then adds."""
    if op.name == "batch_norm":
        return scale_and_shift(op, None, channels, emit)
    is_left = op.args[0] == Ref(before)
    given = op.args[1] if is_left else op.args[0]
    number = _number(graph, given)
    other: Ref | float = widened(given) if number is None else number
    row = dense((channels,), WIDE)
    if op.name == "mul":
        return other, None
    if op.name == "div":
        return emit("reciprocal.default", (other,), row) if isinstance(other, Ref) else 1 / other, None
    alpha: Any = op.kwarg("alpha", op.args[2] if len(op.args) > 2 else 1)
    sign = float(alpha) if op.name == "add" else -float(alpha)  # of the right operand
    if is_left == (op.name == "rsub"):
        return (None if sign == 1 else sign), other
    if isinstance(other, Ref):
        return None, other if sign == 1 else emit("mul.Scalar", (other, sign), row)
    return None, other * sign
