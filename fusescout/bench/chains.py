"""The chains of `cases.py` as people write them in PyTorch. Each takes tensors and gives a tensor or a tuple."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

HEAD_WIDTH = 64
GROUPS = 32


def bare(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def bias_gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def bias_gelu_erf(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def bias_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def silu(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x, w))


def bias_residual(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, w, b) + residual


def added_to_residual(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """Lies where the residual does."""
    return residual + F.linear(x, w, b)


def mixed_tokens(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """The second half of a token mixer."""
    return residual + F.linear(x, w, b).transpose(1, 2)


def residual(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, w) + residual


def scaled_gelu_tanh(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor) -> Tensor:
    """A float8 linear with one scale for each operand, its sums left to the tensor cores, as in inference."""
    out = torch._scaled_mm(x, w.t(), scale_x, scale_w, bias=b, out_dtype=b.dtype, use_fast_accum=True)
    return F.gelu(out, approximate="tanh")


def rows_gelu_tanh(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor) -> Tensor:
    """One with a scale for each row of both operands, and sums that are promoted."""
    return F.gelu(torch._scaled_mm(x, w.t(), scale_x, scale_w, bias=b, out_dtype=b.dtype), approximate="tanh")


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def geglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)


def swiglu_packed(x: Tensor, both: Tensor) -> Tensor:
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    """Attention's three products of one input, with a bias each or none."""
    return tuple(F.linear(x, w, *bias[n : n + 1]) for n, w in enumerate((q, k, v)))


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def add_layer_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-norm residual stream: the sum is needed again."""
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], w, b), total


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def llama_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Llama's casts: statistics in float32, back to the input's dtype, then the scale."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def rms_norm_quantised(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A norm whose result a float8 linear reads: 8-bit floats with a scale for each row."""
    normed = F.rms_norm(x, x.shape[-1:], w, 1e-6)
    scale = normed.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (normed.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def gemma_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Gemma's casts: scaled by one plus the weight in float32, then back."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return llama_rms_norm(total, w), total


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, dim=-1)


def scaled_masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores * (1.0 / math.sqrt(HEAD_WIDTH))
    return F.softmax(scores.masked_fill(mask, torch.finfo(scores.dtype).min), dim=-1)


def new_gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, in eight operators."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def bias_gelu_tanh_only(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


def scale_shift_add_relu(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor) -> Tensor:
    return F.relu(x * scale + shift + residual)


def transposed_add_gelu(x: Tensor, other: Tensor) -> Tensor:
    return F.gelu(x + other)


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as `transformers` spells it for Llama."""
    first, second = q[..., : q.shape[-1] // 2], q[..., q.shape[-1] // 2 :]
    return q * cos + torch.cat((-second, first), dim=-1) * sin


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def linear_cross_entropy(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A vocabulary head and its loss, as `transformers` computes it."""
    return F.cross_entropy(F.linear(x, w).float(), labels)


def group_norm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, GROUPS, w, b))


def instance_norm_relu(x: Tensor) -> Tensor:
    return F.relu(F.instance_norm(x))


def conv_bn_relu(x: Tensor, w: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = F.conv2d(x, w, padding=w.shape[-1] // 2)
    return F.relu(F.batch_norm(y, mean, var, scale, shift))


def conv_bn_add_relu(
    x: Tensor, w: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor, residual: Tensor
) -> Tensor:
    y = F.conv2d(x, w, padding=w.shape[-1] // 2)
    return F.relu(F.batch_norm(y, mean, var, scale, shift) + residual)


def conv_bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.conv2d(x, w, b, padding=w.shape[-1] // 2))


def conv_bias_group_norm_silu(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.group_norm(F.conv2d(x, w, b, padding=w.shape[-1] // 2), GROUPS, scale, shift))


def relu_max_pool(x: Tensor) -> Tensor:
    """A residual network's stem behind its convolution."""
    return F.max_pool2d(F.relu(x), 3, 2, 1)


def gelu_relaid(x: Tensor) -> Tensor:
    """What a channels-last model computes last: it comes out channels first."""
    return F.gelu(x).contiguous()


def gelu_mean_pool(x: Tensor) -> Tensor:
    return F.gelu(x).mean((2, 3))


def linear_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).mean(-1, keepdim=True)


def conv_transpose_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, b, padding=1).mean((2, 3))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """T5's: no scale, and a bias for each head that depends on the distance."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)


def window_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Swin's, written out: a bias for each head, and a mask for each window of an image."""
    batch, heads, tokens, width = q.shape
    scores = q @ k.transpose(-1, -2) * width**-0.5 + bias
    scores = scores.view(-1, mask.shape[0], heads, tokens, tokens) + mask[:, None]
    return F.softmax(scores.view(batch, heads, tokens, tokens), dim=-1) @ v
