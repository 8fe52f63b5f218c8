"""Twenty shapes for each schedule of gated MLPs, products of one input, float32 products and vocabulary heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from gemm_shapes import HALVES
from gemm_shapes import made
from gemm_shapes import schedules
from loss_cases import capped
from loss_cases import causal
from loss_cases import shifted
from loss_cases import smoothed
from shape_table import Make
from shape_table import Shape
from torch import Tensor
from torch.nn import functional as F


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def geglu(x: Tensor, gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, gate, a)) * F.linear(x, up, b)


def packed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def projections(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    weights, biases = [t for t in given if t.dim() == 2], [t for t in given if t.dim() == 1]
    return tuple(F.linear(x, w, biases[n] if n < len(biases) else None) for n, w in enumerate(weights))


GATED_TILES = (
    (65, 72, 8), (127, 136, 128), (129, 520, 257), (257, 1032, 520), (131, 192, 256), (3, 97, 776, 1032),
    (1031, 264, 509), (8, 100, 768, 768), (259, 136, 1), (512, 512, 512), (2100, 776, 1032), (200, 4104, 136),
    (1, 331, 328, 331), (5, 196, 520, 384), (1537, 80, 77), (66, 2056, 203), (4104, 264, 520), (700, 128, 1000),
    (97, 648, 65), (300, 344, 601),
)  # fmt: skip
"""Rows, K and columns."""
GATED_FEW = (
    (9, 136, 8), (16, 4096, 1024), (13, 1032, 1000), (60, 2056, 1001), (64, 2048, 1000), (17, 520, 77), (31, 776, 331),
    (33, 264, 1), (2, 4, 5, 520, 264), (11, 4104, 509), (48, 768, 768), (32, 512, 512), (63, 328, 203), (10, 4104, 264),
    (19, 648, 1544), (40, 264, 2048), (29, 1544, 127), (15, 776, 776), (12, 2056, 65), (57, 1032, 264),
)  # fmt: skip
GATED_DOTS = (
    (1, 2056, 1032), (1, 71, 1), (2, 2056, 1000), (3, 1031, 77), (5, 515, 203), (8, 4100, 1001), (2, 4, 776, 331),
    (7, 13, 509), (4, 64, 8), (6, 4096, 264), (1, 4104, 127), (1, 1, 2, 1000), (3, 331, 331), (5, 264, 520),
    (8, 3, 2001), (1, 6, 768, 768), (1, 2048, 51), (7, 129, 257), (3, 2, 520, 1544), (4, 97, 89),
)  # fmt: skip
WIDTHS = (
    ((72, 72, 72), 3), ((136, 32, 32), 1), ((768, 768, 768), 3), ((24, 40, 8, 200, 16), 0), ((2048, 512, 512), 0),
    ((264, 520), 2), ((8, 8), 0), ((1544, 264, 520), 1), ((104, 56), 1), ((512, 64, 64), 3),
)  # fmt: skip
"""Columns of the products of one input, and how many have a bias."""
SHARED_TILES = tuple((row[:-1], *WIDTHS[k % 10]) for k, row in enumerate(GATED_TILES))
SHARED_FEW = tuple((row[:-1], *WIDTHS[k % 10]) for k, row in enumerate(GATED_FEW))
SHARED_DOTS = tuple((row[:-1], *WIDTHS[k % 10]) for k, row in enumerate(GATED_DOTS))
HEADS = (
    (64, 520, 40), (65, 1031, 72), (127, 777, 136), (129, 2053, 264), (200, 521, 8), (256, 1024, 64), (1000, 5003, 264),
    (70, 10007, 40), (331, 1289, 328), (2, 67, 1031, 40), (4, 70, 1031, 136), (1, 130, 3001, 264), (3, 33, 997, 520),
    (512, 4096, 512), (97, 5120, 768), (2, 129, 2049, 72), (1023, 1025, 128), (77, 613, 1032), (5, 19, 8191, 24),
    (301, 769, 200),
)  # fmt: skip
"""Rows, classes and width."""
SINGLE = (
    ((65,), 72, 8, "relu"), ((127,), 136, 127, "gelu"), ((1,), 64, 200, "relu"),
    ((257,), 1031, 520, "silu", {"added": ("rows",)}), ((101,), 203, 77, "relu", {"added": ("rows",)}),
    ((259,), 137, 1, "scaled"), ((3, 97), 301, 203, "gelu"), ((1000,), 520, 776, "relu", {"across": True}),
    ((512,), 512, 512, "gelu"), ((130,), 72, 203, "silu"), ((4104,), 264, 1544, "scaled"),
    ((700,), 264, 515, "relu", {"across": True}), ((5, 196), 139, 384, "silu"), ((200,), 4103, 136, "silu"),
    ((7,), 331, 331, "relu"), ((64,), 1032, 1000, "gelu"), ((3, 70), 136, 96, "relu", {"added": ("rows",)}),
    ((128,), 128, 128, "relu"), ((1031,), 31, 509, "scaled"), ((33,), 2056, 67, "relu"),
)  # fmt: skip


def gated(group: str, wants: tuple[dict[str, Any], ...], table: tuple[tuple[int, ...], ...]) -> Iterator[Shape]:
    for number, (given, dtype, (*m, k, n)) in enumerate(zip(cycle(wants), cycle(HALVES), table)):
        function = (swiglu, geglu, packed)[number % 3]

        def inputs(make: Make, m=m, k=k, n=n, function=function) -> tuple[Tensor, ...]:
            if function is packed:
                return make(*m, k), make.weight(2 * n, k), make(2 * n)
            weights = make(*m, k), make.weight(n, k), make.weight(n, k)
            return weights if function is swiglu else (*weights, make(n), make(n))

        name = f"{group}-{given['schedule']}-{'x'.join(map(str, (*m, k, n)))}-{function.__name__}"
        yield Shape(name, "gated_mlp", function, inputs, given, (), dtype, (group, f"gated_mlp {given['schedule']}"))


def shared(group: str, wants: dict[str, Any], table: tuple[Any, ...]) -> Iterator[Shape]:
    for dtype, ((*m, k), widths, biases) in zip(cycle(HALVES), table):

        def inputs(make: Make, m=m, k=k, widths=widths, biases=biases) -> tuple[Tensor, ...]:
            return make(*m, k), *(make.weight(n, k) for n in widths), *(make(n) for n in widths[:biases])

        name = f"{group}-{'x'.join(map(str, (*m, k)))}-{'+'.join(map(str, widths))}"
        constants = tuple(range(1, 1 + len(widths) + biases))
        yield Shape(name, "gemm_shared_input", projections, inputs, wants, constants, dtype, (group,))


def heads(schedule: str) -> Iterator[Shape]:
    group, least = f"vocabulary {schedule}", {"coop": (65, 0), "roles": (65, 72)}.get(schedule, (64, 0))
    for number, (dtype, (*m, classes, k)) in enumerate(zip(cycle(HALVES), HEADS)):
        m, k = [max(m[0], least[0])] if len(m) == 1 else m, max(k, least[1])
        rows = torch.Size(m).numel()
        forms = (causal, capped) if len(m) == 1 else (causal, shifted, smoothed)
        function = forms[number % len(forms)]

        def inputs(make: Make, m=m, k=k, n=classes, rows=rows, function=function) -> tuple[Tensor, ...]:
            x, w = make(*m, k), make.weight(n, k)
            if function is capped:
                return x, w, make(n), make.classes(n, rows)
            if function is shifted:
                return x, w, make.classes(n, rows - m[0])
            return x, w, make.classes(n, *m, ignored=function is causal)

        name = f"{group}-{'x'.join(map(str, (*m, classes, k)))}-{function.__name__}"
        yield Shape(name, "linear_cross_entropy", function, inputs, {"schedule": schedule}, (), dtype, (group,))


def float32(group: str, wants: dict[str, Any]) -> Iterator[Shape]:
    for shape in made(group, "gemm_float32", (wants,), SINGLE, weight=True):
        yield Shape(shape.name, shape.template, shape.function, shape.inputs, wants, (1,), torch.float32, (group,))


GATED = (
    *gated("gated tiles", schedules("coop"), GATED_TILES),
    *gated("gated tiles", schedules("auto"), GATED_TILES),
    *gated("gated tiles", schedules("pingpong"), GATED_TILES),
    *gated("gated tiles", schedules("roles"), GATED_TILES),
    *gated("gated few rows", schedules("auto", policy="FullCol"), GATED_FEW),
    *gated("gated split", schedules("split", join="cluster") + schedules("split", join="memory"), GATED_FEW),
    *gated("gated dots", schedules("vector"), GATED_DOTS),
)
SHARED_INPUT = (
    *shared("shared coop", {"schedule": "coop"}, SHARED_TILES),
    *shared("shared pingpong", {"schedule": "pingpong"}, SHARED_TILES),
    *shared("shared auto", {"schedule": "auto"}, SHARED_TILES),
    *shared("shared split", {"schedule": "split"}, SHARED_FEW),
    *shared("shared dots", {"schedule": "vector"}, SHARED_DOTS),
)
FLOAT32 = (
    *float32("planes prepared", {"weight": "prepared"}),
    *float32("planes in each call", {"weight": None}),
)
LOSSES = tuple(shape for schedule in ("coop", "pingpong", "auto", "roles") for shape in heads(schedule))
