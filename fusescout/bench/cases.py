"""What `fusescout bench kernels` measures: chains by name and the tensors they get. Plain data, no torch.

A case names a function of `chains.py`; it is captured and cut like a model, so a new family needs a function there
and a line here. `quick` shapes take a CPU milliseconds, `full` ones are real layers at bf16, `all` adds every epilogue
of every GEMM shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace

SHAPES = ("quick", "full", "all")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input. `dtype` "" is the bench's own floating dtype; `high` makes integers below it.

    `order` permutes the dimensions of contiguous memory, so that a transposed or channels-last tensor can be asked for.
    `weight` makes it a parameter of the model: what is computed of parameters alone may be prepared once.
    """

    shape: tuple[int, ...]
    scale: float = 1.0
    dtype: str = ""
    high: int = 0
    positive: bool = False
    order: tuple[int, ...] = ()
    weight: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A chain at one size. `title` is its shape as people write it."""

    family: str
    chain: str
    title: str
    inputs: tuple[Tensor, ...]
    shapes: str = "full"

    @property
    def name(self) -> str:
        return f"{self.title} {self.chain}"


def _x(*shape: int, scale: float = 1.0, order: tuple[int, ...] = ()) -> Tensor:
    return Tensor(shape, scale, order=order)


def _weight(n: int, k: int) -> Tensor:
    """Scaled so that outputs have the size of inputs."""
    return Tensor((n, k), k**-0.5, weight=True)


def _w(*shape: int) -> Tensor:
    return Tensor(shape, weight=True)


def _by(*sizes: int | str) -> str:
    return "×".join(map(str, sizes))


DECODE = (1, 4, 16, 64)
"""Rows of a decoding step: one for each sequence of the batch."""
E4M3 = "float8_e4m3fn"
EPILOGUES = ("bias_gelu_tanh", "bias_gelu_erf", "bias_relu", "silu", "bias_residual")


def _gemm(m: int, n: int, k: int, chain: str, shapes: str = "full") -> Case:
    extra = {"bias_residual": (_w(n), _x(m, n)), "residual": (_x(m, n),), "silu": (), "bare": ()}.get(chain, (_w(n),))
    inputs = (_x(m, k), _weight(n, k), *extra)
    return Case("gemm_epilogue", chain, _by(m, n, k), inputs, shapes)


def _mixer(chain: str, batch: int, rows: int, n: int, k: int) -> Case:
    """A GEMM of MLP-Mixer: a batch of `rows`; what is transposed lies in memory as (batch, columns, rows)."""
    turned, first = (0, 2, 1), chain == "bias_gelu_erf"
    result = (batch, n, rows) if chain == "mixed_tokens" else (batch, rows, n)
    residual = () if first else (_x(*result, order=turned),)
    inputs = (_x(batch, rows, k, order=turned if first else ()), _weight(n, k), _w(n), *residual)
    return Case("gemm_epilogue", chain, f"{_by(batch, rows, n, k)} transposed", inputs)


def _scaled(m: int, n: int, k: int, chain: str, shapes: str = "full") -> Case:
    """A product of 8-bit floats: a scale for each operand, or one for each of its rows."""
    x, w = Tensor((m, k), dtype=E4M3), Tensor((n, k), dtype=E4M3, weight=True)
    each = chain.startswith("rows_")
    scales = [Tensor(shape if each else (1,), dtype="float32", positive=True) for shape in ((m, 1), (1, n))]
    inputs = (x, w, scales[0], replace(scales[1], weight=True), Tensor((n,), dtype="bfloat16", weight=True))
    return Case("gemm_fp8", chain, _by(m, n, k), inputs, shapes)


def _gated(m: int, n: int, k: int, chain: str = "swiglu", shapes: str = "full") -> Case:
    weights = (_weight(2 * n, k),) if chain == "swiglu_packed" else (_weight(n, k), _weight(n, k))
    return Case("gated_mlp", chain, _by(m, n, k), (_x(m, k), *weights), shapes)


def _projections(m: int, widths: tuple[int, int, int], k: int, *, bias: bool, shapes: str = "full") -> Case:
    """Queries, keys and values: equal widths are BERT's, narrower keys and values those of grouped queries."""
    same = len(set(widths)) == 1
    title = _by(m, f"(3×{widths[0]})" if same else f"({'+'.join(map(str, widths))})", k)
    biases = tuple(_w(n) for n in widths) if bias else ()
    return Case(
        "gemm_shared_input", "projections", title, (_x(m, k), *(_weight(n, k) for n in widths), *biases), shapes
    )


def _rows(chain: str, *shape: int, extra: Iterable[Tensor] = (), shapes: str = "full") -> Case:
    return Case("rowwise", chain, _by(*shape), (_x(*shape), *extra), shapes)


def _norm(chain: str, rows: int, width: int, shapes: str = "full") -> Case:
    """A norm of (rows, width): residual where the chain adds one, scale, and shift where it is a layer norm."""
    residual = (_x(rows, width),) if chain.startswith("add_") else ()
    shift = (_w(width),) if "layer_norm" in chain else ()
    return _rows(chain, rows, width, extra=(*residual, _w(width), *shift), shapes=shapes)


def _attention_scores(chain: str, batch: int, heads: int, length: int, shapes: str = "full") -> Case:
    mask = Tensor((batch, 1, 1, length), dtype="bool", high=2)
    return _rows(chain, batch, heads, length, length, extra=(mask,), shapes=shapes)


def _points(chain: str, *shape: int, extra: Iterable[Tensor] = (), order: tuple[int, ...] = (), **more: str) -> Case:
    shapes = more.get("shapes", "full")
    where = " channels-last" if order else ""
    return Case("pointwise", chain, _by(*shape) + where, (_x(*shape, order=order), *extra), shapes)


CHANNELS_LAST = (0, 2, 3, 1)


def _scale_shift(batch: int, channels: int, side: int, last: bool, shapes: str = "full") -> Case:
    """What is left of a batch norm in eval, a residual and ReLU."""
    order = CHANNELS_LAST if last else ()
    image = _x(batch, channels, side, side, order=order)
    per_channel = (_w(channels, 1, 1), _w(channels, 1, 1))
    return _points(
        "scale_shift_add_relu", batch, channels, side, side, extra=(*per_channel, image), order=order, shapes=shapes
    )


def _rope(batch: int, heads: int, length: int, width: int, shapes: str = "full") -> Case:
    angles = (_x(1, 1, length, width), _x(1, 1, length, width))
    # q as a projection leaves it: (batch, length, heads, width) seen with heads first
    q = _x(batch, heads, length, width, order=(0, 2, 1, 3))
    return Case("rope", "rope", _by(batch, heads, length, width), (q, *angles), shapes)


def _cross_entropy(rows: int, classes: int, shapes: str = "full") -> Case:
    labels = Tensor((rows,), dtype="int64", high=classes)
    return Case("cross_entropy", "cross_entropy", _by(rows, classes), (_x(rows, classes), labels), shapes)


def _linear_cross_entropy(rows: int, classes: int, width: int, shapes: str = "full") -> Case:
    labels = Tensor((rows,), dtype="int64", high=classes)
    inputs = (_x(rows, width), _weight(classes, width), labels)
    return Case("linear_cross_entropy", "linear_cross_entropy", _by(rows, classes, width), inputs, shapes)


def _group_norm(chain: str, batch: int, channels: int, side: int, last: bool = False, shapes: str = "full") -> Case:
    image = _x(batch, channels, side, side, order=CHANNELS_LAST if last else ())
    title = _by(batch, channels, side, side) + (" channels-last" if last else "")
    affine = () if chain.startswith("instance") else (_w(channels), _w(channels))
    return Case("group_norm", chain, title, (image, *affine), shapes)


def _conv(chain: str, batch: int, cin: int, cout: int, side: int, kernel: int = 3, shapes: str = "full") -> Case:
    image = _x(batch, cin, side, side, order=CHANNELS_LAST)
    scale = (cin * kernel * kernel) ** -0.5
    weight = Tensor((cout, cin, kernel, kernel), scale, order=CHANNELS_LAST, weight=True)
    # mean, variance, scale, shift
    statistics = (
        _w(cout),
        Tensor((cout,), positive=True, weight=True),
        _w(cout),
        _w(cout),
    )
    residual = (_x(batch, cout, side, side, order=CHANNELS_LAST),) if "add" in chain else ()
    title = f"{_by(batch, cin, side, side)}→{cout} k{kernel}"
    return Case("conv", chain, title, (image, weight, *statistics, *residual), shapes)


def _biased(chain: str, batch: int, cin: int, cout: int, side: int, last: bool = False, shapes: str = "full") -> Case:
    """A 3x3 convolution with bias, and what follows."""
    order = CHANNELS_LAST if last else ()
    weight = Tensor((cout, cin, 3, 3), (9 * cin) ** -0.5, order=order, weight=True)
    affine = (_w(cout), _w(cout)) if "norm" in chain else ()
    title = f"{_by(batch, cin, side, side)}→{cout} k3" + (" channels-last" if last else "")
    return Case("conv", chain, title, (_x(batch, cin, side, side, order=order), weight, _w(cout), *affine), shapes)


def _reduction(chain: str, *shape: int, last: bool = False, shapes: str = "full") -> Case:
    order = CHANNELS_LAST if last else ()
    title = _by(*shape) + (" channels-last" if last else "")
    return Case("reduction", chain, title, (_x(*shape, order=order),), shapes)


def _summed(m: int, n: int, k: int, shapes: str = "full") -> Case:
    """A linear whose columns are only averaged."""
    return Case("sum", "linear_mean", _by(m, n, k), (_x(m, k), _weight(n, k), _w(n)), shapes)


def _pooled(batch: int, cin: int, cout: int, side: int, shapes: str = "full") -> Case:
    """A transposed 3x3 convolution whose pixels are only averaged."""
    weight = Tensor((cin, cout, 3, 3), (9 * cin) ** -0.5, weight=True)
    title = f"{_by(batch, cin, side, side)}→{cout} k3"
    return Case("sum", "conv_transpose_mean", title, (_x(batch, cin, side, side), weight, _w(cout)), shapes)


def _attention(
    chain: str, batch: int, heads: int, length: int, width: int, windows: int = 0, shapes: str = "full"
) -> Case:
    """Queries, keys and values as projections leave them; `windows` have a mask each, repeated over the images."""
    q, k, v = (_x(batch, heads, length, width, order=(0, 2, 1, 3)) for _ in range(3))
    extra: tuple[Tensor, ...] = ()
    if chain == "biased_attention":
        q, extra = replace(q, scale=width**-0.5), (_x(1, heads, length, length),)
    elif windows:
        extra = (_x(heads, length, length), _x(windows, length, length))
    return Case("attention", chain, _by(batch, heads, length, width), (q, k, v, *extra), shapes)


CASES: tuple[Case, ...] = (
    _gemm(8192, 3072, 768, "bias_gelu_tanh"),
    _gemm(4096, 4096, 4096, "bias_relu"),
    _gemm(8192, 768, 3072, "bias_residual"),
    _gemm(3152, 3072, 768, "bias_gelu_tanh"),
    _gemm(512, 4096, 4096, "silu"),
    _gemm(16, 4096, 4096, "silu"),
    *(_gemm(m, 4096, 14336, "residual") for m in DECODE),
    _gemm(1, 4096, 4096, "residual"),
    _gemm(16, 2048, 8192, "residual"),
    _gemm(64, 1000, 2048, "bias_relu"),
    _gemm(512, 1024, 4096, "bias_gelu_tanh"),
    _gemm(16384, 3072, 768, "bias_gelu_erf"),
    _gemm(8192, 50257, 768, "bare"),
    _gemm(8192, 512, 13, "bias_relu"),
    _gemm(8192, 1024, 415, "bias_relu"),
    _mixer("bias_gelu_erf", 64, 768, 384, 196),
    _mixer("mixed_tokens", 64, 768, 196, 384),
    _mixer("added_to_residual", 64, 196, 768, 3072),
    *(_scaled(*size, "scaled_gelu_tanh") for size in ((8192, 3072, 768), (4096, 4096, 4096), (64, 4096, 4096))),
    _scaled(8192, 3072, 768, "rows_gelu_tanh"),
    _scaled(4096, 4096, 4096, "rows_gelu_tanh"),
    _gated(8192, 3072, 1024),
    _gated(4096, 11008, 4096),
    _gated(4096, 14336, 4096),
    _gated(2048, 8192, 2048),
    _gated(4096, 11008, 4096, "geglu"),
    _gated(4096, 11008, 4096, "swiglu_packed"),
    *(_gated(m, 14336, 4096) for m in DECODE),
    _gated(1, 8192, 3072, "swiglu_packed"),
    _projections(16384, (768, 768, 768), 768, bias=True),
    _projections(4096, (2048, 512, 512), 2048, bias=False),
    _projections(16, (2048, 512, 512), 2048, bias=False),
    _norm("add_layer_norm", 8192, 768),
    _norm("add_layer_norm", 16384, 4096),
    _norm("add_rms_norm", 8192, 4096),
    _norm("layer_norm", 16384, 3000),
    _norm("layer_norm", 8192, 5120),
    _norm("llama_rms_norm", 16384, 4096),
    _norm("gemma_rms_norm", 16384, 4096),
    _norm("rms_norm_quantised", 16384, 4096),
    _norm("rms_norm", 8192, 16384),
    _rows("softmax", 32768, 2048),
    _rows("log_softmax", 4096, 32000),
    _rows("softmax", 1024, 128256),
    _attention_scores("scaled_masked_softmax", 16, 12, 512),
    _points("new_gelu", 8192, 8192),
    _points("silu_mul", 8192, 8192, extra=(_x(8192, 8192),)),
    _points("bias_gelu_tanh_only", 16384, 4096, extra=(_w(4096),)),
    _scale_shift(64, 256, 56, last=False),
    _scale_shift(64, 256, 56, last=True),
    _points("transposed_add_gelu", 8192, 8192, extra=(_x(8192, 8192, order=(1, 0)),)),
    _points("gelu_relaid", 64, 64, 126, 126, order=CHANNELS_LAST),
    _rope(4, 32, 4096, 128),
    _cross_entropy(8192, 32000),
    _cross_entropy(4096, 50257),
    _linear_cross_entropy(8192, 50257, 768),
    _linear_cross_entropy(4096, 128256, 4096),
    _attention("biased_attention", 16, 12, 512, 64),
    _attention("window_attention", 4096, 3, 49, 32, windows=64),
    _attention("causal_attention", 8, 12, 1024, 64),
    _attention("attention", 64, 12, 197, 64),
    _group_norm("group_norm_silu", 16, 320, 64),
    _group_norm("group_norm_silu", 16, 320, 64, last=True),
    _group_norm("instance_norm_relu", 16, 256, 64),
    _conv("conv_bn_relu", 64, 64, 64, 56),
    _conv("conv_bn_add_relu", 64, 64, 256, 56, kernel=1),
    _biased("conv_bias_gelu", 64, 64, 64, 56),
    _biased("conv_bias_gelu", 64, 64, 64, 56, last=True),
    _biased("conv_bias_group_norm_silu", 16, 320, 320, 64),
    _reduction("relu_max_pool", 64, 64, 112, 112),
    _reduction("relu_max_pool", 64, 64, 112, 112, last=True),
    _reduction("gelu_mean_pool", 64, 768, 56, 56),
    _reduction("gelu_mean_pool", 64, 768, 56, 56, last=True),
    _summed(2048, 8192, 8192),
    _pooled(32, 128, 256, 56),
    *(
        _gemm(*size, chain, "all")
        for size in (
            (8192, 3072, 768),
            (4096, 4096, 4096),
            (8192, 768, 3072),
            (3152, 3072, 768),
            (512, 4096, 4096),
            (16, 4096, 4096),
        )
        for chain in EPILOGUES
    ),
    _gemm(64, 96, 32, "bias_gelu_tanh", "quick"),
    _scaled(64, 96, 32, "scaled_gelu_tanh", "quick"),
    _gated(33, 40, 24, shapes="quick"),
    _projections(64, (96, 32, 32), 96, bias=True, shapes="quick"),
    _norm("add_layer_norm", 512, 768, "quick"),
    _norm("llama_rms_norm", 512, 512, "quick"),
    _attention_scores("scaled_masked_softmax", 2, 4, 128, "quick"),
    _points("new_gelu", 512, 3072, shapes="quick"),
    _scale_shift(4, 32, 28, last=False, shapes="quick"),
    _rope(2, 4, 128, 64, "quick"),
    _cross_entropy(256, 1000, "quick"),
    _linear_cross_entropy(256, 1000, 64, "quick"),
    _attention("window_attention", 8, 2, 9, 16, windows=4, shapes="quick"),
    _group_norm("group_norm_silu", 2, 64, 16, shapes="quick"),
    _conv("conv_bn_relu", 2, 16, 16, 28, shapes="quick"),
    _reduction("gelu_mean_pool", 4, 64, 28, 28, shapes="quick"),
    _summed(64, 96, 32, "quick"),
    _pooled(2, 8, 16, 9, "quick"),
)


def families() -> tuple[str, ...]:
    """Every family, in the order of the tables."""
    return tuple(dict.fromkeys(case.family for case in CASES))


def select(shapes: str, wanted: Iterable[str] = ()) -> tuple[Case, ...]:
    """The cases of a set of shapes, each once, restricted to some families (none: all of them).

    "all" is "full" with every epilogue. A case that both sets name counts once.
    """
    sets = ("full", "all") if shapes == "all" else (shapes,)
    chosen = {c.name: c for c in reversed(CASES) if c.shapes in sets}
    keep = set(wanted) or set(families())
    return tuple(c for c in CASES if chosen.get(c.name) is c and c.family in keep)
