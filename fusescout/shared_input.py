"""Several matrix products of one input with parameters, as q, k and v are: read from a sub-graph, and made one product.

The weights are put side by side as a prepared constant (`constants.py`). Whoever reads a result relies on the strides
that the graph promises, so every result is a contiguous tensor: a column range of the one product is copied, unless it
has a single row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fusescout.ir import Arg
from fusescout.ir import Const
from fusescout.ir import Node
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

NAMES = frozenset({"linear", "addmm", "mm", "matmul"})


@dataclass(frozen=True, slots=True)
class Projection:
    """One product: value indices in a sub-graph, node names in a graph.

    Attributes:
        x: what is multiplied.
        weight: [out, in], or [in, out] where `turned`.
        bias: added to every row, or None.
    """

    x: str | int
    weight: str | int
    bias: str | int | None
    turned: bool


@dataclass(frozen=True, slots=True)
class Shared:
    """A sub-graph that is nothing but products of one input; `columns` are of each result, in order."""

    x: int
    projections: tuple[Projection, ...]
    columns: tuple[int, ...]

    def starts(self, tile: int) -> tuple[int, ...]:
        """First column of each result in the one product, each at a multiple of `tile`."""
        return tuple(accumulate((-(-n // tile) * tile for n in self.columns[:-1]), initial=0))


def projection(op: Node | Op) -> Projection | None:
    """An operator as a product with one matrix, if it is one."""
    name = op.op if isinstance(op, Node) else op.name
    args, given = op.args, [a.to if isinstance(a, Ref) else None for a in op.args]
    if name not in NAMES or op.kwargs or not isinstance(op.out, TensorSpec):
        return None
    if name == "linear" and len(args) == 3 and args[2] is None:
        args, given = args[:2], given[:2]
    if None in given or len(given) not in {"linear": (2, 3), "addmm": (3,)}.get(name, (2,)):
        return None
    if name == "addmm":
        given = [given[1], given[2], given[0]]
    x, weight, *bias = (g for g in given if g is not None)
    return Projection(x, weight, bias[0] if bias else None, name != "linear")


def read(graph: Subgraph) -> Shared | str:
    """The products a sub-graph is made of, or in a sentence why it is none of this kind."""
    found = [projection(op) for op in graph.ops]
    products = [p for p in found if p is not None]
    first = len(graph.inputs)
    if len(products) < 2 or len(products) != len(graph.ops):
        return "It is not several matrix products and nothing else."
    if len({p.x for p in products}) != 1 or int(products[0].x) >= first:
        return "Its matrix products differ in input."
    if graph.outputs != tuple(range(first, first + len(graph.ops))):
        return "It doesn't give every product once."
    x = graph.tensor(int(products[0].x))
    if x.constant or len(x.shape) < 2 or 0 in x.shape:
        return "What its products share is a parameter, a vector or empty."
    for p, out in zip(products, graph.output_specs, strict=True):
        if reason := _refusal(graph, p, x, out):
            return reason
    return Shared(int(products[0].x), tuple(products), tuple(s.shape[-1] for s in graph.output_specs))


def _refusal(graph: Subgraph, p: Projection, x: TensorSpec, out: TensorSpec) -> str | None:
    operands = [graph.value(int(v)) for v in (p.weight, p.bias) if v is not None]
    if not all(isinstance(s, TensorSpec) and s.constant for s in operands):
        return "A weight or bias is no parameter."
    weight, *bias = [s for s in operands if isinstance(s, TensorSpec)]
    if len(weight.shape) != 2 or any(b.shape != out.shape[-1:] for b in bias):
        return "A weight is no matrix, or a bias no vector of the result's width."
    if {s.dtype for s in (weight, *bias, out)} != {x.dtype}:
        return "Its products mix dtypes."
    if out.requires_grad:
        return "Gradients are wanted, so nothing can be prepared of its weights."
    if not out.is_contiguous or out.shape[-1] == 0:
        return "A result is strided or empty."
    return None


class Writer:
    """A new sub-graph on the inputs of another: `emit` appends an operator and gives its value."""

    def __init__(self, graph: Subgraph) -> None:
        self.inputs = graph.inputs
        self.ops: list[Op] = []

    def emit(self, name: str, out: TensorSpec, *args: Any, **kwargs: Arg) -> Ref:
        self.ops.append(Op(f"aten.{name}", args, tuple(kwargs.items()), out))
        return Ref(len(self.inputs) + len(self.ops) - 1)

    def subgraph(self, outputs: list[Ref]) -> Subgraph:
        return Subgraph(self.inputs, tuple(self.ops), tuple(int(o.to) for o in outputs))

    def rows_of(self, p: Projection) -> Ref:
        """The weight of a product as [out, in]."""
        spec = self.inputs[int(p.weight)]
        if not p.turned:
            return Ref(p.weight)
        (k, n), (row, column) = spec.shape, spec.stride
        return self.emit("t.default", TensorSpec((n, k), spec.dtype, (column, row)), Ref(p.weight))


def packed(graph: Subgraph, shared: Shared, tile: int = 1) -> Subgraph:
    """The same with one `linear`, whose columns are those of each result, from a multiple of `tile` on."""
    write, x = Writer(graph), graph.tensor(shared.x)
    starts, dtype, k = shared.starts(tile), x.dtype, x.shape[-1]
    gaps = [after - start - n for start, n, after in zip(starts, shared.columns, starts[1:], strict=False)] + [0]
    total = starts[-1] + shared.columns[-1]

    def padded(value: Ref, shape: tuple[int, ...], gap: int) -> Ref:
        if not gap:
            return value
        gaps = (0,) * (2 * len(shape) - 1) + (gap,)
        return write.emit("constant_pad_nd.default", dense((shape[0] + gap, *shape[1:]), dtype), value, gaps, 0)

    pairs = list(zip(shared.projections, shared.columns, gaps, strict=True))
    rows = tuple(padded(write.rows_of(p), (n, k), gap) for p, n, gap in pairs)
    operands = [Ref(shared.x), write.emit("cat.default", dense((total, k), dtype), rows, 0)]
    if any(p.bias is not None for p in shared.projections):
        vectors = tuple(padded(_bias(write, p, n, dtype), (n,), gap) for p, n, gap in pairs)
        operands.append(write.emit("cat.default", dense((total,), dtype), vectors, 0))
    every, lines = dense((*x.shape[:-1], total), dtype), math.prod(x.shape[:-1])
    product = write.emit("linear.default", every, *operands)
    results = []
    for start, spec in zip(starts, graph.output_specs, strict=True):
        view = TensorSpec(spec.shape, dtype, every.stride if lines > 1 else spec.stride)
        part = write.emit("slice.Tensor", view, product, len(spec.shape) - 1, start, start + spec.shape[-1])
        if lines > 1:
            part = write.emit("clone.default", spec, part, memory_format=Const("memory_format", "contiguous_format"))
        results.append(part)
    return write.subgraph(results)


def _bias(write: Writer, p: Projection, n: int, dtype: str) -> Ref:
    """The bias of a product; zeros, made of the weight so that they count as constant, where it has none."""
    if p.bias is not None:
        return Ref(p.bias)
    return write.emit("new_zeros.default", dense((n,), dtype), Ref(p.weight), (n,))


def dense(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """The spec of a new contiguous tensor."""
    return TensorSpec(shape, dtype, tuple(math.prod(shape[k + 1 :]) for k in range(len(shape))))
