"""A small GPT-style decoder, written the way most research code is: plain modules, GPT-2's tanh-GELU spelled out.

Analyse it on any machine, no GPU needed:

    fusescout analyze examples/tiny_gpt.py
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class NewGELU(nn.Module):
    """The tanh form of GELU as GPT-2 spells it: eight pointwise operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = NewGELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.act(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Token ids int64[batch, length] to logits float[batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int = 1024, length: int = 256, width: int = 256, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def get_model() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT()


def get_inputs() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 1024, (8, 256), generator=torch.Generator().manual_seed(0)),)


def main() -> None:
    model = get_model().eval()
    with torch.no_grad():
        print(tuple(model(*get_inputs()).shape))


if __name__ == "__main__":
    main()
