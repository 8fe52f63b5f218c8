"""One function per ATen operator: from its arguments, through a `Writer`, to the text of its result.

They follow eager's formulas, except where a cheaper or more accurate one gives the same NaN and inf.
"""

import math
from collections.abc import Callable
from typing import Any

from fusescout.ir import Ref

Writer = Any  # expression.Writer, which imports this module


class Unsupported(Exception):
    """Why an operator has no expression here; becomes a reason, never an error."""


def _unary(name: str) -> Callable:
    def text(w: Writer) -> str:
        w.need_float()
        return f"{name}({w.x()})"

    return text


def _binary(name: str) -> Callable:
    def text(w: Writer) -> str:
        w.need_float()
        return f"{name}({w.x(0)}, {w.x(1)})"

    return text


def _compare(name: str) -> Callable:
    def text(w: Writer) -> str:
        a, b = w.arg(0), w.arg(1)
        dtype = w.common(a, b)
        if dtype == "bool":
            return f'{name}(T.cast({w.value(a, "bool")}, "int32"), T.cast({w.value(b, "bool")}, "int32"))'
        return f"{name}({w.value(a, dtype)}, {w.value(b, dtype)})"

    return text


def _scaled(w: Writer, arg, factor) -> str:
    return w.value(arg) if factor == 1 else f"{w.value(factor)} * {w.value(arg)}"


def _add(w: Writer) -> str:
    if w.out == "bool":
        return f"T.Or({w.x(0)}, {w.x(1)})"
    return f"{w.x(0)} + {_scaled(w, w.arg(1), w.number(2, 'alpha', 1))}"


def _sub(w: Writer) -> str:
    return f"{w.x(0)} - {_scaled(w, w.arg(1), w.number(2, 'alpha', 1))}"


def _rsub(w: Writer) -> str:
    return f"{w.x(1)} - {_scaled(w, w.arg(0), w.number(2, 'alpha', 1))}"


def _mul(w: Writer) -> str:
    return f"T.And({w.x(0)}, {w.x(1)})" if w.out == "bool" else f"{w.x(0)} * {w.x(1)}"


def _divisor(w: Writer) -> None:
    if not isinstance(w.arg(1), int) or not w.arg(1):
        raise Unsupported(f"{w.op.target} of integers by anything but a non-zero constant")


def _div(w: Writer) -> str:
    mode = w.arg(2, "rounding_mode")
    if mode is None:
        return _quotient(w, w.x(0), w.arg(1))
    if w.out == "float32":
        return f"floor_div({w.x(0)}, {w.x(1)})" if mode == "floor" else f"trunc(div({w.x(0)}, {w.x(1)}))"
    _divisor(w)
    return f"{'T.floordiv' if mode == 'floor' else 'T.truncdiv'}({w.x(0)}, {w.x(1)})"


def _quotient(w: Writer, x: str, by) -> str:
    """Division; by a power of two it is a multiplication."""
    number = isinstance(by, int | float) and by and math.isfinite(by)
    if number and abs(math.frexp(by)[0]) == 0.5 and 2.0**-126 < abs(by) < 2.0**126:
        return f"{x} * {w.f(1 / by)}"
    return f"div({x}, {w.value(by)})"


def _floor_divide(w: Writer) -> str:
    if w.out == "float32":
        return f"floor_div({w.x(0)}, {w.x(1)})"
    _divisor(w)
    return f"T.floordiv({w.x(0)}, {w.x(1)})"


def _remainder(w: Writer) -> str:
    if w.out == "float32":
        return f"remainder({w.x(0)}, {w.x(1)})"
    _divisor(w)
    return f"T.floormod({w.x(0)}, {w.x(1)})"


def _fmod(w: Writer) -> str:
    if w.out == "float32":
        return f"fmod({w.x(0)}, {w.x(1)})"
    _divisor(w)
    return f"T.truncmod({w.x(0)}, {w.x(1)})"


def _abs(w: Writer) -> str:
    return f"fabs({w.x()})" if w.out == "float32" else f"where({w.x()} < {w.literal(0, w.out)}, -{w.x()}, {w.x()})"


def _sign(w: Writer) -> str:
    zero = w.literal(0, w.out)
    return f"where({zero} < {w.x()}, {w.literal(1, w.out)}, where({w.x()} < {zero}, {w.literal(-1, w.out)}, {zero}))"


def _pow(w: Writer) -> str:
    base, exponent = w.arg(0), w.arg(1)
    if isinstance(exponent, Ref):
        w.need_float()
        return f"pow({w.value(base)}, {w.value(exponent)})"
    x = w.value(base)
    if w.out != "float32":
        if exponent not in (1, 2, 3, 4):
            raise Unsupported(f"pow of {w.out} by {exponent}")
        return " * ".join([x] * int(exponent))
    special = {
        0: w.f(1.0), 1: x, 2: f"{x} * {x}", 3: f"{x} * {x} * {x}", 0.5: f"sqrt({x})", -0.5: f"rsqrt({x})",
        -1: f"rcp({x})", -2: f"rcp({x} * {x})",
    }  # fmt: skip
    if exponent == 4:
        square = w.let(f"{x} * {x}")
        return f"{square} * {square}"
    return special.get(exponent) or f"pow({x}, {w.f(exponent)})"


def _relu(w: Writer) -> str:
    zero = w.literal(0, w.out)
    return f"where({w.x()} < {zero}, {zero}, {w.x()})"


def _clamp_text(w: Writer, x: str, low, high) -> str:
    """min(max(x, low), high), keeping NaN."""
    for bound, name, symbol in ((low, "maximum", ">"), (high, "minimum", "<")):
        if bound is None:
            continue
        limit = w.value(bound)
        x = f"{name}({x}, {limit})" if w.out == "float32" else w.let(f"where({x} {symbol} {limit}, {x}, {limit})")
    return x


def _clamp(w: Writer) -> str:
    return _clamp_text(w, w.x(), w.arg(1, "min"), w.arg(2, "max"))


def _hardtanh(w: Writer) -> str:
    return _clamp_text(w, w.x(), w.number(1, "min_val", -1.0), w.number(2, "max_val", 1.0))


def _extreme(name: str, symbol: str) -> Callable:
    def text(w: Writer) -> str:
        if w.out == "float32":
            return f"{name}({w.x(0)}, {w.x(1)})"
        if w.out == "bool":
            return f"{'T.Or' if symbol == '>' else 'T.And'}({w.x(0)}, {w.x(1)})"
        return f"where({w.x(0)} {symbol} {w.x(1)}, {w.x(0)}, {w.x(1)})"

    return text


def _where(w: Writer) -> str:
    return f"where({w.value(w.arg(0), 'bool')}, {w.x(1)}, {w.x(2)})"


def _masked_fill(w: Writer) -> str:
    return f"where({w.value(w.arg(1), 'bool')}, {w.x(2)}, {w.x(0)})"


def _logical(name: str) -> Callable:
    def text(w: Writer) -> str:
        args = [w.value(a, "bool") for a in w.op.args]
        if name == "T.Xor":
            return f'T.NE(T.cast({args[0]}, "int32"), T.cast({args[1]}, "int32"))'
        return f"{name}({', '.join(args)})"

    return text


def _bitwise(symbol: str, name: str) -> Callable:
    def text(w: Writer) -> str:
        if w.out == "bool":
            return _logical(name)(w)
        if w.out == "float32":
            raise Unsupported(f"{w.op.target} on floats")
        return f"~{w.x(0)}" if symbol == "~" else f"{w.x(0)} {symbol} {w.x(1)}"

    return text


def _float_test(text_of: Callable) -> Callable:
    def text(w: Writer) -> str:
        if w.dtype_of(w.arg(0)) != "float32":
            raise Unsupported(f"{w.op.target} on {w.dtype_of(w.arg(0))}")
        return text_of(w, w.value(w.arg(0), "float32"))

    return text


def _same(w: Writer) -> str:
    """A copy, a cast or an alias: the value in the result's compute dtype."""
    return w.x()


def _dropout(w: Writer) -> str:
    if w.number(2, "train", True) and w.number(1, "p", 0.5):
        raise Unsupported("dropout in training draws random numbers")
    return w.x()


def _batch_norm(w: Writer) -> str:
    w.need_float()
    if w.number(5, "training", True):
        raise Unsupported("batch_norm in training mode is a reduction")
    weight, bias, mean, var = (w.arg(i) for i in (1, 2, 3, 4))
    if not isinstance(mean, Ref) or not isinstance(var, Ref):
        raise Unsupported("batch_norm without running statistics")
    scale = f"rsqrt({w.value(var)} + {w.f(w.number(7, 'eps', 1e-5))})"
    if w.dialect.cpu:  # as eager does there: rounding errors are then the same
        scale = w.let(scale if weight is None else f"{scale} * {w.value(weight)}")
        shift = f"{w.value(mean)} * {scale}"
        return f"{w.x()} * {scale} " + (f"- {shift}" if bias is None else f"+ ({w.value(bias)} - {shift})")
    text = f"({w.x()} - {w.value(mean)}) * {scale}"
    text = text if weight is None else f"{text} * {w.value(weight)}"
    return text if bias is None else f"{text} + {w.value(bias)}"


def _logaddexp(w: Writer) -> str:
    w.need_float()
    a, b = w.x(0), w.x(1)
    soft = f"maximum({a}, {b}) + log1p(exp(-fabs({a} - {b})))"
    return f"where(T.And(T.EQ({a}, {b}), T.EQ(fabs({a}), {w.f(math.inf)})), {a}, {soft})"  # inf - inf is NaN


def _logit(w: Writer) -> str:
    w.need_float()
    eps = w.arg(1, "eps")
    x = w.x() if eps is None else w.let(_clamp_text(w, w.x(), eps, 1.0 - eps))
    return f"log(div({x}, {w.f(1)} - {x}))"


def _xlogy(w: Writer) -> str:
    w.need_float()
    x, y = w.x(0), w.x(1)
    return f"where(T.And(T.EQ({x}, {w.f(0)}), T.Not(isnan({y}))), {w.f(0)}, {x} * log({y}))"


def _heaviside(w: Writer) -> str:
    zero, one = w.literal(0, w.out), w.literal(1, w.out)
    return f"where(T.EQ({w.x(0)}, {zero}), {w.x(1)}, where({w.x(0)} > {zero}, {one}, {zero}))"


def _over_nan(symbol: str) -> Callable:
    """The larger or smaller of two numbers, where NaN counts as none."""

    def text(w: Writer) -> str:
        w.need_float()
        return f"where(T.Or(isnan({w.x(0)}), {w.x(0)} {symbol} {w.x(1)}), {w.x(1)}, {w.x(0)})"

    return text


def _times(factor: float) -> Callable:
    def text(w: Writer) -> str:
        w.need_float()
        return f"{w.x()} * {w.f(factor)}"

    return text


def _addcmul(w: Writer) -> str:
    scale = w.number(3, "value", 1)
    return f"{w.x(0)} + {'' if scale == 1 else w.value(scale) + ' * '}{w.x(1)} * {w.x(2)}"


def _addcdiv(w: Writer) -> str:
    w.need_float()
    scale = w.number(3, "value", 1)
    return f"{w.x(0)} + {'' if scale == 1 else w.value(scale) + ' * '}div({w.x(1)}, {w.x(2)})"


def _lerp(w: Writer) -> str:
    w.need_float()
    a, b, t = w.x(0), w.x(1), w.x(2)
    return f"where(fabs({t}) < {w.f(0.5)}, {a} + {t} * ({b} - {a}), {b} - ({b} - {a}) * ({w.f(1)} - {t}))"


def _nan_to_num(w: Writer) -> str:
    x = w.x()
    if w.out != "float32":
        return x
    top = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}[w.op.out.dtype]
    nan, high, low = w.arg(1, "nan"), w.arg(2, "posinf"), w.arg(3, "neginf")
    nan, high, low = (nan or 0.0, top if high is None else high, -top if low is None else low)
    finite = f"where(T.EQ({x}, {w.f(-math.inf)}), {w.f(low)}, {x})"
    return f"where(isnan({x}), {w.f(nan)}, where(T.EQ({x}, {w.f(math.inf)}), {w.f(high)}, {finite}))"


def _round(w: Writer) -> str:
    if w.arg(1, "decimals", 0):
        raise Unsupported("round to decimals")
    return f"rint({w.x()})" if w.out == "float32" else w.x()


def _rounding(name: str) -> Callable:
    return lambda w: f"{name}({w.x()})" if w.out == "float32" else w.x()


def _nan_if_inf(w: Writer) -> str:
    """Not an ATen operator: what CUDA's fused RMS norm, unlike the CPU's, does with an infinite mean square."""
    return w.x() if w.dialect.cpu else f"nan_if_inf({w.x()})"


def _full(position: int, name: str, default=None) -> Callable:
    return lambda w: w.literal(w.number(position, name, default), w.out)


OPERATORS = {
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "div": _div, "true_divide": _div, "divide": _div,
    "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod, "multiply": _mul, "subtract": _sub,
    "neg": lambda w: f"-{w.x()}", "negative": lambda w: f"-{w.x()}", "abs": _abs, "sign": _sign, "sgn": _sign,
    "square": lambda w: f"{w.x()} * {w.x()}", "reciprocal": _unary("rcp"), "pow": _pow, "positive": _same,
    "relu": _relu, "relu6": lambda w: _clamp_text(w, w.x(), 0, 6), "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda w: _clamp_text(w, w.x(), w.arg(1, "min"), None),
    "clamp_max": lambda w: _clamp_text(w, w.x(), None, w.arg(1, "max")),
    "hardtanh": _hardtanh,
    "maximum": _extreme("maximum", ">"), "minimum": _extreme("minimum", "<"),
    "max": _extreme("maximum", ">"), "min": _extreme("minimum", "<"),
    "where": _where, "masked_fill": _masked_fill,
    "logical_and": _logical("T.And"), "logical_or": _logical("T.Or"), "logical_not": _logical("T.Not"),
    "logical_xor": _logical("T.Xor"),
    "bitwise_and": _bitwise("&", "T.And"), "bitwise_or": _bitwise("|", "T.Or"), "bitwise_xor": _bitwise("^", "T.Xor"),
    "bitwise_not": _bitwise("~", "T.Not"),
    "__and__": _bitwise("&", "T.And"), "__or__": _bitwise("|", "T.Or"), "__xor__": _bitwise("^", "T.Xor"),
    "isnan": _float_test(lambda w, x: f"isnan({x})"),
    "isinf": _float_test(lambda w, x: f"T.EQ(fabs({x}), {w.f(math.inf)})"),
    "isfinite": _float_test(lambda w, x: f"fabs({x}) < {w.f(math.inf)}"),
    "isposinf": _float_test(lambda w, x: f"T.EQ({x}, {w.f(math.inf)})"),
    "isneginf": _float_test(lambda w, x: f"T.EQ({x}, {w.f(-math.inf)})"),
    "logaddexp": _logaddexp, "logit": _logit, "xlogy": _xlogy, "heaviside": _heaviside, "absolute": _abs,
    "fmax": _over_nan("<"), "fmin": _over_nan(">"), "frac": lambda w: f"{w.x()} - trunc({w.x()})",
    "deg2rad": _times(math.pi / 180), "rad2deg": _times(180 / math.pi),
    "batch_norm": _batch_norm, "dropout": _dropout, "feature_dropout": _dropout, "addcmul": _addcmul,
    "nan_if_inf": _nan_if_inf, "addcdiv": _addcdiv, "lerp": _lerp, "nan_to_num": _nan_to_num, "round": _round,
    "full": _full(1, "fill_value"), "full_like": _full(1, "fill_value"), "scalar_tensor": _full(0, "s"),
    "zeros_like": lambda w: w.literal(0, w.out), "ones_like": lambda w: w.literal(1, w.out),
}  # fmt: skip
UNARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin",
    "acos", "atan", "erf", "sqrt", "rsqrt", "sigmoid", "erfc", "asinh", "acosh", "atanh",
)  # fmt: skip
COMPARE = {
    "eq": "T.EQ", "ne": "T.NE", "lt": "T.LT", "le": "T.LE", "gt": "T.GT", "ge": "T.GE", "not_equal": "T.NE",
    "less": "T.LT", "less_equal": "T.LE", "greater": "T.GT", "greater_equal": "T.GE",
}  # fmt: skip
SAME = ("expand", "expand_as", "_to_copy", "to", "type_as", "clone", "contiguous", "alias", "detach")
OPERATORS |= {name: _unary(name) for name in UNARY}
OPERATORS |= {name: _rounding(name) for name in ("floor", "ceil", "trunc")}
OPERATORS |= {name: _compare(node) for name, node in COMPARE.items()}
OPERATORS |= dict.fromkeys(SAME, _same)
OPERATORS |= {name: _binary(name) for name in ("atan2", "hypot", "copysign")}
