"""Random small models: patched at every region, they compute what they computed, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from patched_models import check
from torch import Tensor
from torch import nn
from torch.nn import functional as F

B, T, D = 2, 4, 8


class Random(nn.Module):
    """Runs a program of (operation, two operands) on a growing list of float[B, T, D] values; modules are shared."""

    def __init__(self, program: list[tuple[str, int, int]], returned: list[int]) -> None:
        super().__init__()
        self.program, self.returned = program, returned
        self.fc, self.fc2 = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.conv, self.bn = nn.Conv1d(T, T, 3, padding=1), nn.BatchNorm1d(T)
        self.ln, self.rms, self.gn = nn.LayerNorm(D), nn.RMSNorm(D), nn.GroupNorm(2, T)
        self.relu_, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.4)
        self.scale = nn.Parameter(torch.randn(D))
        self.register_buffer("seen", torch.zeros(D))
        self.register_buffer("mask", torch.ones(T, D).tril().bool())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x * 1.0]
        for name, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            made = OPERATIONS[name](self, a, b)
            values.append(made if made.shape == a.shape else made.reshape(B, T, D))
        return (*(values[k % len(values)] for k in self.returned), values[-1])


def _halves(m: Random, a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, -1)
    return torch.cat([torch.sigmoid(left) * right, right], -1)


def _write_row(m: Random, a: Tensor, b: Tensor) -> Tensor:
    a[:, 1].add_(1.0)
    return a + b


def _write_view(m: Random, a: Tensor, b: Tensor) -> Tensor:
    flat = a.view(-1)
    flat.mul_(0.5)
    return b * 2 + flat.view(B, T, D)


def _buffer(m: Random, a: Tensor, b: Tensor) -> Tensor:
    m.seen.add_(a.detach().mean((0, 1)))
    return b + m.seen


def _no_grad(m: Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(a * 2)
    return b * gate


def _autocast(m: Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.gelu(m.fc(a)).float() + b


OPERATIONS: dict[str, Callable[[Random, Tensor, Tensor], Any]] = {
    "linear": lambda m, a, b: m.fc(a),
    "linear2": lambda m, a, b: m.fc2(a) + b,
    "conv": lambda m, a, b: m.conv(a),
    "batch_norm": lambda m, a, b: m.bn(a),
    "layer_norm": lambda m, a, b: m.ln(a + b),
    "rms_norm": lambda m, a, b: m.rms(a),
    "group_norm": lambda m, a, b: m.gn(a),
    "softmax": lambda m, a, b: torch.softmax(a.masked_fill(m.mask, -1e4), -1) * b,
    "softmax_rows": lambda m, a, b: torch.softmax(a, 1),
    "relu_": lambda m, a, b: m.relu_(a * 1.5),
    "relu_late": lambda m, a, b: m.relu_(a),
    "gelu": lambda m, a, b: F.gelu(a, approximate="tanh") + b,
    "silu": lambda m, a, b: F.silu(a) * m.scale,
    "tanh": lambda m, a, b: torch.tanh(a - b),
    "max": lambda m, a, b: torch.maximum(a, b),
    "add_": lambda m, a, b: a.add_(b.detach()),
    "fresh_add_": lambda m, a, b: (a * 0.5).add_(b),
    "where": lambda m, a, b: torch.where(m.mask, a, b * 0.1),
    "mean": lambda m, a, b: a - b.mean(-1, keepdim=True),
    "sum": lambda m, a, b: a * 0.1 + b.sum(1, keepdim=True),
    "view": lambda m, a, b: (a.view(B * T, D) + 1).view(B, T, D),
    "transpose": lambda m, a, b: (a.transpose(1, 2) * 2).transpose(1, 2),
    "flip": lambda m, a, b: a.flip(0) + b[:1],
    "slice": lambda m, a, b: torch.cat([a[:, ::2] * 2, b[:, 1::2]], 1),
    "expand": lambda m, a, b: a[:, :1].expand(B, T, D),
    "detach": lambda m, a, b: a + (b * b).detach(),
    "half": lambda m, a, b: (a.bfloat16() * 2).float() + b,
    "double": lambda m, a, b: (a.double() + 1).to(a.dtype),
    "dropout": lambda m, a, b: m.drop(a) + b,
    "noise": lambda m, a, b: a + torch.rand_like(b),
    "attention": lambda m, a, b: torch.softmax(a @ b.transpose(1, 2) / 3, -1) @ a,
    "gated": lambda m, a, b: F.silu(m.fc(a)) * m.fc2(a),
    "alias": lambda m, a, b: a,
    "halves": _halves,
    "write_row": _write_row,
    "write_view": _write_view,
    "buffer": _buffer,
    "no_grad": _no_grad,
    "autocast": _autocast,
}
CALLS = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=25, derandomize=True, database=None, phases=[Phase.generate])
@given(
    program=st.lists(CALLS, min_size=4, max_size=14),
    returned=st.lists(st.integers(0, 14), max_size=3),
    training=st.booleans(),
)
def test_a_random_model(program: list[tuple[str, int, int]], returned: list[int], training: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).requires_grad_(training)
    model = Random(program, returned)
    if not _runs(model.train(training), x):
        return
    low_precision = any(name in ("autocast", "half") for name, _, _ in program)
    check(model, x, mode="training" if training else "inference", low_precision=low_precision)


def _runs(model: nn.Module, x: Tensor) -> bool:
    """In-place operators may make a program one that eager refuses, or autograd; then there is nothing to compare."""
    buffers = [b.clone() for b in model.buffers()]
    try:
        outputs = [t for t in model(x) if t.requires_grad]
        if x.requires_grad and outputs:
            torch.autograd.grad(sum(t.sum() for t in outputs), [x, *model.parameters()], allow_unused=True)
    except RuntimeError:
        return False
    finally:
        for buffer, old in zip(model.buffers(), buffers, strict=True):
            buffer.data.copy_(old)
    return True
