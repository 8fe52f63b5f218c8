"""The three bfloat16 planes of a float32 matrix, as ATen operators: a model holds those of its weights.

    x = x0 + x1 + x2, each the nearest bfloat16 to what is left

That is exact for the 24 bits of any float32 from 2^-110 on; below, what falls under bfloat16's last denormal, 2^-133,
is lost. Where rounding would make a finite number infinite, it is cut instead. Infinities and NaN are x0's alone.
"""

import math

from fusescout.templates.gemm_problem import Matrix
from fusescout.templates.prepared_weight import beside
from fusescout.templates.prepared_weight import can_prepare

from fusescout.constants import Split
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

PLANES = 3
LARGEST = 3.3895313892515355e38
"""The largest finite bfloat16."""


def pitch_of(columns: int) -> int:
    """Elements from row to row of a plane: rows that the copy engine can load start at multiples of 16 bytes."""
    return -(-columns // 8) * 8


def split_weight(graph: Subgraph, weight: Matrix) -> Split | None:
    """The parts of a sub-graph whose weight is a parameter, so that its planes are made once.

    None where the weight is no parameter, or gradients are wanted.
    """
    if not can_prepare(graph, weight.input):
        return None
    return beside(graph, weight.input, planes(graph.inputs[weight.input], weight))


def planes(spec: TensorSpec, matrix: Matrix) -> Subgraph:
    """From a tensor to bfloat16[3, rows, pitch]: the planes of the matrix that lies in its memory."""
    size = (matrix.rows, matrix.columns)
    ops: list = []

    def op(target: str, *args, dtype: str = "float32", shape: tuple = size) -> Ref:
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        ops.append(Op(f"aten.{target}", args, (), TensorSpec(shape, dtype, strides, constant=True)))
        return Ref(len(ops))

    def cast(value: Ref, dtype: str) -> Ref:
        return op("to.dtype", value, Const("dtype", dtype), dtype=dtype)

    w = Ref(0)
    if (spec.shape, spec.stride) != (size, (matrix.pitch, 1)):
        w = op("as_strided.default", w, size, (matrix.pitch, 1))
    finite = op("isfinite.default", w, dtype="bool")
    cut = op("where.self", finite, op("clamp.default", w, -LARGEST, LARGEST), w)
    first = cast(cut, "bfloat16")
    left = op("where.ScalarOther", finite, op("sub.Tensor", w, cast(first, "float32")), 0.0)
    second = cast(left, "bfloat16")
    third = cast(op("sub.Tensor", left, cast(second, "float32")), "bfloat16")
    made = op("stack.default", (first, second, third), dtype="bfloat16", shape=(PLANES, *size))
    pitch = pitch_of(matrix.columns)
    if pitch != matrix.columns:
        gap = (0, pitch - matrix.columns)
        made = op("constant_pad_nd.default", made, gap, 0, dtype="bfloat16", shape=(PLANES, matrix.rows, pitch))
    return Subgraph((spec,), tuple(ops), (int(made.to),))
