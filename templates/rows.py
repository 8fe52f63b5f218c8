"""Reads a sub-graph as work on rows: pointwise segments with reductions over the last dimensions between them.

Composite operators (layer norm, softmax, variance, …) are first written out in primitive ones, so that a norm that the
model spells out and one it calls are the same to the template. Then every value gets a level: how many reductions
must have run before it can be computed.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.expression import unsupported
from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

REDUCTIONS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min"}
LIMITS = {"float32": 1.1920928955078125e-07, "float16": 0.0009765625, "bfloat16": 0.0078125}


@dataclass(frozen=True)
class Reduction:
    """Value `value` is the `kind` ("sum", "max", "min") of value `operand` over each row."""

    value: int
    operand: int
    kind: str


@dataclass(frozen=True)
class Rows:
    """A sub-graph of primitive operators over rows.

    Attributes:
        graph: inputs, primitive ops and outputs; reductions among the ops.
        shape: the full shape; `depth` of its last dimensions make a row.
        reductions: in order, by value.
        levels: level of each value.
        row_values: values that have one element per row.
    """

    graph: Subgraph
    shape: tuple
    depth: int
    reductions: dict
    levels: tuple
    row_values: frozenset

    @property
    def columns(self) -> int:
        return math.prod(self.shape[len(self.shape) - self.depth :])

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: len(self.shape) - self.depth])

    @property
    def last_level(self) -> int:
        return max(self.levels)


def read(graph: Subgraph) -> Rows:
    """The rows form of `graph`.

    Raises:
        Unsupported: an operator that is neither pointwise nor a reduction of whole rows, or rows that differ.
    """
    graph = _Expansion(graph).result()
    first = len(graph.inputs)
    reductions: dict = {}
    for k, op in enumerate(graph.ops):
        if op.name in REDUCTIONS:
            reductions[first + k] = Reduction(first + k, op.args[0].to, REDUCTIONS[op.name])
        elif reason := unsupported(op, graph):
            raise Unsupported(reason)
    if not reductions:
        raise Unsupported("it has no reduction over rows")
    shape, depth = _row_of(graph, reductions)
    row_values, levels = set(), []
    lead = len(shape) - depth
    for value in range(first + len(graph.ops)):
        spec, op = graph.tensor(value), graph.op_of(value)
        aligned = (1,) * (len(shape) - len(spec.shape)) + spec.shape
        if len(aligned) > len(shape) or any(n not in (1, m) for n, m in zip(aligned, shape, strict=True)):
            raise Unsupported("a value doesn't fit the shape of the reduced one")
        from_row = op is None or value in reductions or all(v in row_values for v in op.inputs)
        if all(n == 1 for n in aligned[lead:]) and from_row:
            row_values.add(value)
        if op is None:
            levels.append(0)
        else:
            levels.append(max((levels[v] for v in op.inputs), default=0) + (value in reductions))
    return Rows(graph, shape, depth, reductions, tuple(levels), frozenset(row_values))


def _row_of(graph: Subgraph, reductions: dict) -> tuple:
    """The full shape and how many of its last dimensions are reduced; the same for all reductions."""
    forms = set()
    for r in reductions.values():
        shape = graph.tensor(r.operand).shape
        dims = reduced_dims(graph.op_of(r.value), len(shape))
        forms.add((shape, len(dims)))
        if dims != tuple(range(len(shape) - len(dims), len(shape))):
            raise Unsupported("it reduces other dimensions than the last ones")
        if graph.tensor(r.value).shape != shape[: len(shape) - len(dims)] + (1,) * len(dims):
            raise Unsupported("a reduction drops its dimension (keepdim=False)")
    if len(forms) != 1:
        raise Unsupported("its reductions differ in shape or dimensions")
    shape, depth = forms.pop()
    if math.prod(shape[len(shape) - depth :]) < 2 or 0 in shape:
        raise Unsupported("its rows have fewer than two elements, or there are none")
    return shape, depth


def reduced_dims(op: Op, rank: int) -> tuple:
    """Dimensions a reduction runs over, ascending."""
    dims = op.args[1] if len(op.args) > 1 else op.kwarg("dim")
    if dims is None or dims == ():
        return tuple(range(rank))
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted(d % rank for d in dims))


class _Expansion:
    """Rewrites a sub-graph into primitive ops; old value indices are looked up in `new`."""

    def __init__(self, graph: Subgraph) -> None:
        self.old, self.ops = graph, []
        self.new = {k: k for k in range(len(graph.inputs))}
        for k, op in enumerate(graph.ops):
            if not isinstance(op.out, TensorSpec):
                raise Unsupported(f"{op.target} gives more than one tensor")
            self.op = replace(
                op, args=substitute(op.args, self.new), kwargs=tuple((n, substitute(v, self.new)) for n, v in op.kwargs)
            )
            rule = EXPANSIONS.get(op.name)
            made = rule(self) if rule else None
            self.new[len(graph.inputs) + k] = self.add(self.op) if made is None else made.to

    def result(self) -> Subgraph:
        return Subgraph(self.old.inputs, tuple(self.ops), tuple(self.new[v] for v in self.old.outputs))

    def add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.old.inputs) + len(self.ops) - 1

    def spec(self, ref: Ref) -> TensorSpec:
        k = ref.to - len(self.old.inputs)
        return self.old.inputs[ref.to] if k < 0 else self.ops[k].out

    def full(self, name: str, *args, dtype: str = "float32") -> Ref:
        """A pointwise op in the shape its tensors broadcast to."""
        shapes = [self.spec(a).shape for a in args if isinstance(a, Ref)]
        shape = max(shapes, key=lambda s: (len(s), math.prod(s)))
        return Ref(self.add(Op(f"aten.{name}.Tensor", args, (), TensorSpec(shape, dtype, _contiguous(shape)))))

    def reduce(self, name: str, x: Ref, dims: tuple, out: TensorSpec | None = None) -> Ref:
        shape = tuple(1 if d in dims else n for d, n in enumerate(self.spec(x).shape))
        out = out or TensorSpec(shape, "float32", _contiguous(shape))
        return Ref(self.add(Op(f"aten.{name}.default", (x, dims, True), (), out)))

    def out(self, ref: Ref) -> Ref:
        """The last op's result, with the spec the model's operator has."""
        last = self.ops[-1]
        self.ops[-1] = replace(last, out=self.op.out)
        return ref

    def arg(self, position: int, name: str, default=None):
        return self.op.args[position] if position < len(self.op.args) else self.op.kwarg(name, default)

    def count(self, x: Ref, dims: tuple) -> int:
        return math.prod(self.spec(x).shape[d] for d in dims)

    def dims(self, x: Ref, position: int = 1) -> tuple:
        dims = self.arg(position, "dim")
        rank = len(self.spec(x).shape)
        if dims is None or dims == ():
            return tuple(range(rank))
        return tuple(sorted(d % rank for d in (dims if isinstance(dims, tuple) else (dims,))))

    def need_keepdim(self, position: int) -> None:
        if not self.arg(position, "keepdim", False):
            raise Unsupported("a reduction drops its dimension (keepdim=False)")

    def need_float(self, x: Ref) -> None:
        if self.spec(x).dtype not in LIMITS:
            raise Unsupported(f"{self.op.target} on {self.spec(x).dtype}")


def _contiguous(shape: tuple) -> tuple:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _sum(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    e.need_keepdim(2)
    return e.out(e.reduce("sum", x, e.dims(x)))


def _mean(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    e.need_keepdim(2)
    dims = e.dims(x)
    return e.out(e.full("div", e.reduce("sum", x, dims), e.count(x, dims)))


def _extreme(e: _Expansion) -> Ref:
    """NaN in a row must come out: the hardware's max drops it, so it is counted."""
    x = e.op.args[0]
    e.need_float(x)
    e.need_keepdim(2)
    dims = e.dims(x)
    top = e.reduce(e.op.name, x, dims)
    broken = e.reduce("sum", e.full("_to_copy", e.full("isnan", x, dtype="bool")), dims)
    return e.out(e.full("where", e.full("gt", broken, 0, dtype="bool"), math.nan, top))


def _variance(e: _Expansion, x: Ref, dims: tuple, correction: float) -> Ref:
    d = _centred(e, x, dims)
    return e.full("div", e.reduce("sum", e.full("mul", d, d), dims), max(0.0, e.count(x, dims) - correction))


def _centred(e: _Expansion, x: Ref, dims: tuple) -> Ref:
    """x minus its mean. The mean of that is the mean's rounding error: small, but not next to a small variance."""
    d = e.full("sub", x, _mean_of(e, x, dims))
    return d if e.spec(x).dtype != "float32" else e.full("sub", d, _mean_of(e, d, dims))


def _mean_of(e: _Expansion, x: Ref, dims: tuple) -> Ref:
    return e.full("div", e.reduce("sum", x, dims), e.count(x, dims))


def _correction(e: _Expansion) -> float:
    if e.op.target.endswith(".correction"):
        found = e.op.kwarg("correction", 1)
        return 1.0 if found is None else float(found)
    return 1.0 if e.arg(2, "unbiased", True) else 0.0


def _var(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    e.need_keepdim(3)
    return e.out(_variance(e, x, e.dims(x), _correction(e)))


def _std(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    e.need_keepdim(3)
    return e.out(e.full("sqrt", _variance(e, x, e.dims(x), _correction(e))))


def _norm(e: _Expansion) -> Ref:
    x, order = e.op.args[0], e.arg(1, "ord", 2)
    e.need_float(x)
    e.need_keepdim(3)
    if order == 2:
        return e.out(e.full("sqrt", e.reduce("sum", e.full("mul", x, x), e.dims(x, 2))))
    if order == 1:
        return e.out(e.reduce("sum", e.full("abs", x), e.dims(x, 2)))
    raise Unsupported(f"a norm of order {order}")


def _exponentials(e: _Expansion) -> tuple:
    x, dim = e.op.args[0], e.arg(1, "dim")
    e.need_float(x)
    dims = (dim % len(e.spec(x).shape),) if e.spec(x).shape else ()
    shifted = e.full("sub", x, e.reduce("amax", x, dims))
    exp = e.full("exp", shifted)
    return shifted, exp, e.reduce("sum", exp, dims)


def _softmax(e: _Expansion) -> Ref:
    _, exp, total = _exponentials(e)
    if e.op.out.dtype != "float32":  # one reciprocal per row; the product is rounded to 16 bits anyway
        return e.out(e.full("mul", exp, e.full("reciprocal", total)))
    return e.out(e.full("div", exp, total))


def _log_softmax(e: _Expansion) -> Ref:
    shifted, _, total = _exponentials(e)
    return e.out(e.full("sub", shifted, e.full("log", total)))


def _affine(e: _Expansion, y: Ref, weight, bias) -> Ref:
    y = e.full("mul", y, weight) if isinstance(weight, Ref) else y
    y = e.full("add", y, bias) if isinstance(bias, Ref) else y
    return e.out(y)


def _last_dims(e: _Expansion, x: Ref) -> tuple:
    rank, depth = len(e.spec(x).shape), len(e.arg(1, "normalized_shape"))
    return tuple(range(rank - depth, rank))


def _layer_norm(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    dims = _last_dims(e, x)
    d, count, eps = e.full("sub", x, _mean_of(e, x, dims)), e.count(x, dims), e.arg(4, "eps", 1e-5)
    v = e.full("div", e.reduce("sum", e.full("mul", d, d), dims), count)
    if e.spec(x).dtype != "float32":
        y = e.full("mul", d, e.full("rsqrt", e.full("add", v, eps)))
        return _affine(e, y, e.arg(2, "weight"), e.arg(3, "bias"))
    # the mean of d is the mean's rounding error: small, but not next to a small variance
    error = _mean_of(e, d, dims)
    v = e.full("clamp_min", e.full("sub", v, e.full("mul", error, error)), 0.0)
    scale = e.full("rsqrt", e.full("add", v, eps))
    y = e.full("sub", e.full("mul", d, scale), e.full("mul", error, scale))  # one rounding where there is a fused a*b-c
    return _affine(e, y, e.arg(2, "weight"), e.arg(3, "bias"))


def _rms_norm(e: _Expansion) -> Ref:
    x = e.op.args[0]
    e.need_float(x)
    dims, eps = _last_dims(e, x), e.arg(3, "eps")
    eps = LIMITS[e.spec(x).dtype] if eps is None else eps
    mean = e.full("div", e.reduce("sum", e.full("mul", x, x), dims), e.count(x, dims))
    scale = e.full("rsqrt", e.full("add", e.full("nan_if_inf", mean), eps))
    return _affine(e, e.full("mul", x, scale), e.arg(2, "weight"), None)


EXPANSIONS = {
    "sum": _sum, "mean": _mean, "amax": _extreme, "amin": _extreme, "var": _var, "std": _std,
    "linalg_vector_norm": _norm, "softmax": _softmax, "_softmax": _softmax, "log_softmax": _log_softmax,
    "_log_softmax": _log_softmax, "layer_norm": _layer_norm, "rms_norm": _rms_norm,
}  # fmt: skip
