"""Chains that templates must get right, traced from real torch functions; used on the CPU and on the GPU.

A case is a function and its inputs. `OPERATORS` are many one-operator chains on the same inputs, so that one kernel
with many outputs checks them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusescout.capture.encode import encode_graph
from fusescout.capture.mask_contents import content_of
from fusescout.ir import Subgraph


@dataclass(frozen=True)
class Case:
    """`family` is the family of templates that must cover it; inputs from number `parameters` on are parameters."""

    name: str
    family: str
    function: Callable
    inputs: Callable[[], tuple]
    parameters: int | None = None
    ordered: bool = False
    """Its masks are causal order, and known to be."""

    def traced(self, device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[Subgraph, list[Tensor]]:
        """The sub-graph and its inputs in order; `dtype` replaces float32."""
        given = tuple(_moved(t, device, dtype) for t in self.inputs())
        graph, inputs = trace(self.function, given)
        constant = {id(t) for t in given[self.parameters :]} if self.parameters else set()
        specs = zip(graph.inputs, inputs, strict=True)
        told = {id(t): content_of(t) for t in given if self.ordered and t.dtype == torch.bool}
        facts = (replace(s, constant=id(t) in constant, content=told.get(id(t), "")) for s, t in specs)
        return replace(graph, inputs=tuple(facts)), inputs


def trace(function: Callable, inputs: tuple) -> tuple[Subgraph, list[Tensor]]:
    """(sub-graph, its inputs in order) of all operators that `function` runs."""
    with torch.no_grad():
        module = make_fx(function, pre_dispatch=True)(*inputs)
    graph = encode_graph(module, 0, inputs)
    found, names = graph.subgraph([n.name for n in graph.nodes if n.is_op])
    places = [n.name for n in graph.nodes if n.target == "input"]
    return found, [inputs[places.index(n)] for n in names]


def _moved(tensor: Tensor, device: str, dtype: torch.dtype | None) -> Tensor:
    """On the device, with the same strides."""
    dtype = dtype if dtype and tensor.dtype == torch.float32 else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return made.copy_(tensor) if 0 not in tensor.stride() else tensor.to(device, dtype)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def mask(*shape: int) -> Tensor:
    return randn(*shape, seed=7) > 0.3


def _over(names: str) -> dict[str, Callable]:
    return {n: getattr(torch, n) for n in names.split()}


UNARY = _over(
    "neg abs sign square reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tanh sigmoid erf floor ceil"
    " round trunc tan sinh cosh asin acos atan isnan isinf isfinite logical_not erfc asinh acosh atanh isposinf"
    " isneginf frac deg2rad rad2deg absolute"
)
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus2": lambda x: F.softplus(x, 2.0, 5.0),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=0.2),
    "threshold": lambda x: F.threshold(x, 0.1, -7.0),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.2, device=x.device, dtype=x.dtype)),
    "rrelu_eval": lambda x: F.rrelu(x, 0.1, 0.3, False),
    "dropout_eval": lambda x: F.dropout(x, 0.5, False) + 1,
    "new_gelu": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3)))),
}


def _power(exponent: float) -> Callable:
    return lambda x: x.pow(exponent)


NUMBERS = {f"pow_{p}": _power(p) for p in (2, 3, 4, 0.5, -0.5, -1, -2, 1.7, 0, 1, 5)} | {
    "rpow": lambda x: torch.pow(2.5, x),
    "add": lambda x: x + 0.1,
    "alpha": lambda x: torch.add(x, x, alpha=0.3),
    "rsub": lambda x: 1 - x,
    "div": lambda x: x / 3,
    "div_8": lambda x: x / 8,
    "rdiv": lambda x: 2 / x,
    "mul": lambda x: x * 0.1767766952966369,
    "mul_0": lambda x: x * 0.0,
    "remainder": lambda x: x % 0.7,
    "remainder_negative": lambda x: torch.remainder(x, -0.7),
    "fmod": lambda x: torch.fmod(x, 0.7),
    "floor_div": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc_div": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.5),
    "through_bf16": lambda x: x.to(torch.bfloat16).float() * 1.5,
    "bool": lambda x: x.bool(),
    "logit": lambda x: torch.logit(x, 1e-3),
}
BINARY = _over(
    "add sub mul div maximum minimum eq ne lt le gt ge remainder fmod atan2 logical_and logical_xor fmax fmin hypot"
    " copysign logaddexp xlogy heaviside greater less_equal not_equal"
) | {
    "pow": lambda x, y: torch.pow(x.abs(), y),
    "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_tensor": lambda x, y: torch.lerp(x, y, y),
    "geglu": lambda x, y: F.gelu(x) * y,
}
MASKED = {
    "where": lambda x, y, m: torch.where(m, x, y),
    "masked_fill": lambda x, y, m: x.masked_fill(m, -1e9),
    "and": lambda x, y, m: m & (x > 0),
    "not": lambda x, y, m: ~m,
    "where_scalar": lambda x, y, m: torch.where(m, x, 0.0),
    "times_mask": lambda x, y, m: m * x,
    "xor": lambda x, y, m: (x > 0) ^ m,
    "float": lambda x, y, m: m.float() * 3,
}
INTEGERS = {
    "add": lambda i, k: i + k,
    "mul": lambda i, k: i * 3,
    "floordiv": lambda i, k: i // 7,
    "floordiv_n": lambda i, k: i // -7,
    "mod": lambda i, k: i % 7,
    "fmod": lambda i, k: torch.fmod(i, 7),
    "trunc": lambda i, k: torch.div(i, 7, rounding_mode="trunc"),
    "true_div": lambda i, k: i / 7,
    "less": lambda i, k: i < k,
    "half": lambda i, k: k * 0.5,
    "abs": lambda i, k: i.abs(),
    "clamp": lambda i, k: i.clamp(-3, 9),
    "max": lambda i, k: torch.maximum(i, k),
    "square": lambda i, k: k**2,
    "and": lambda i, k: i & 7,
    "not": lambda i, k: ~k,
    "bool": lambda i, k: i.bool(),
    "sign": lambda i, k: i.sign(),
    "uint8": lambda i, k: (i + 50).to(torch.uint8),
    "where": lambda i, k: torch.where(i > 3, i, k),
}


def _all(functions: dict) -> Callable:
    return lambda *inputs: tuple(f(*inputs) for f in functions.values())


def _integers() -> tuple:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randint(-50, 50, (999,), generator=generator),
        torch.randint(-50, 50, (999,), generator=generator, dtype=torch.int32),
    )


OPERATORS = [
    Case("unary", "pointwise", _all(UNARY), lambda: (randn(4003) * 3,)),
    Case("activations", "pointwise", _all(ACTIVATIONS), lambda: (randn(4003) * 3,)),
    Case("numbers", "pointwise", _all(NUMBERS), lambda: (randn(4003) * 3,)),
    Case("binary", "pointwise", _all(BINARY), lambda: (randn(4003) * 3, randn(4003, seed=1))),
    Case("masked", "pointwise", _all(MASKED), lambda: (randn(4003), randn(4003, seed=1), mask(4003))),
    Case("integers", "pointwise", _all(INTEGERS), _integers),
]


def _batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, w, b, False, 0.1, 1e-5))


def _channels() -> tuple:
    x = randn(2, 7, 5, 6).to(memory_format=torch.channels_last)
    return x, randn(7), randn(7, seed=1), randn(7, seed=2), randn(7, seed=3).abs() + 0.5


def _bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


def _gated_tails(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(gate) * up, F.gelu(gate, approximate="tanh") * up


def _tails() -> tuple[Tensor, Tensor]:
    """Gates where eager's 1 + erf and 1 + tanh are 0 (below -5.6) and where they aren't, and infinite factors."""
    gate = torch.cat((torch.linspace(-14, -6, 500), torch.linspace(-4.5, 0, 501)[:-1]))
    return gate, torch.where(torch.arange(1000) % 2 == 0, torch.inf, 1.0)


def _crosswise(x: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x + y) * b, x > y


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


POINTWISE = [
    Case("gated_tails", "pointwise", _gated_tails, _tails),
    Case("bias_gelu", "pointwise", _bias_gelu, lambda: (randn(3, 37, 768), randn(768))),
    Case("batch_1", "pointwise", _bias_gelu, lambda: (randn(1, 13), randn(13))),
    Case("one_element", "pointwise", lambda x: torch.sigmoid(x) * 2, lambda: (randn(1),)),
    Case("scalar", "pointwise", lambda x, s: x * s + 1, lambda: (randn(129, 7), torch.tensor(3.0))),
    Case(
        "mask",
        "pointwise",
        lambda s, m: (s * 0.125).masked_fill(m, float("-inf")),
        lambda: (randn(2, 3, 37, 37), mask(2, 1, 1, 37)),
    ),
    Case("outer", "pointwise", lambda x, y: torch.exp(-(x - y).abs()), lambda: (randn(129, 1), randn(1, 1000))),
    Case("channels_last", "pointwise", _batch_norm, _channels),
    Case("batch_norm", "pointwise", _batch_norm, lambda: (_channels()[0].contiguous(), *_channels()[1:])),
    Case("transposed", "pointwise", lambda x, y: x * y + 1, lambda: (randn(130, 65).t(), randn(65, 130))),
    Case("crosswise", "pointwise", _crosswise, lambda: (randn(3, 50, 48), randn(3, 48, 50).transpose(1, 2), randn(48))),
    Case("relaid", "pointwise", lambda x: (torch.relu(x) * 2).contiguous(), lambda: (_last(randn(2, 20, 7, 9)),)),
    Case("sliced", "pointwise", lambda x: F.silu(x) + 0.5, lambda: (randn(33, 100)[:, 3:96],)),
    Case("expanded", "pointwise", lambda x, y: x - y * 2, lambda: (randn(5, 1).expand(5, 64), randn(5, 64))),
    Case(
        "several_outputs",
        "pointwise",
        lambda x, y: (x + y, torch.relu(x + y), x > y),
        lambda: (randn(1000), randn(1000, seed=1)),
    ),
    Case(
        "diamonds",
        "pointwise",
        lambda x: (y := x * x + x) * y + y * (z := y * y - x) + z * z,
        lambda: (randn(4097) * 0.3,),
    ),
]


def _llama_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def _spelled_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return w * (x - mean) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) + b


def _norm(n: int) -> Callable:
    return lambda x, w, b: F.layer_norm(x, (n,), w, b)


ROWWISE = [
    Case("softmax", "rowwise", lambda x: x.softmax(-1), lambda: (randn(37, 200),)),
    Case("softmax_3", "rowwise", lambda x: x.softmax(-1), lambda: (randn(7, 3),)),
    Case(
        "masked_softmax",
        "rowwise",
        lambda s, m: (s * 0.125).masked_fill(m, float("-inf")).softmax(-1),
        lambda: (randn(2, 3, 7, 50), mask(2, 1, 7, 50)),
    ),
    Case("log_softmax", "rowwise", lambda x: F.log_softmax(x, -1), lambda: (randn(5, 3001),)),
    Case("layer_norm", "rowwise", _norm(768), lambda: (randn(67, 768), randn(768), randn(768, seed=1))),
    Case(
        "layer_norm_offset",
        "rowwise",
        _norm(1000),
        lambda: (randn(130, 1000) * 0.01 + 100, randn(1000), randn(1000, seed=1)),
    ),
    Case("layer_norm_plain", "rowwise", lambda x: F.layer_norm(x, (3, 43)), lambda: (randn(4, 3, 43),)),
    Case(
        "add_rms_norm",
        "rowwise",
        lambda x, r, w: ((h := x + r), F.rms_norm(h, (130,), w, 1e-6)),
        lambda: (randn(1, 9, 130), randn(1, 9, 130, seed=1), randn(130)),
    ),
    Case("llama_norm", "rowwise", _llama_norm, lambda: (randn(3, 129), randn(129))),
    Case("spelled_layer_norm", "rowwise", _spelled_layer_norm, lambda: (randn(8, 256), randn(256), randn(256, seed=1))),
    Case(
        "norm_gelu",
        "rowwise",
        lambda x, w, b: F.gelu(F.layer_norm(x, (64,), w, b) * 2),
        lambda: (randn(1300, 64), randn(64), randn(64, seed=1)),
    ),
    Case(
        "extremes",
        "rowwise",
        lambda x: (x.amax(-1, keepdim=True), x - x.amin(-1, keepdim=True), x.std(-1, keepdim=True)),
        lambda: (randn(9, 33),),
    ),
    Case("unit_vectors", "rowwise", lambda x: F.normalize(x, dim=-1), lambda: (randn(17, 96),)),
    Case(
        "row_scale",
        "rowwise",
        lambda x, s: (x * s).sum(-1, keepdim=True) / s,
        # "large" overflows in eager's float16: one rounding step is all that is allowed, which 17 outputs may exceed
        lambda: (randn(257, 48), randn(257, 1).abs() + 0.5),
    ),
    Case(
        "strided_norm", "rowwise", lambda x: F.layer_norm(x, (16,)), lambda: (randn(2, 16, 5, 6).permute(0, 2, 3, 1),)
    ),
    Case("wide", "rowwise", lambda x: x.softmax(-1), lambda: (randn(2, 20011),)),
]


def _qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    """Biases are of the first products, as some models have them."""
    return tuple(F.linear(x, w, bias[n] if n < len(bias) else None) for n, w in enumerate((q, k, v)))


def _turned(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addmm(b, x, q), x @ k


SHARED = [
    Case(
        "qkv_bias",
        "gemm_shared_input",
        _qkv,
        lambda: (randn(2, 37, 24), *(randn(72, 24, seed=n) for n in range(3)), *(randn(72, seed=n) for n in range(3))),
        1,
    ),
    Case(
        "qkv_grouped",
        "gemm_shared_input",
        _qkv,
        lambda: (randn(70, 24), randn(136, 24), randn(32, 24), randn(32, 24, seed=1), randn(136)),
        1,
    ),
    Case(
        "qkv_one_row",
        "gemm_shared_input",
        _qkv,
        lambda: (randn(1, 1, 24), randn(96, 24), randn(32, 24), randn(32, 24, seed=1)),
        1,
    ),
    Case(
        "projections_turned",
        "gemm_shared_input",
        _turned,
        lambda: (randn(130, 24), randn(24, 104), randn(24, 56), randn(104)),
        1,
    ),
]
REFUSED = {
    "batch_0": (lambda x: x * 2, lambda: (torch.empty(0, 5),)),
    "float64": (lambda x: x * 2, lambda: (randn(5).double(),)),
    "random": (lambda x: F.dropout(x, 0.5, True), lambda: (randn(5),)),
    "two_dims": (lambda x: x.softmax(0) + x.softmax(1), lambda: (randn(5, 6),)),
    "own_transpose": (lambda x: x + x.t(), lambda: (randn(5, 5),)),
}
