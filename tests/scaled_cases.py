"""Chains behind products of 8-bit floats, for the CPU and for Hopper: sizes are multiples of 16, as eager wants."""

from collections.abc import Callable

import torch
from template_cases import Case
from template_cases import randn
from torch import Tensor
from torch import nn
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn


def product(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, b: Tensor | None = None, **more: object) -> Tensor:
    """`x w^T` with scales, in bfloat16 unless told otherwise."""
    return torch._scaled_mm(x, w.t(), sx, sw, bias=b, **{"out_dtype": torch.bfloat16} | more)


def gelu(*operands: Tensor) -> Tensor:
    return F.gelu(product(*operands, use_fast_accum=True), approximate="tanh")


def gelu_promoted(*operands: Tensor) -> Tensor:
    return F.gelu(product(*operands))


def silu_residual(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, residual: Tensor) -> Tensor:
    return F.silu(product(x, w, sx, sw, use_fast_accum=True)) + residual


def relu_quantised(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, inverse: Tensor) -> Tensor:
    return (F.relu(product(x, w, sx, sw, use_fast_accum=True)) * inverse).clamp(-448.0, 448.0).to(E4M3)


def before_and_after(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> tuple[Tensor, Tensor]:
    return (h := product(x, w, sx, sw)), torch.sigmoid(h)


def wide(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(product(x, w, sx, sw, out_dtype=torch.float32) + b)


def tokens(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, b: Tensor) -> Tensor:
    """As a linear on (batch, tokens, width) is written: the product is of two dimensions only."""
    return F.relu(product(x.view(-1, x.shape[-1]), w, sx, sw, b).view(*x.shape[:-1], -1))


def operands(m: int | tuple[int, ...], n: int, k: int, rows: bool = False) -> tuple[Tensor, ...]:
    """Operands that use the range of their 8 bits, and scales that make them about 1 again."""
    shape = (m, k) if isinstance(m, int) else (*m, k)
    x, w = ((randn(*s) * 32).clamp(-448, 448).to(E4M3) for s in (shape, (n, k)))
    scales = ((randn(m, 1).exp2() / 32, randn(1, n).exp2() / 32)) if rows else (torch.tensor(0.03), torch.tensor(0.04))
    return x, w, *scales


def half(*shape: int) -> Tensor:
    return randn(*shape).bfloat16()


def _case(name: str, function: Callable, m: int | tuple, n: int, k: int, *extra: Callable, rows: bool = False) -> Case:
    return Case(
        name, "gemm_epilogue", function, lambda: (*operands(m, n, k, rows), *(made() for made in extra))
    )  # fmt: skip


def quantised(x: Tensor, dim: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """As float8 linears quantise: the largest number, or that of each row, becomes the largest 8-bit float."""
    amax = x.abs().amax(dim, keepdim=True) if dim else x.abs().max()
    scale = amax.float().clamp(min=1e-12) / 448.0
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3), scale


class Float8Linear(nn.Module):
    """As float8 linears for inference are: an 8-bit weight with its scale, inputs quantised on the fly."""

    def __init__(self, columns: int, width: int, rows: bool) -> None:
        super().__init__()
        weight, scale = quantised(torch.randn(columns, width) / width**0.5, (1,) if rows else ())
        self.dims = (1,) if rows else ()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = nn.Parameter(torch.randn(columns).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        given, scale = quantised(x, self.dims)
        return product(given, self.weight, scale, self.scale, self.bias, use_fast_accum=not self.dims)


QUANTISING = [
    Case(
        "quantised", "pointwise", lambda x, s: (x.float() * s).clamp(-448.0, 448.0).to(E4M3),
        lambda: (half(130, 96), torch.tensor(100.0)),
    ),
    Case(
        "dequantised", "pointwise", lambda q, s: q.to(torch.bfloat16) * s,
        lambda: (operands(130, 1, 96)[0], half(130, 1)),
    ),
    Case("row_quantised", "rowwise", lambda x: quantised(x, (-1,))[::-1], lambda: (half(130, 96),)),
]  # fmt: skip


def scaled_cases(m: int, n: int, k: int) -> list[Case]:
    """Every kind of scale, sum, tail and result at about one size; `m` is even."""
    return [
        _case("scaled_gelu", gelu, m, n, k, lambda: half(n)),
        _case("scaled_gelu_promoted", gelu_promoted, m, n, k, lambda: half(n)),
        _case("scaled_rows_gelu_promoted", gelu_promoted, m, n, k, lambda: half(n), rows=True),
        _case("scaled_rows_silu_residual", silu_residual, m, n, k, lambda: half(m, n), rows=True),
        _case("scaled_relu_quantised", relu_quantised, m, n, k, lambda: torch.tensor(2.0)),
        _case("scaled_before_and_after", before_and_after, m, n, k),
        _case("scaled_wide", wide, m, n, k, lambda: randn(n)),
        _case("scaled_tokens", tokens, (2, m // 2), n, k, lambda: half(n)),
    ]
