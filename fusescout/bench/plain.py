"""Models of the suite in plain PyTorch: MLP-Mixer, DiT blocks, DLRM, and a Llama that decodes one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any]]


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _MixerLayer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = _mlp(tokens, width // 2), _mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))  # type: ignore[no-any-return]


class _Mixer(nn.Module):
    def __init__(self, side: int, layers: int, width: int, patch: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.Sequential(*(_MixerLayer((side // patch) ** 2, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(1))  # type: ignore[no-any-return]


def mixer(batch: int, side: int = 224, layers: int = 12, width: int = 768) -> Built:
    """MLP-Mixer-B/16."""
    return _Mixer(side, layers, width), {"x": _draw(batch, 3, side, side)}


class _DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.second = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        y = self.first(x) * (1 + parts[1]) + parts[0]
        batch, tokens, width = y.shape
        q, k, v = self.qkv(y).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + parts[2] * self.out(y)
        y = self.second(x) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.shrink(F.gelu(self.grow(y), approximate="tanh"))  # type: ignore[no-any-return]


class _DiT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def dit(batch: int, tokens: int = 256, layers: int = 4, width: int = 1152, heads: int = 16) -> Built:
    """Blocks of DiT-XL/2 on 256 latent patches."""
    return _DiT(layers, width, heads), {"x": _draw(batch, tokens, width), "condition": _draw(batch, width)}


class _DLRM(nn.Module):
    """Dense features through an MLP, sparse ones through tables, all pairs of products, another MLP."""

    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, width),
            nn.ReLU(),
        )  # fmt: skip
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1), nn.Sigmoid(),
        )  # fmt: skip
        first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", first * (tables + 1) + second)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(sparse[:, k]) for k, table in enumerate(self.tables)]
        every = torch.stack([x, *rows], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], dim=1))  # type: ignore[no-any-return]


def dlrm(batch: int, tables: int = 26, rows: int = 100_000, width: int = 64, hidden: int = 512) -> Built:
    """A recommender of the size of the Criteo task's."""
    ids = torch.randint(0, rows, (batch, tables), generator=torch.Generator().manual_seed(0))
    return _DLRM(tables, rows, width, hidden), {"dense": _draw(batch, 13), "sparse": ids}


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _DecoderLayer(nn.Module):
    """One Llama layer that reads keys and values of earlier tokens from a cache of fixed length and adds its own."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, length: int, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, head = heads, groups, width // heads
        self.before, self.after = _Norm(width), _Norm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("keys", _draw(batch, groups, length, head))
        self.register_buffer("values", _draw(batch, groups, length, head))

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before(x)
        batch = y.shape[0]
        q = self.q(y).view(batch, 1, self.heads, -1).transpose(1, 2)
        k = self.k(y).view(batch, 1, self.groups, -1).transpose(1, 2)
        v = self.v(y).view(batch, 1, self.groups, -1).transpose(1, 2)
        self.keys.index_copy_(2, position, _rotated(k, cos, sin))
        self.values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(_rotated(q, cos, sin), self.keys, self.values, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self, batch: int, length: int, layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_DecoderLayer(batch, length, width, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = _Norm(width), nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin())

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[position], self.sin[position]
        for layer in self.layers:
            x = layer(x, position, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def llama_decode(
    batch: int, past: int, layers: int = 4, width: int = 2048, heads: int = 32, groups: int = 8, hidden: int = 8192,
    vocabulary: int = 32000,
) -> Built:  # fmt: skip
    """One token after `past` others: the last place of a full cache, so that a second call does the same."""
    model = _Decoder(batch, past + 1, layers, width, heads, groups, hidden, vocabulary)
    ids = torch.randint(0, vocabulary, (batch, 1), generator=torch.Generator().manual_seed(0))
    return model, {"ids": ids, "position": torch.tensor([past])}
