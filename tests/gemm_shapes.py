"""Twenty shapes for each schedule of the templates with matrix products: `shape_table.py` has the form."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from shape_table import Make
from shape_table import Shape
from torch import Tensor
from torch.nn import functional as F

TAILS: dict[str, Callable[[Tensor], Any]] = {
    "relu": F.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "both": lambda x: (x, F.gelu(x)),
    "scaled": lambda x: torch.tanh(x * 0.5) + x,
}
TILED = ("coop", "pingpong", "auto", "roles")
HALVES = (torch.bfloat16, torch.bfloat16, torch.float16)


def product(
    m: tuple[int, ...],
    k: int,
    n: int,
    tail: str,
    *,
    across: bool = False,
    turned: bool = False,
    gap: int = 0,
    odd: bool = False,
    added: tuple[str, ...] = (),
    columns: bool = False,
    each: bool = False,
) -> tuple[Callable[..., Any], Callable[[Make], tuple[Tensor, ...]]]:
    """A product of `m` rows (leading sizes first), K = k and n columns with what follows it, and its inputs.

    Args:
        across: the weight is [k, n].
        turned: the input is [k, m].
        gap: elements between the input's rows.
        odd: the input begins at an odd address.
        added: operands that are added: "rows" as large as the result, "columns" as large and transposed, "table"
            without the first dimension, "column" with one element a row.
        columns: the result is transposed behind the product.
        each: each leading index has a weight of its own.
    """

    def inputs(make: Make) -> tuple[Tensor, ...]:
        *lead, rows = m
        x = make(*lead, k, rows) if turned else make.odd(*m, k) if odd else make.beside(*m, k, gap=gap)
        weight = make(*lead, k, n, scale=k**-0.5) if each else make.weight(k, n, True) if across else make.weight(n, k)
        sizes = {"rows": (*m, n), "columns": (*lead, n, rows), "table": (*m[1:], n), "column": (*m, 1)}
        return (x, weight, *(() if each else (make(n),)), *(make(*sizes[a]) for a in added))

    def chain(x: Tensor, w: Tensor, *more: Tensor) -> Any:
        x = x.transpose(-1, -2) if turned else x
        operands = more if each else more[1:]
        if each:
            h = torch.matmul(x, w)
        elif across and x.dim() == 2:
            h = torch.addmm(more[0], x, w)
        else:
            h = x @ w + more[0] if across else F.linear(x, w, more[0])
        h = h.transpose(-1, -2) if columns else h
        for name, operand in zip(added, operands, strict=True):
            h = (operand.transpose(-1, -2) if (name == "columns") != columns else operand) + h
        return TAILS[tail](h)

    return chain, inputs


def made(
    group: str,
    template: str,
    schedules: tuple[dict[str, Any], ...],
    table: tuple[tuple[Any, ...], ...],
    weight: bool = False,
) -> Iterator[Shape]:
    """Rows (m, k, n, tail, options), and the wanted variants in turn; with `weight` that is a parameter."""
    for wants, dtype, (m, k, n, tail, *rest) in zip(cycle(schedules), cycle(HALVES), table):
        options = rest[0] if rest else {}
        chain, inputs = product(m, k, n, tail, **options)
        what = "".join(f"-{o if v is True else v if isinstance(v, int) else '+'.join(v)}" for o, v in options.items())
        schedule = wants.get("schedule", "first")
        name = f"{group}-{schedule}-{'x'.join(map(str, (*m, k, n)))}-{tail}{what}"
        covers, constants = (group, f"{template} {schedule}"), (1,) if weight else ()
        yield Shape(name, template, chain, inputs, wants, constants, dtype, covers)


def schedules(*names: str, **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"schedule": name, **more} for name in names)


LOADED = (
    ((65,), 72, 8, "relu"),
    ((127,), 136, 128, "gelu"),
    ((129,), 520, 264, "both"),
    ((257,), 1032, 520, "silu", {"added": ("rows",)}),
    ((128,), 192, 256, "scaled", {"across": True}),
    ((3, 97), 776, 1032, "gelu", {"added": ("rows",)}),
    ((1031,), 264, 509, "relu", {"added": ("rows",)}),
    ((8, 100), 768, 768, "relu", {"added": ("table",)}),
    ((1000,), 776, 520, "both", {"gap": 24}),
    ((6, 199), 264, 203, "silu", {"added": ("column",)}),
    ((259,), 136, 1, "scaled"),
    ((512,), 512, 512, "gelu", {"across": True, "added": ("rows",)}),
    ((6, 300), 776, 1544, "relu", {"each": True, "added": ("rows",)}),
    ((2104,), 776, 1544, "relu", {"turned": True}),
    ((4104,), 776, 1544, "gelu", {"added": ("rows",)}),
    ((200,), 4104, 136, "silu"),
    ((1, 331), 328, 331, "relu", {"added": ("column",)}),
    ((5, 196), 520, 384, "both", {"across": True}),
    ((1537,), 80, 77, "scaled"),
    ((3, 130), 648, 264, "relu", {"each": True}),
)
ORIENTED = (
    ((65,), 72, 16, "relu", {"columns": True}),
    ((130,), 136, 40, "gelu", {"columns": True, "added": ("columns",)}),
    ((264,), 520, 129, "both", {"columns": True}),
    ((9, 196), 776, 520, "gelu", {"columns": True, "added": ("columns",)}),
    ((2104,), 264, 520, "relu", {"columns": True, "added": ("columns",)}),
    ((7, 72), 384, 196, "silu", {"columns": True}),
    ((7, 768), 384, 196, "scaled", {"columns": True, "added": ("columns",)}),
    ((3, 328), 136, 331, "relu", {"columns": True, "added": ("columns",)}),
    ((1, 136), 264, 257, "gelu", {"columns": True}),
    ((128,), 192, 256, "relu", {"columns": True}),
    ((5, 200), 1032, 384, "both", {"columns": True}),
    ((1000,), 776, 77, "silu", {"columns": True}),
    ((512,), 512, 512, "gelu", {"columns": True, "added": ("columns",)}),
    ((16, 72), 264, 131, "relu", {"columns": True}),
    ((136,), 2056, 72, "scaled", {"columns": True}),
    ((2, 1032), 328, 264, "relu", {"columns": True, "added": ("rows",)}),
    ((296,), 264, 520, "relu", {"columns": True, "added": ("rows",)}),
    ((4, 256), 72, 1000, "gelu", {"columns": True}),
    ((11, 104), 136, 509, "silu", {"columns": True, "added": ("columns",)}),
    ((1544,), 400, 203, "relu", {"columns": True}),
)
UNEVEN = (
    ((67,), 71, 8, "relu"),
    ((127,), 131, 127, "gelu"),
    ((129,), 415, 264, "both"),
    ((257,), 1031, 520, "silu", {"added": ("rows",)}),
    ((1031,), 263, 509, "relu", {"added": ("rows",)}),
    ((259,), 137, 1, "scaled"),
    ((3, 97), 301, 203, "gelu"),
    ((4100,), 415, 1000, "relu"),
    ((512,), 511, 512, "gelu"),
    ((300,), 777, 77, "silu", {"added": ("rows",)}),
    ((128,), 192, 257, "scaled", {"across": True}),
    ((700,), 264, 515, "relu", {"across": True}),
    ((1537,), 83, 77, "scaled"),
    ((5, 196), 139, 384, "both"),
    ((200,), 4103, 136, "silu"),
    ((8, 100), 767, 768, "relu", {"added": ("table",)}),
    ((331,), 331, 331, "relu"),
    ((1000,), 776, 523, "both", {"across": True, "added": ("rows",)}),
    ((2100,), 97, 1032, "gelu"),
    ((90,), 2055, 1001, "relu", {"added": ("rows",)}),
)
"""Rows or addresses that the copy engine can't load."""
COPIED = (
    *UNEVEN[:12],
    ((6, 515), 301, 203, "silu", {"each": True}),
    ((3, 130), 648, 261, "relu", {"each": True}),
    ((2104,), 776, 520, "relu", {"odd": True}),
    ((300,), 264, 520, "gelu", {"odd": True}),
    ((1001,), 264, 520, "relu", {"gap": 3}),
    ((515,), 136, 200, "relu", {"turned": True}),
    ((203,), 331, 200, "scaled", {"turned": True}),
    ((2, 1, 77), 515, 97, "silu"),
)
AHEAD = (
    ((4100,), 136, 203, "relu", {"added": ("rows",)}),
    ((4099,), 72, 77, "gelu", {"added": ("rows",)}),
    ((5000,), 520, 509, "silu", {"added": ("rows",)}),
    ((4104,), 264, 520, "relu", {"added": ("rows", "rows")}),
    ((8, 515), 264, 331, "scaled", {"added": ("rows",)}),
    ((4, 1032), 136, 257, "relu", {"added": ("rows", "column")}),
    ((6000,), 72, 3, "relu", {"added": ("rows",)}),
    ((4097,), 328, 1001, "gelu", {"added": ("rows",)}),
    ((41, 100), 136, 131, "silu", {"added": ("rows",)}),
    ((5, 1000), 264, 203, "relu", {"each": True, "added": ("rows",)}),
    ((4128,), 200, 67, "scaled", {"across": True, "added": ("rows",)}),
    ((4300,), 512, 333, "relu", {"added": ("rows",)}),
    ((16, 299), 264, 129, "gelu", {"added": ("rows",)}),
    ((4111,), 776, 263, "silu", {"added": ("rows",)}),
    ((7001,), 136, 103, "relu", {"added": ("rows",)}),
    ((4608,), 328, 127, "relu", {"turned": True, "added": ("rows",)}),
    ((4160,), 264, 264, "silu", {"added": ("rows", "rows")}),
    ((3, 1501), 136, 403, "gelu", {"added": ("rows",)}),
    ((4133,), 648, 55, "relu", {"gap": 8, "added": ("rows",)}),
    ((4501,), 144, 601, "scaled", {"added": ("rows",)}),
)
PAIRED = (
    *(row for row in LOADED if row[0][-1] > 128 and "each" not in row[-1]),
    ((8, 515), 200, 77, "relu"),
    ((1025,), 1544, 136, "gelu", {"added": ("rows",)}),
    ((385,), 264, 1000, "both"),
    ((640,), 136, 336, "silu", {"across": True, "added": ("column",)}),
    ((2, 600), 72, 129, "scaled"),
    ((777,), 328, 200, "relu", {"gap": 8}),
    ((1100,), 2056, 264, "relu"),
)
SHORT = (
    ((65,), 3, 8, "relu"),
    ((127,), 5, 127, "gelu"),
    ((257,), 13, 520, "silu", {"added": ("rows",)}),
    ((1031,), 31, 509, "relu", {"added": ("rows",)}),
    ((259,), 17, 1, "scaled"),
    ((9,), 7, 77, "relu"),
    ((3, 97), 61, 203, "gelu"),
    ((4100,), 13, 1000, "relu"),
    ((512,), 63, 512, "both"),
    ((300,), 1, 77, "silu"),
    ((128,), 24, 257, "scaled", {"across": True}),
    ((700,), 48, 515, "relu", {"across": True}),
    ((1537,), 11, 77, "scaled"),
    ((5, 196), 39, 384, "both"),
    ((6, 115), 21, 203, "silu", {"each": True}),
    ((204,), 40, 520, "relu", {"odd": True}),
    ((101,), 24, 72, "gelu", {"gap": 3}),
    ((55,), 33, 200, "relu", {"turned": True}),
    ((8, 100), 27, 768, "relu", {"added": ("table",)}),
    ((40,), 59, 301, "relu"),
)
FEW = (
    ((9,), 72, 8, "relu"),
    ((16,), 4096, 1024, "silu"),
    ((13,), 1032, 1000, "gelu", {"across": True}),
    ((60,), 2056, 1001, "both", {"added": ("rows",)}),
    ((64,), 2048, 1000, "relu"),
    ((24,), 2056, 1000, "relu", {"turned": True}),
    ((17,), 520, 77, "scaled"),
    ((31,), 776, 331, "silu", {"added": ("rows",)}),
    ((33,), 264, 1, "relu"),
    ((2, 4, 5), 520, 264, "gelu"),
    ((11,), 4104, 509, "relu", {"added": ("rows",)}),
    ((48,), 768, 768, "both"),
    ((32,), 512, 512, "gelu", {"added": ("rows",)}),
    ((5, 13), 1032, 520, "silu", {"each": True}),
    ((63,), 328, 203, "scaled", {"across": True}),
    ((10,), 8200, 264, "relu"),
    ((19,), 648, 1544, "gelu", {"gap": 8}),
    ((40,), 136, 4096, "relu"),
    ((29,), 1544, 127, "silu", {"added": ("column",)}),
    ((15,), 776, 776, "scaled"),
)
SPLIT = (
    ((1,), 4096, 520, "relu"),
    ((500,), 4096, 1000, "gelu", {"added": ("rows",)}),
    *FEW[1:10],
    ((127,), 1032, 509, "silu", {"added": ("rows",)}),
    ((129,), 2056, 264, "both"),
    ((300,), 776, 200, "relu", {"across": True}),
    ((257,), 1544, 131, "scaled"),
    ((3, 70), 1032, 331, "relu"),
    ((65,), 4104, 1, "gelu"),
    ((2, 77), 2056, 136, "relu", {"each": True}),
    ((203,), 3080, 203, "silu", {"added": ("rows",)}),
    ((1, 7), 1032, 1032, "both"),
)
DOTS = (
    ((1,), 1032, 4096, "silu"),
    ((1,), 71, 1, "relu"),
    ((2,), 2056, 1000, "gelu"),
    ((3,), 1031, 77, "relu", {"added": ("rows",)}),
    ((5,), 515, 203, "both"),
    ((8,), 4100, 1001, "scaled", {"added": ("rows",)}),
    ((2, 4), 776, 331, "relu"),
    ((7,), 13, 509, "gelu"),
    ((4,), 64, 8, "silu"),
    ((6,), 4096, 264, "relu"),
    ((1,), 8200, 127, "both"),
    ((2, 12, 1), 64, 500, "scaled", {"each": True}),
    ((1, 1), 1, 1000, "relu"),
    ((3,), 331, 331, "silu", {"gap": 5}),
    ((5,), 264, 520, "relu", {"odd": True}),
    ((8,), 3, 2001, "gelu"),
    ((1, 6), 768, 768, "relu", {"added": ("rows",)}),
    ((1,), 2048, 51, "scaled"),
    ((7,), 129, 257, "both"),
    ((3, 2), 520, 1544, "relu"),
)
ACROSS = tuple((m, k, n, tail, {**(rest[0] if rest else {}), "across": True}) for m, k, n, tail, *rest in DOTS)

EPILOGUES = (
    *made("loaded", "gemm_epilogue", schedules(*TILED, weight=None), LOADED),
    *made("oriented", "gemm_epilogue", schedules(*TILED[::-1]), ORIENTED),
    *made("split in clusters", "gemm_epilogue", schedules("split", join="cluster"), SPLIT),
    *made("split in memory", "gemm_epilogue", schedules("split", join="memory"), SPLIT),
    *made("dots", "gemm_epilogue", schedules("vector"), DOTS),
    *made("dots across", "gemm_epilogue", schedules("vector"), ACROSS),
    *made(
        "prepared weight",
        "gemm_epilogue",
        schedules("pingpong", "coop", "auto", "roles", weight="prepared"),
        UNEVEN,
        True,
    ),
    *made("copied operands", "gemm_epilogue", schedules("coop", "auto", "pingpong", "roles", weight=None), COPIED),
    *made("read ahead", "gemm_epilogue", schedules("pingpong", "coop", residual="registers"), AHEAD),
    *made("few rows", "gemm_epilogue", schedules("auto"), FEW),
    *made("one step", "gemm_epilogue", schedules("auto", weight=None, stages=1), SHORT),
    *made("clusters", "gemm_epilogue", schedules("coop", "pingpong", cluster=2), PAIRED[:20]),
)
