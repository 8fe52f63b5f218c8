"""Sums over what linears and convolutions give, as sub-graphs whose first input alone is no constant."""

from __future__ import annotations

from dataclasses import replace

import torch
from template_cases import trace
from torch.nn import functional as F

from fusescout.ir import Subgraph

ROWS, PIXELS, VOLUME = ((4, 16, 96), (48, 96), (48,)), (2, 6, 9, 11), (2, 6, 5, 6, 7)
CASES = {
    "columns": (lambda x, w, b: F.linear(x, w, b).mean(-1, keepdim=True), *ROWS),
    "columns, added up": (lambda x, w, b: F.linear(x, w, b).sum(2), *ROWS),
    "columns, scaled": (lambda x, w, b, c: ((F.linear(x, w, b) - c) * 2).mean(2), *ROWS, (48,)),
    "many columns, less a row": (
        lambda x, w, b, c: (F.linear(x, w, b) - c).mean(1, True), (1024, 24), (1024, 24), (1024,), (1024,)
    ),
    "columns of a matmul": (lambda x, w: (x @ w.t() / 2).sum(-1, keepdim=True) * 1.5, *ROWS[:2]),
    "columns of a matmul, not turned": (lambda x, w: (3 - torch.mm(x, w)).sum(1), (16, 96), (96, 48)),
    "rows of a matmul": (lambda x, w: (x @ w).mean(1), (4, 16, 96), (96, 48)),
    "columns, and the input again": (lambda x, w, b: F.gelu(F.linear(x, w, b).mean(2, True)) + x, *ROWS),
    "columns of a wide input": (lambda x, w, b: F.linear(x, w, b).mean(1, True), (16, 1100), (33, 1100), (33,)),
    "rows and columns": (lambda x, w, b: F.linear(x, w, b).mean((0, 1, 2)), *ROWS),
    "rows": (lambda x, w, b: F.linear(x, w, b).mean(1), *ROWS),
    "rows, added up": (lambda x, w: F.linear(x, w).sum((0, 1), keepdim=True), *ROWS[:2]),
    "all pixels": (lambda x, w, b: F.conv2d(x, w, b).mean((2, 3)), PIXELS, (8, 6, 3, 3), (8,)),
    "padded, strided": (lambda x, w: F.conv2d(x, w, None, 2, 1).sum((2, 3)), PIXELS, (8, 6, 3, 3)),
    "padded, groups": (lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 2).mean((2, 3), True), PIXELS, (8, 3, 3, 3), (8,)),
    "transposed": (lambda x, w, b: F.conv_transpose3d(x, w, b).mean((2, 3, 4)), VOLUME, (6, 8, 3, 3, 3), (8,)),
    "one dimension": (
        lambda x, w, b: F.conv_transpose3d(x, w, b, 1, 1).mean(2, keepdim=True), VOLUME, (6, 8, 3, 3, 3), (8,)
    ),
    "one, strided": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1).mean(3), PIXELS, (6, 8, 3, 3), (8,)),
    "groups, transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 1, 0, 0, 2).mean((2, 3)), PIXELS, (6, 4, 3, 3), (8,)
    ),
    "pooled": (
        lambda x, w, b: F.adaptive_avg_pool2d(F.conv_transpose2d(x, w, b) * 1.5, 1), PIXELS, (6, 8, 3, 3), (8,)
    ),
}  # fmt: skip


def traced(name: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Subgraph, list[torch.Tensor]]:
    """A case's sub-graph, all but the first input constant, and its inputs."""
    function, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(s, generator=generator) / (s[1] ** 0.5 if k == 1 else 1) for k, s in enumerate(shapes)]
    given = [t.to(device, dtype) for t in given]
    graph, inputs = trace(function, tuple(given))
    inputs_of = tuple(replace(s, constant=t is not given[0]) for s, t in zip(graph.inputs, inputs, strict=True))
    return replace(graph, inputs=inputs_of), inputs
