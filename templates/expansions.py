"""Composite operators over rows, written out in primitive ones: norms, softmaxes, losses, reductions.

A norm that the model spells out and one it calls are then the same to the template. Primitive reductions are `sum`,
`amax`, `amin`; and for rows that are walked in chunks, where every pass reads them again, two more: `head`, the mean
of a row's first chunk, and `sumexp`, which is summed up in the pass that finds the maximum. A `sum` in float64 is one
whose parts meet in float64; `high` and `low` are the two float32 numbers that its quotient by a constant is made of.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.layout import argument
from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

PICK = "row_pick"
"""Of a full-row value the one at a place that is known per row; computed for itself, not kept from a pass."""
HIGH, LOW = "row_high", "row_low"
"""The two parts of a mean."""
LIMITS = {"float32": 1.1920928955078125e-07, "float16": 0.0009765625, "bfloat16": 0.0078125}


class Expansion:
    """Rewrites a sub-graph without views into primitive ops; old value indices are looked up in `new`.

    Args:
        walked: the row is read again in each pass, so few passes are worth more arithmetic.
        cpu: eager's formulas are those of its CPU kernels; they differ where a weight is infinite.
    """

    def __init__(self, graph: Subgraph, walked: bool, cpu: bool) -> None:
        self.old, self.walked, self.cpu, self.ops = graph, walked, cpu, []
        self.new = {k: k for k in range(len(graph.inputs))}
        for k, op in enumerate(graph.ops):
            self.old_op = op
            self.op = replace(op, args=substitute(op.args, self.new), kwargs=substitute(op.kwargs, self.new))
            rule = RULES.get(op.name)
            made = rule(self) if rule else Ref(self.add(self.op))
            self.new[len(graph.inputs) + k] = made.to

    def result(self) -> Subgraph:
        """What the outputs need."""
        first, need = len(self.old.inputs), set()
        stack = [self.new[v] for v in self.old.outputs]
        while stack:
            value = stack.pop()
            if value not in need:
                need.add(value)
                stack += self.ops[value - first].inputs if value >= first else ()
        kept = [v for v in range(first, first + len(self.ops)) if v in need]
        number = {v: v for v in range(first)} | {v: first + k for k, v in enumerate(kept)}

        def renumbered(op: Op) -> Op:
            return replace(op, args=substitute(op.args, number), kwargs=substitute(op.kwargs, number))

        ops = tuple(renumbered(self.ops[v - first]) for v in kept)
        return Subgraph(self.old.inputs, ops, tuple(number[self.new[v]] for v in self.old.outputs))

    def add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.old.inputs) + len(self.ops) - 1

    def spec(self, ref: Ref) -> TensorSpec:
        k = ref.to - len(self.old.inputs)
        return self.old.inputs[ref.to] if k < 0 else self.ops[k].out

    def full(self, name: str, *args, dtype: str = "float32") -> Ref:
        """A pointwise op in the shape its tensors broadcast to."""
        shapes = [self.spec(a).shape for a in args if isinstance(a, Ref)]
        shape = tuple(map(max, zip(*shapes, strict=True)))
        return Ref(self.add(Op(f"aten.{name}.Tensor", args, (), TensorSpec(shape, dtype, contiguous(shape)))))

    def reduce(self, name: str, x: Ref, axes: tuple, *more: Ref, dtype: str = "float32") -> Ref:
        shape = tuple(1 if d in axes else n for d, n in enumerate(self.spec(x).shape))
        out = TensorSpec(shape, dtype, contiguous(shape))
        return Ref(self.add(Op(f"aten.{name}.default", (x, axes, True, *more), (), out)))

    def pick(self, x: Ref, place: Ref) -> Ref:
        """The element of each row at a place."""
        return Ref(self.add(Op(f"aten.{PICK}.default", (x, place), (), replace(self.spec(place), dtype="float32"))))

    def part(self, name: str, total: Ref, count: int) -> Ref:
        """`HIGH` or `LOW` of a float64 sum over a count."""
        spec = replace(self.spec(total), dtype="float32")
        return Ref(self.add(Op(f"aten.{name}.default", (total, count), (), spec)))

    def moments(self, x: Ref, axes: tuple) -> "Moments":
        return _moments(self, x, axes)

    def out(self, ref: Ref) -> Ref:
        """The last op's result, with the spec the model's operator has."""
        last = self.ops[-1]
        self.ops[-1] = replace(last, out=self.op.out)
        return ref

    def arg(self, position: int, name: str, default=None):
        return argument(self.op, position, name, default)

    @property
    def axes(self) -> tuple:
        return self.op.kwarg("axes")

    def count(self, x: Ref, axes: tuple) -> int:
        return math.prod(self.spec(x).shape[d] for d in axes)

    def source(self) -> Ref:
        """The operator's floating-point input."""
        x = self.op.args[0]
        if self.spec(x).dtype not in LIMITS:
            raise Unsupported(f"{self.op.target} on {self.spec(x).dtype}")
        return x


def contiguous(shape: tuple) -> tuple:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _sum(e: Expansion) -> Ref:
    return e.out(e.reduce("sum", e.source(), e.axes))


def _mean(e: Expansion) -> Ref:
    return e.out(_mean_of(e, e.source(), e.axes))


def _mean_of(e: Expansion, x: Ref, axes: tuple) -> Ref:
    return e.full("div", e.reduce("sum", x, axes), e.count(x, axes))


def _extreme(e: Expansion) -> Ref:
    """NaN in a row must come out: the hardware's max drops it, so it is counted."""
    x, axes = e.source(), e.axes
    top = e.reduce(e.op.name, x, axes)
    broken = e.reduce("sum", e.full("_to_copy", e.full("isnan", x, dtype="bool")), axes)
    return e.out(e.full("where", e.full("gt", broken, 0, dtype="bool"), math.nan, top))


@dataclass(frozen=True)
class Moments:
    """Of rows x: their mean is `shift` + `rest`, `d` = x - `shift`, and `squares` sums the squared deviations from it.

    `rest` is None where it is of no account; `mean` is both in one number.
    """

    shift: Ref
    d: Ref
    rest: Ref | None
    mean: Ref
    squares: Ref


def _moments(e: Expansion, x: Ref, axes: tuple) -> Moments:
    """Mean and squares, so that of x - mean little is lost where x is near the mean.

    Rows that are walked are shifted by the mean of their first chunk and need one pass less. It is within sqrt(chunks)
    deviations of the row's mean, so the difference below magnifies errors by no more than 1 + chunks.
    """
    count = e.count(x, axes)
    if e.spec(x).dtype == "float32" and not e.cpu:
        return _exact_moments(e, x, axes, count)
    shift = e.reduce("head", x, axes) if e.walked else _mean_of(e, x, axes)
    d = e.full("sub", x, shift)
    squares = e.reduce("sum", e.full("mul", d, d), axes)
    if not e.walked and e.spec(x).dtype != "float32":
        return Moments(shift, d, None, shift, squares)
    rest = _mean_of(e, d, axes)
    squares = e.full("sub", squares, e.full("mul", e.full("mul", rest, rest), count))
    return Moments(shift, d, rest, e.full("add", shift, rest), e.full("clamp_min", squares, 0.0))


def _exact_moments(e: Expansion, x: Ref, axes: tuple, count: int) -> Moments:
    """In float32 eager's own error is so small that the order of a sum shows: its parts meet in float64 here.

    The mean of x - shift would not do: all elements in one power of two are rounded alike there, which made 9 times the
    error that the mean itself has (15876 normal elements: 8.6e-9 and 0.9e-9).
    """
    total = e.reduce("sum", x, axes, dtype="float64")
    high, low = e.part(HIGH, total, count), e.part(LOW, total, count)
    shift = e.reduce("head", x, axes) if e.walked else high
    shifted = e.full("sub", x, shift)
    squares = e.part(HIGH, e.reduce("sum", e.full("mul", shifted, shifted), axes, dtype="float64"), 1)
    off = e.full("add", e.full("sub", high, shift), low) if e.walked else low
    squares = e.full("sub", squares, e.full("mul", e.full("mul", off, off), count))
    d = e.full("sub", x, high) if e.walked else shifted
    return Moments(high, d, low, high, e.full("clamp_min", squares, 0.0))


def _variance(e: Expansion) -> Ref:
    x, axes = e.source(), e.axes
    if e.op.target.endswith(".correction"):
        found = e.op.kwarg("correction", 1)
        correction = 1.0 if found is None else float(found)
    elif e.op.target.endswith(".default"):
        correction = 1.0 if e.arg(1, "unbiased", True) else 0.0
    else:
        correction = 1.0 if e.arg(2, "unbiased", True) else 0.0
    return e.full("div", e.moments(x, axes).squares, max(0.0, e.count(x, axes) - correction))


def _var(e: Expansion) -> Ref:
    return e.out(_variance(e))


def _std(e: Expansion) -> Ref:
    return e.out(e.full("sqrt", _variance(e)))


def _norm(e: Expansion) -> Ref:
    x, order = e.source(), e.arg(1, "ord", 2)
    if order == 2:
        return e.out(e.full("sqrt", e.reduce("sum", e.full("mul", x, x), e.axes)))
    if order == 1:
        return e.out(e.reduce("sum", e.full("abs", x), e.axes))
    raise Unsupported(f"a norm of order {order}")


def _exponentials(e: Expansion, x: Ref) -> tuple:
    """(maximum, x less it, exponential of that or None where it has to be computed again, sum of the exponentials)."""
    top = e.reduce("amax", x, e.axes)
    if e.walked:
        total = e.reduce("sumexp", x, e.axes, top)
        return top, e.full("sub", x, top), None, total
    shifted = e.full("sub", x, top)
    exp = e.full("exp", shifted)
    return top, shifted, exp, e.reduce("sum", exp, e.axes)


def _softmax(e: Expansion) -> Ref:
    _, shifted, exp, total = _exponentials(e, e.source())
    exp = exp or e.full("exp", shifted)
    if e.op.out.dtype != "float32":  # one reciprocal per row; the product is rounded to 16 bits anyway
        return e.out(e.full("mul", exp, e.full("reciprocal", total)))
    return e.out(e.full("div", exp, total))


def _log_softmax(e: Expansion) -> Ref:
    _, shifted, _, total = _exponentials(e, e.source())
    return e.out(e.full("sub", shifted, e.full("log", total)))


def _logsumexp(e: Expansion) -> Ref:
    """An infinite maximum is taken for 0, as eager does: then nothing is inf - inf."""
    x = e.source()
    if e.walked:
        top, _, _, total = _exponentials(e, x)
    else:
        top = e.reduce("amax", x, e.axes)
        infinite = e.full("isinf", top, dtype="bool")
        top = e.full("where", infinite, 0.0, top)
        total = e.reduce("sum", e.full("exp", e.full("sub", x, top)), e.axes)
        return e.out(e.full("add", e.full("log", total), top))
    found = e.full("add", e.full("log", total), top)
    # with +inf in the row the sum has inf - inf in it; NaN only counts where one was there
    infinite = e.full("eq", top, math.inf, dtype="bool")
    broken = e.reduce("sum", e.full("_to_copy", e.full("isnan", x, dtype="bool")), e.axes)
    clean = e.full("logical_and", infinite, e.full("eq", broken, 0, dtype="bool"), dtype="bool")
    return e.out(e.full("where", clean, math.inf, found))


def _affine(e: Expansion, y: Ref, weight, bias) -> Ref:
    y = e.full("mul", y, weight) if isinstance(weight, Ref) else y
    y = e.full("add", y, bias) if isinstance(bias, Ref) else y
    return e.out(y)


def _normalised(e: Expansion, weight, bias, eps: float, fused: bool) -> Ref:
    """(x - mean) scale weight + bias.

    `fused`: some eager kernels compute x a + (bias - mean a), a = scale weight, which differs where a is infinite.
    """
    x = e.source()
    found = e.moments(x, e.axes)
    scale = e.full("rsqrt", e.full("add", e.full("div", found.squares, e.count(x, e.axes)), eps))
    exact = e.spec(x).dtype == "float32" and not e.cpu
    if fused and isinstance(weight, Ref):
        scale, bias = e.full("mul", scale, weight), bias if isinstance(bias, Ref) else None
        return e.out(_as_eager_where_infinite(e, x, found, scale, bias) if exact else _fused(e, x, found, scale, bias))
    if exact:  # exact near the mean
        return _affine(e, e.full("mul", e.full("sub", found.d, found.rest), scale), weight, bias)
    y = e.full("mul", found.d, scale)
    if found.rest is not None:  # one rounding where there is a fused a*b-c
        y = e.full("sub", y, e.full("mul", found.rest, scale))
    return _affine(e, y, weight, bias)


def _fused(e: Expansion, x: Ref, found: Moments, scale: Ref, bias: Ref | None) -> Ref:
    """x scale + (bias - mean scale), and what the bracket was rounded by again."""
    lost = e.full("mul", found.mean, scale)
    moved = e.full("sub", bias, lost) if bias else e.full("neg", lost)
    rounded = e.full("sub", e.full("sub", bias, moved) if bias else e.full("neg", moved), lost)
    rounded = e.full("where", e.full("isfinite", moved, dtype="bool"), rounded, 0.0)
    return e.full("add", e.full("add", e.full("mul", x, scale), moved), rounded)


def _as_eager_where_infinite(e: Expansion, x: Ref, found: Moments, scale: Ref, bias: Ref | None) -> Ref:
    """(x - mean) scale + bias, or eager's formula where that gives other infinities."""
    lost = e.full("mul", found.mean, scale)
    moved = e.full("sub", bias, lost) if bias else e.full("neg", lost)
    infinite = e.full("add", e.full("mul", x, scale), moved)
    y = e.full("mul", e.full("sub", found.d, found.rest), scale)
    y = e.full("add", y, bias) if bias else y
    return e.full("where", e.full("isfinite", moved, dtype="bool"), y, infinite)


def _layer_norm(e: Expansion) -> Ref:
    return _normalised(e, e.arg(2, "weight"), e.arg(3, "bias"), e.arg(4, "eps", 1e-5), fused=False)


def _group_norm(e: Expansion) -> Ref:
    weight, bias = e.arg(2, "weight"), e.arg(3, "bias")
    channels = isinstance(weight, Ref) and all(e.spec(weight).shape[d] != 1 for d in e.axes)
    return _normalised(e, weight, bias, e.arg(4, "eps", 1e-5), fused=e.cpu or not channels)


def _instance_norm(e: Expansion) -> Ref:
    return _normalised(e, e.arg(1, "weight"), e.arg(2, "bias"), e.arg(7, "eps", 1e-5), fused=e.cpu)


def _rms_norm(e: Expansion) -> Ref:
    x, eps = e.source(), e.arg(3, "eps")
    eps = LIMITS[e.spec(x).dtype] if eps is None else eps
    mean = _mean_of(e, e.full("mul", x, x), e.axes)
    scale = e.full("rsqrt", e.full("add", e.full("nan_if_inf", mean), eps))
    return _affine(e, e.full("mul", x, scale), e.arg(2, "weight"), None)


def _loss_of(e: Expansion, x: Ref, top: Ref | None, logarithm: Ref | None) -> Ref:
    """Negative log-likelihood of each place's class. x is its logarithm; or a score, with maximum and log-sum-exp."""
    if isinstance(e.arg(2, "weight"), Ref) or len(e.axes) != 1:
        raise Unsupported(f"{e.op.target} with class weights")

    def minus_log(score: Ref) -> Ref:
        if top is None:
            return e.full("neg", score)
        return e.full("sub", logarithm, e.full("sub", score, top))

    smoothing = e.arg(5, "label_smoothing", 0.0) if e.op.name == "cross_entropy_loss" else 0.0
    target = e.full("_to_copy", e.op.args[1], dtype="int32")
    classes = e.count(x, e.axes)
    inside = e.full("clamp", target, 0, classes - 1, dtype="int32")  # one that is ignored may be anything
    loss = minus_log(e.pick(x, inside))
    if smoothing:
        even = minus_log(_mean_of(e, x, e.axes))
        loss = e.full("add", e.full("mul", loss, 1 - smoothing), e.full("mul", even, smoothing))
    counted = e.full("ne", target, e.arg(4, "ignore_index", -100), dtype="bool")
    loss = e.full("where", counted, loss, 0.0)
    reduction = e.arg(3, "reduction", 1)
    if reduction == 0:
        return e.out(loss)
    lead = tuple(d for d, n in enumerate(e.spec(loss).shape) if n != 1)
    total = e.reduce("sum", loss, lead) if lead else loss
    if reduction == 2:
        return e.out(e.full("positive", total))
    number = e.full("_to_copy", counted)
    return e.out(e.full("div", total, e.reduce("sum", number, lead) if lead else number))


def _cross_entropy(e: Expansion) -> Ref:
    x = e.source()
    top, _, _, total = _exponentials(e, x)
    return _loss_of(e, x, top, e.full("log", total))


def _nll_loss(e: Expansion) -> Ref:
    """Behind a log_softmax it is a cross entropy: the log-probabilities need not be made."""
    made = e.old.op_of(e.old_op.args[0].to)
    if made is not None and made.name in ("log_softmax", "_log_softmax") and made.kwarg("axes") == e.axes:
        x = Ref(e.new[made.args[0].to])
        top, _, _, total = _exponentials(e, x)
        return _loss_of(e, x, top, e.full("log", total))
    return _loss_of(e, e.source(), None, None)


RULES = {
    "sum": _sum, "mean": _mean, "amax": _extreme, "amin": _extreme, "var": _var, "std": _std,
    "linalg_vector_norm": _norm, "softmax": _softmax, "_softmax": _softmax, "log_softmax": _log_softmax,
    "_log_softmax": _log_softmax, "logsumexp": _logsumexp, "layer_norm": _layer_norm, "rms_norm": _rms_norm,
    "group_norm": _group_norm, "instance_norm": _instance_norm, "adaptive_avg_pool1d": _mean,
    "adaptive_avg_pool2d": _mean, "adaptive_avg_pool3d": _mean, "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll_loss, "nll_loss_nd": _nll_loss,
}  # fmt: skip
