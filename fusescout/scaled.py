"""Products of 8-bit floats with scales, `_scaled_mm` and `_scaled_mm_v2`, said with operators that every stage knows.

    _scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=d)  ->  to((a b) * scale_a * scale_b + bias, d)

An 8-bit float widens exactly, so in float64 that is the truth; in a kernel the sums are float32, and so is what follows
until the result is stored. A scale is one number for a whole operand, or one for each of its rows or columns.
Scales for blocks along K don't come out of the sum, and what `scale_result` does differs between devices (CUDA
multiplies an 8-bit result by it, the CPU divides): such products are left to the library.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from fusescout.ir import FLOAT8
from fusescout.ir import Arg
from fusescout.ir import Const
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Op
from fusescout.ir import Out
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

SCALED = frozenset({"_scaled_mm", "_scaled_mm_v2"})
_V1 = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
_V2 = (
    "self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias", "out_dtype",
    "contraction_dim", "use_fast_accum",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scaled:
    """The arguments of a scaled product. `fast` allows sums that stay in the tensor cores' own accumulators."""

    a: Ref
    b: Ref
    scale_a: Ref
    scale_b: Ref
    bias: Ref | None
    fast: bool


def scaled(op: Op | Node, value: Callable[[Any], Out]) -> Scaled | None:
    """What a scaled product multiplies; None for other operators, and for scales that don't come out of its sum.

    Args:
        op: the operator.
        value: what each of its inputs is.
    """
    if op.name not in SCALED if isinstance(op, Op) else op.op not in SCALED:
        return None
    given = arguments(op.target, op.args, dict(op.kwargs))
    a, b, bias = given["self"], given["mat2"], given.get("bias")
    scales = [_single(given["scale_a"]), _single(given["scale_b"])]
    if given.get("contraction_dim") or not isinstance(a, Ref) or not isinstance(b, Ref) or None in scales:
        return None
    left, right, result = value(a.to), value(b.to), op.out
    if not all(isinstance(s, TensorSpec) and len(s.shape) == 2 for s in (left, right, result)):
        return None
    assert isinstance(left, TensorSpec) and isinstance(right, TensorSpec) and isinstance(result, TensorSpec)
    if given.get("scale_result") is not None and result.dtype in FLOAT8:
        return None
    for scale, lines in zip(scales, ((left.shape[0], 1), (1, right.shape[1])), strict=True):
        spec = value(scale.to) if scale else None
        if not isinstance(spec, TensorSpec) or spec.dtype != "float32" or (spec.numel != 1 and spec.shape != lines):
            return None
    scale_a, scale_b = scales
    assert scale_a is not None and scale_b is not None
    # With a scale for each row eager erred by a fifth of what such sums make, whatever `use_fast_accum` says (H200).
    fast = bool(given.get("use_fast_accum", False)) and all(_is_one(value(s.to)) for s in scales if s)
    return Scaled(a, b, scale_a, scale_b, bias if isinstance(bias, Ref) else None, fast)


def arguments(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a scaled product was called with, by name."""
    return dict(zip(_V2 if "_v2" in target else _V1, args, strict=False)) | dict(kwargs)


def _single(arg: Arg) -> Ref | None:
    """A scale; the newer operator takes lists of them."""
    if isinstance(arg, tuple):
        arg = arg[0] if len(arg) == 1 else None
    return arg if isinstance(arg, Ref) else None


def _is_one(out: Out) -> bool:
    return isinstance(out, TensorSpec) and out.numel == 1


def scaled_dtypes(graphs: Sequence[Graph]) -> tuple[str, ...]:
    """Dtypes of 8 bits that captured graphs multiply: those whose rate bounds a product."""
    products = [(g, n) for g in graphs for n in g.nodes if n.op in SCALED and n.inputs]
    found = [g.by_name[n.inputs[0]].out for g, n in products]
    return tuple(sorted({s.dtype for s in found if isinstance(s, TensorSpec) and s.dtype in FLOAT8}))


def sums_exactly(graph: Subgraph) -> bool:
    """Whether a scaled product must not leave its sums to the tensor cores' accumulators, which hold 14 bits or so."""
    return any(found is not None and not found.fast for op in graph.ops if (found := scaled(op, graph.value)))


def spelled_out(graph: Subgraph) -> Subgraph:
    """The sub-graph with its scaled products as products, multiplications and sums; itself where it has none.

    Its `mm` of 8-bit floats gives float32 and is no operator of the framework's: it is there to be read, or to be run
    with wider operands.

    Raises:
        ValueError: a scaled product has scales for blocks along K, or a scaled result.
    """
    if not any(op.name in SCALED for op in graph.ops):
        return graph
    number: dict[int, int] = {k: k for k in range(len(graph.inputs))}
    ops: list[Op] = []

    def emit(target: str, out: Out, *args: Arg, **kwargs: Arg) -> Ref:
        ops.append(Op(f"aten.{target}", args, tuple(kwargs.items()), out))
        return Ref(len(graph.inputs) + len(ops) - 1)

    for k, op in enumerate(graph.ops):
        named = replace(
            op, args=substitute(op.args, number), kwargs=tuple((name, substitute(v, number)) for name, v in op.kwargs)
        )
        found = scaled(op, graph.value)
        if found is None:
            if op.name in SCALED:
                raise ValueError(f"{op.target} has scales for parts of a row, or a scaled 8-bit result")
            ops.append(named)
        else:
            _spell(found, op, number, emit)
        number[len(graph.inputs) + k] = len(graph.inputs) + len(ops) - 1
    return Subgraph(graph.inputs, tuple(ops), tuple(number[v] for v in graph.outputs))


def _spell(found: Scaled, op: Op, number: dict[int, int], emit: Callable[..., Ref]) -> None:
    assert isinstance(op.out, TensorSpec)
    wide = replace(op.out, dtype="float32")
    a, b, scale_a, scale_b = (Ref(number[int(r.to)]) for r in (found.a, found.b, found.scale_a, found.scale_b))
    value = emit("mul.Tensor", wide, emit("mm.default", wide, a, b), scale_a)
    value = emit("mul.Tensor", wide, value, scale_b)
    if found.bias is not None:
        value = emit("add.Tensor", wide, value, Ref(number[int(found.bias.to)]))
    if op.out.dtype != "float32":
        emit("_to_copy.default", op.out, value, dtype=Const("dtype", op.out.dtype))
