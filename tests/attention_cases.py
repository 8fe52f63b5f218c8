"""Attention as models call it and as they write it out. As `template_cases.py`, and run by the same tests.

Lengths that fill no tile, heads of every width that models have, and tensors as projections leave them: heads are a
dimension of (batch, rows, heads, width) that was moved to the front.
"""

import math

import torch
from template_cases import Case
from template_cases import randn
from torch import Tensor
from torch.nn import functional as F

attend = F.scaled_dot_product_attention


def heads(batch: int, rows: int, count: int, width: int, seed: int = 0) -> Tensor:
    return randn(batch, rows, count, width, seed=seed).transpose(1, 2)


def qkv(batch: int, rows: int, keys: int, count: int, width: int, shared: int = 1) -> tuple[Tensor, ...]:
    """`shared` query heads have one key and value head."""
    few = count // shared
    return heads(batch, rows, count, width), heads(batch, keys, few, width, 1), heads(batch, keys, few, width, 2)


def padding(batch: int, keys: int) -> Tensor:
    """Sequences of different lengths, the last one of none."""
    lengths = torch.tensor([keys - 9 * k for k in range(batch - 1)] + [0])
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def side_by_side(out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama's `repeat_kv`."""

    def repeat(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, q.shape[1] // h, s, d).reshape(b, q.shape[1], s, d)

    return side_by_side(attend(q, repeat(k), repeat(v), is_causal=True))


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """BERT's and T5's."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.1, training=False), v).transpose(1, 2).contiguous()


def windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Swin's: a bias for each head, and a mask for each window of an image."""
    count, (batch, h, n, _) = mask.shape[0], q.shape
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    scores = (scores.view(batch // count, count, h, n, n) + mask[:, None]).view(batch, h, n, n)
    return side_by_side(F.softmax(scores, dim=-1) @ v)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Gemma 2's soft cap, and a mask that a boolean one chooses."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.2 / 5.0) * 5.0
    return F.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), dim=-1) @ v


def ordered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """minGPT's: the mask says what is hidden."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    return side_by_side(F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v)


def batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.2, -1), v)


ON_CPU = [
    Case(
        "causal", "attention", lambda q, k, v: side_by_side(attend(q, k, v, is_causal=True)),
        lambda: qkv(2, 77, 77, 3, 64),
    ),
    Case("repeated", "attention", repeated, lambda: qkv(2, 70, 70, 4, 32, shared=2)),
    Case(
        "padded", "attention", lambda q, k, v, m: attend(q, k, v, m),
        lambda: (*qkv(3, 40, 70, 2, 80), padding(3, 70)),
    ),
    Case(
        "windows", "attention", windows,
        lambda: (*qkv(4, 49, 49, 3, 32), randn(3, 49, 49), randn(2, 49, 49)),
    ),
    Case("capped", "attention", capped, lambda: (*qkv(1, 66, 66, 2, 96), torch.ones(66, 66).tril().bool())),
]  # fmt: skip
"""Each way to read a sub-graph once: there a kernel is a scalar loop."""

ATTENTION = [
    *ON_CPU,
    Case("plain", "attention", attend, lambda: qkv(2, 197, 197, 3, 64)),
    Case("across", "attention", lambda q, k, v: attend(q, k, v, scale=0.3), lambda: qkv(2, 300, 77, 4, 64)),
    Case(
        "bias", "attention", lambda q, k, v, b: side_by_side(attend(q, k, v, b, scale=1.0)),
        lambda: (*(t * 64**-0.25 for t in qkv(2, 256, 256, 4, 64)[:2]), heads(2, 256, 4, 64), randn(1, 4, 256, 256)),
    ),
    Case("grouped", "attention", lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True),
         lambda: qkv(1, 320, 320, 8, 128, shared=4)),
    Case("causal_across", "attention", lambda q, k, v: attend(q, k, v, is_causal=True),
         lambda: qkv(2, 130, 200, 2, 128)),
    Case("wide", "attention", lambda q, k, v: attend(q, k, v, is_causal=True), lambda: qkv(1, 200, 200, 2, 256)),
    Case("siglip", "attention", attend, lambda: qkv(2, 300, 300, 2, 72)),
    Case("written", "attention", written, lambda: (*qkv(2, 150, 150, 3, 64), randn(2, 1, 1, 150))),
    Case(
        "batches", "attention", batches, lambda: (randn(6, 90, 40), *(randn(6, 50, 40, seed=s) for s in (1, 2))),
    ),
    Case(
        "ordered", "attention", ordered,
        lambda: (*qkv(2, 300, 300, 2, 96), torch.ones(1, 1, 300, 300, dtype=torch.bool).triu(1)), ordered=True,
    ),
    Case(
        "masked", "attention", lambda q, k, v, m: attend(q, k, v, m),
        lambda: (*qkv(1, 140, 140, 2, 64), randn(140, 140) > -0.5),
    ),
]  # fmt: skip
