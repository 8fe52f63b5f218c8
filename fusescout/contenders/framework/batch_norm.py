"""Batch norm in eval mode folded into the convolution before it, or as the scale and shift that it is.

Its statistics are constants then, so weight and bias can be scaled once. They are scaled in float64 and rounded to the
convolution's dtype once: folded in float32, an fp32 model missed the accuracy rule by up to 1.8 times, since errors of
a scale fall on a whole channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fusescout import convolution
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import dense
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.convolution import Convolution
from fusescout.ir import FLOATS
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

GAMMA, BETA, MEAN, VAR, TRAINING, EPS = 1, 2, 3, 4, 5, 7
"""Arguments of aten.batch_norm."""
WIDE = "float64"
FLOAT64, FLOAT32 = Const("dtype", WIDE), Const("dtype", "float32")
Emit = Callable[..., Ref]
"""Appends an operator: name, arguments, spec of its result, keyword arguments."""


def folded_batch_norm(graph: Subgraph) -> Step | None:
    """The first batch norm whose input is a convolution that nobody else reads, both with constant parameters."""
    for index, op in numbered(graph):
        if op.name != "batch_norm" or op.args[TRAINING] is not False or not isinstance(op.args[MEAN], Ref):
            continue
        before = int(op.inputs[0])
        conv_op = graph.op_of(before)
        conv = convolution.read(graph, conv_op) if conv_op else None
        if conv_op is None or conv is None or graph.users(before) != (index,) or before in graph.outputs:
            continue
        parameters = [conv.weight, *([] if conv.bias is None else [conv.bias]), *op.inputs[1:]]
        if not all(is_constant(graph, p) for p in parameters) or not is_foldable(graph, index, before, conv):
            continue
        return "batch_norm folded into convolution", splice(
            graph, {before, index}, index, _folded(graph, conv_op, conv, op)
        )
    return None


def affine_batch_norm(graph: Subgraph) -> Step | None:
    """The first batch norm with constant parameters as `x * scale + shift`, both float32, rounded to its dtype once.

    For kernels that keep a product's sum in float32: unlike folded weights this adds no error. Folding rounds weights,
    whose errors don't shrink where the products cancel, so that small outputs are further off than eager's.
    """
    for index, op in numbered(graph):
        if op.name != "batch_norm" or op.args[TRAINING] is not False or not isinstance(op.args[MEAN], Ref):
            continue
        out = graph.tensor(index)
        if out.requires_grad or not all(is_constant(graph, p) for p in op.inputs[1:]):
            continue
        ops: list[Op] = []
        emit = emitter(ops)
        scale, shift = scale_and_shift(op, None, out.shape[1], emit)
        shape = (1, out.shape[1], *(1 for _ in out.shape[2:]))
        rows = []
        for row in (scale, shift):
            narrow = emit("_to_copy.default", (row,), TensorSpec((out.shape[1],), "float32", (1,)), dtype=FLOAT32)
            rows.append(emit("view.default", (narrow, shape), dense(shape, "float32")))
        wide = replace(out, dtype="float32")
        result = emit("mul.Tensor", (op.args[0], rows[0]), wide)
        result = emit("add.Tensor", (result, rows[1]), wide)
        if out.dtype != "float32":
            emit("_to_copy.default", (result,), out, dtype=Const("dtype", out.dtype))
        return "batch_norm as scale and shift", splice(graph, {index}, index, ops)
    return None


def is_constant(graph: Subgraph, value: int) -> bool:
    """Whether a value is made of parameters and buffers alone."""
    op = graph.op_of(value)
    if op is None:
        return graph.inputs[value].constant
    return bool(op.inputs) and all(is_constant(graph, i) for i in op.inputs)


def is_foldable(graph: Subgraph, norm: int, conv: int, read: Convolution) -> bool:
    """Inference in one floating dtype, with a weight whose memory has no gaps."""
    out, weight = graph.tensor(norm), graph.tensor(read.weight)
    if out.requires_grad or out.dtype not in FLOATS or out.dtype != graph.tensor(conv).dtype:
        return False
    if read.transposed and read.groups > 1 and not weight.is_contiguous:
        return False
    expected = 1
    for stride, n in sorted(zip(weight.stride, weight.shape, strict=True)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return weight.numel > 0 and weight.dtype == out.dtype


def _folded(graph: Subgraph, conv_op: Op, conv: Convolution, norm: Op) -> list[Op]:
    """Operators in the place of both; the last one is the convolution. `Ref(-k)` is the k-th of these."""
    assert isinstance(norm.out, TensorSpec)
    dtype, weight, channels = norm.out.dtype, graph.tensor(conv.weight), norm.out.shape[1]
    ops: list[Op] = []
    emit = emitter(ops)
    scale, shift = scale_and_shift(norm, conv.bias, channels, emit)
    wide = TensorSpec(weight.shape, WIDE, weight.stride)
    scaled = scaled_weight(conv, emit("_to_copy.default", (Ref(conv.weight),), wide, dtype=FLOAT64), scale, wide, emit)
    narrow = TensorSpec(weight.shape, dtype, weight.stride), TensorSpec((channels,), dtype, (1,))
    new_weight = emit("_to_copy.default", (scaled,), narrow[0], dtype=Const("dtype", dtype))
    new_bias = emit("_to_copy.default", (shift,), narrow[1], dtype=Const("dtype", dtype))
    kwargs = tuple((k, v) for k, v in conv_op.kwargs if k != "bias")
    ops.append(Op(conv_op.target, (conv_op.args[0], new_weight, new_bias, *conv_op.args[3:]), kwargs, norm.out))
    return ops


def emitter(ops: list[Op]) -> Emit:
    """Appends to `ops`."""

    def emit(name: str, args: tuple[Any, ...], out: TensorSpec, **kwargs: Any) -> Ref:
        ops.append(Op(f"aten.{name}", args, tuple(kwargs.items()), out))
        return Ref(-len(ops))

    return emit


def scale_and_shift(norm: Op, bias: int | None, channels: int, emit: Emit) -> tuple[Ref, Ref]:
    """What batch norm multiplies by and adds, in float64; `bias` was added to its input before."""
    row = TensorSpec((channels,), WIDE, (1,))

    def widened(value: Any) -> Ref:
        return emit("_to_copy.default", (value,), row, dtype=FLOAT64)

    shifted = emit("add.Scalar", (widened(norm.args[VAR]), norm.args[EPS]), row)
    scale = emit("rsqrt.default", (shifted,), row)
    if isinstance(norm.args[GAMMA], Ref):
        scale = emit("mul.Tensor", (scale, widened(norm.args[GAMMA])), row)
    shift = widened(norm.args[MEAN])
    if bias is not None:
        shift = emit("sub.Tensor", (shift, widened(Ref(bias))), row)
    shift = emit("neg.default", (emit("mul.Tensor", (shift, scale), row),), row)
    if isinstance(norm.args[BETA], Ref):
        shift = emit("add.Tensor", (shift, widened(norm.args[BETA])), row)
    return scale, shift


def scaled_weight(conv: Convolution, weight: Ref, scale: Ref, spec: TensorSpec, emit: Emit) -> Ref:
    """The weight times one factor for each output channel."""
    kernel = spec.shape[2:]
    if not conv.transposed:  # [out, in / groups, ...]
        shape = (spec.shape[0], *(1 for _ in spec.shape[1:]))
        factor = emit("view.default", (scale, shape), dense(shape, spec.dtype))
        return emit("mul.Tensor", (weight, factor), spec)
    inner, outer = spec.shape[0] // conv.groups, spec.shape[1]  # [in, out / groups, ...]
    shape = (conv.groups, 1, outer, *(1 for _ in kernel))
    factor = emit("view.default", (scale, shape), dense(shape, spec.dtype))
    if conv.groups == 1:
        flat = (1, outer, *(1 for _ in kernel))
        return emit("mul.Tensor", (weight, emit("view.default", (scale, flat), dense(flat, spec.dtype))), spec)
    apart = (conv.groups, inner, outer, *kernel)
    product = emit(
        "mul.Tensor",
        (emit("view.default", (weight, apart), dense(apart, spec.dtype)), factor),
        dense(apart, spec.dtype),
    )
    return emit("view.default", (product, spec.shape), spec)
