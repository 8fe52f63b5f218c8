"""Activation functions as expressions; the table `ACTIVATIONS` joins that of `operators.py`."""

import math

from fusescout.templates.operators import Unsupported
from fusescout.templates.operators import Writer

from fusescout.ir import TensorSpec

KAPPA, CUBIC = math.sqrt(2 / math.pi), 0.044715
ERF_IS_ONE, TANH_IS_ONE = 6.9, 14.0
"""erf(x / sqrt 2) and tanh(x) are 1 in float32 from 5.54 and 9.01 on, in float64 from 8.29 and 19.06: the middle.

An infinite factor is NaN in eager from the first on and in truth from the second on, and either may be given. Eager
rounds x to 16 bits first: at its own limit, elements on both sides of it would differ in class.
"""


def _leaky_relu(w: Writer) -> str:
    w.need_float()
    return f"where({w.x()} > {w.f(0)}, {w.x()}, {w.x()} * {w.f(w.number(1, 'negative_slope', 0.01))})"


def _rrelu(w: Writer) -> str:
    w.need_float()
    if w.number(3, "training", False):
        raise Unsupported("rrelu in training draws random numbers")
    slope = (w.number(1, "lower", 1 / 8) + w.number(2, "upper", 1 / 3)) / 2
    return f"where({w.x()} > {w.f(0)}, {w.x()}, {w.x()} * {w.f(slope)})"


def _elu_text(w: Writer, alpha: float, scale: float, input_scale: float) -> str:
    w.need_float()
    x = w.x()
    inner = x if input_scale == 1 else f"{x} * {w.f(input_scale)}"
    positive = x if scale == 1 else f"{x} * {w.f(scale)}"
    return f"where({x} > {w.f(0)}, {positive}, expm1({inner}) * {w.f(alpha * scale)})"


def _elu(w: Writer) -> str:
    return _elu_text(w, w.number(1, "alpha", 1.0), w.number(2, "scale", 1.0), w.number(3, "input_scale", 1.0))


def _selu(w: Writer) -> str:
    return _elu_text(w, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


def _celu(w: Writer) -> str:
    alpha = w.number(1, "alpha", 1.0)
    return _elu_text(w, alpha, 1.0, 1.0 / alpha)


def _gelu(w: Writer) -> str:
    w.need_float()
    x = w.x()
    if w.arg(1, "approximate", "none") == "none":
        value, vanishes = f"gelu({x})", f"{x} < {w.f(-ERF_IS_ONE)}"
    else:  # 0.5 x (1 + tanh u) = x sigmoid(2u): half the instructions, and no cancellation in the negative tail
        twice = w.let(f"{x} * ({w.f(2 * KAPPA)} + {w.f(2 * KAPPA * CUBIC)} * ({x} * {x}))")
        value, vanishes = f"{x} * sigmoid({twice})", f"{twice} < {w.f(-2 * TANH_IS_ONE)}"
    # Eager's 1 + erf or 1 + tanh is 0 there: an infinite factor (GeGLU's) makes NaN of it. A store sees none of this.
    return f"where({vanishes}, {x} * {w.f(0)}, {value})" if _is_used(w) else value


def _is_used(w: Writer) -> bool:
    """Whether another operator of the chain computes with the value."""
    return any(w.index in op.inputs for op in w.graph.ops)


def _silu(w: Writer) -> str:
    w.need_float()
    return f"{w.x()} * sigmoid({w.x()})"


def _softplus(w: Writer) -> str:
    w.need_float()
    beta, threshold = w.number(1, "beta", 1), w.number(2, "threshold", 20)
    x = w.x()
    scaled = x if beta == 1 else w.let(f"{x} * {w.f(beta)}")
    soft = w.let(f"maximum({scaled}, {w.f(0)}) + log1p(exp(-fabs({scaled})))")  # log1p(exp(x)), rounded once less
    return f"where({scaled} > {w.f(threshold)}, {x}, {soft if beta == 1 else f'div({soft}, {w.f(beta)})'})"


def _mish(w: Writer) -> str:
    """x tanh(log(1 + exp x)) as a quotient of polynomials in e = exp(-|x|)."""
    w.need_float()
    x, two = w.x(), w.f(2)
    e = w.let(f"exp(-fabs({x}))")
    above = w.let(f"where({x} > {w.f(0)}, {w.f(1)} + {two} * {e}, {e} * ({e} + {two}))")
    return f"{x} * div({above}, {above} + where({x} > {w.f(0)}, {two} * {e} * {e}, {two}))"


def _log_sigmoid(w: Writer) -> str:
    w.need_float()
    return f"minimum({w.x()}, {w.f(0)}) - log1p(exp(-fabs({w.x()})))"


def _hardsigmoid_text(w: Writer) -> str:
    w.need_float()
    return f"minimum(maximum({w.x()} + {w.f(3)}, {w.f(0)}), {w.f(6)})"


def _threshold(w: Writer) -> str:
    return f"where({w.x()} <= {w.x(1, 'threshold')}, {w.x(2, 'value')}, {w.x()})"


def _hardshrink(w: Writer) -> str:
    w.need_float()
    return f"where(fabs({w.x()}) <= {w.f(w.number(1, 'lambd', 0.5))}, {w.f(0)}, {w.x()})"


def _softshrink(w: Writer) -> str:
    w.need_float()
    x, bound = w.x(), w.f(w.number(1, "lambd", 0.5))
    inside = f"where({x} < -{bound}, {x} + {bound}, {x} * {w.f(0)})"  # NaN stays NaN
    return f"where({x} > {bound}, {x} - {bound}, {inside})"


def _prelu(w: Writer) -> str:
    w.need_float()
    spec = w.graph.tensor(w.arg(1).to)
    if spec.numel != 1 and isinstance(w.op.out, TensorSpec) and len(w.op.out.shape) > 2:
        raise Unsupported("prelu with a weight per channel, which lines up with dimension 1")
    return f"where({w.x()} > {w.f(0)}, {w.x()}, {w.x()} * {w.x(1)})"


ACTIVATIONS = {
    "leaky_relu": _leaky_relu, "rrelu": _rrelu, "elu": _elu, "selu": _selu, "celu": _celu, "gelu": _gelu,
    "silu": _silu, "mish": _mish, "softplus": _softplus, "log_sigmoid": _log_sigmoid, "threshold": _threshold,
    "hardshrink": _hardshrink, "softshrink": _softshrink, "prelu": _prelu,
    "hardsigmoid": lambda w: f"{_hardsigmoid_text(w)} * {w.f(1 / 6)}",
    "hardswish": lambda w: f"{w.x()} * {_hardsigmoid_text(w)} * {w.f(1 / 6)}",
}  # fmt: skip
