"""Twenty shapes for each kernel that is pointwise, rotary, a pooling, or around a convolution."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from row_cases import interleaved_rotary
from row_cases import partly_rotary
from row_cases import rotary
from row_shapes import DTYPES
from shape_table import Make
from shape_table import Shape
from torch import Tensor
from torch.nn import functional as F

Given = tuple[Callable[..., Any], Callable[[Make], tuple[Tensor, ...]]]
LAST = torch.channels_last


def chains(
    group: str,
    template: str,
    table: dict[str, Given],
    wants: dict[str, Any] | None = None,
    constants: tuple[int, ...] = (),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    run: bool = False,
) -> Iterator[Shape]:
    for dtype, (what, (function, inputs)) in zip(cycle(dtypes), table.items()):
        name = f"{group}-{what}-{str(dtype)[6:]}"
        yield Shape(name, template, function, inputs, wants or {}, constants, dtype, (group,), run)


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


def geglu(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x) * y


def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x + y, torch.relu(x + y), x > y


def normed(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var.abs() + 0.5, w, b, False, 0.1, 1e-5))


def affine(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y + 1)


def behind(x: Tensor) -> Tensor:
    return (torch.relu(x) * 2).contiguous()


def flat() -> dict[str, Given]:
    pairs = {"scalar": (), "1": (1,), "prime": (4099,), "rows": (129, 7), "one row": (1, 1021), "one column": (1021, 1)}
    more = {"large": (1031, 997), "batch": (3, 37, 768), "even": (64, 4096), "deep": (2, 3, 5, 7, 11)}
    found: dict[str, Given] = {}
    for number, (name, sizes) in enumerate((pairs | more).items()):
        function = (geglu, several)[number % 2]
        found[name] = function, lambda make, sizes=sizes: (make(*sizes), make(*sizes))
    for n in (768, 13, 1, 1031):
        found[f"bias {n}"] = bias_gelu, lambda make, n=n: (make(3, 37, n), make(n))
    return found | {
        "outer": (geglu, lambda make: (make(129, 1), make(1, 1000))),
        "table": (geglu, lambda make: (make(7, 100, 33), make(1, 100, 33))),
        "sliced": (geglu, lambda make: (make(33, 100)[:, 3:96], make.beside(33, 93, gap=1))),
        "odd address": (several, lambda make: (make.odd(33, 65), make(33, 65))),
        "expanded": (geglu, lambda make: (make(5, 1).expand(5, 64), make(5, 64))),
        "batch norm": (normed, lambda make: (make(2, 7, 5, 6), *(make(7) for _ in range(4)))),
    }


def crosswise() -> dict[str, Given]:
    pairs = ((65, 130), (16, 16), (17, 1031), (1031, 17), (512, 512), (97, 89), (1000, 48), (128, 256))
    found: dict[str, Given] = {
        f"{m}x{n}": (affine, lambda make, m=m, n=n: (make(n, m).t(), make(m, n))) for m, n in pairs
    }
    found |= {
        f"batch {b}x{m}x{n}": (affine, lambda make, b=b, m=m, n=n: (make(b, m, n), make(b, n, m).transpose(1, 2)))
        for b, m, n in ((3, 50, 48), (1, 33, 77), (7, 200, 64), (2, 129, 131))
    }
    images = ((2, 20, 7, 9), (1, 64, 16, 16), (3, 17, 13, 11), (2, 128, 31, 8))
    found |= {
        f"image {'x'.join(map(str, s))}": (behind, lambda make, s=s: (make(*s).to(memory_format=LAST),)) for s in images
    }
    return found | {
        f"back {'x'.join(map(str, s))}": (
            lambda x: (F.silu(x) + 1).contiguous(memory_format=LAST), lambda make, s=s: (make(*s),),
        )
        for s in images
    }  # fmt: skip


def turned() -> dict[str, Given]:
    found: dict[str, Given] = {}
    sizes = (
        (2, 10, 4, 64), (1, 1, 1, 16), (3, 37, 5, 80), (2, 127, 8, 128), (1, 1031, 3, 64), (4, 16, 12, 32),
        (2, 7, 2, 6),
    )  # fmt: skip
    for b, n, h, d in sizes:
        shape = f"{b}x{n}x{h}x{d}"

        def heads(make: Make, b=b, n=n, h=h, d=d) -> tuple[Tensor, ...]:
            return make(b, n, h, d).transpose(1, 2), make(b, n, d), make(b, n, d)

        def flat(make: Make, b=b, n=n, h=h, d=d) -> tuple[Tensor, ...]:
            return make(b, n, h, d).transpose(1, 2), make(n, d), make(n, d)

        def part(make: Make, b=b, n=n, h=h, d=d) -> tuple[Tensor, ...]:
            few = max(d // 4 // 2 * 2, 2)
            return make(b, n, h, d).transpose(1, 2), make(b, n, few), make(b, n, few)

        found |= {f"llama {shape}": (rotary, heads), f"gpt-j {shape}": (interleaved_rotary, flat)}
        if len(found) < 20:
            found[f"neox {shape}"] = partly_rotary, part
    return found


def pieces() -> dict[str, Given]:
    found: dict[str, Given] = {}
    for m, n in ((33, 65), (1, 8), (127, 1031), (512, 256), (5, 1)):
        found[f"chunks {m}x{n}"] = (
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], lambda make, m=m, n=n: (make(m, 2 * n),),
        )  # fmt: skip
        found[f"cat rows {m}x{n}"] = (
            lambda x, y: torch.relu(torch.cat((x, y)) + 1), lambda make, m=m, n=n: (make(m, n), make(m, n)),
        )  # fmt: skip
        found[f"cat columns {m}x{n}"] = (
            lambda x, y: torch.cat((x * 2, y), -1).tanh(), lambda make, m=m, n=n: (make(m, n), make(m, 2 * n)),
        )  # fmt: skip
        found[f"stack {m}x{n}"] = (
            lambda x: torch.stack([a * 2 for a in x.unbind(1)], 2), lambda make, m=m, n=n: (make(m, 3, n),),
        )  # fmt: skip
    return found


POOLS: tuple[Callable[..., Any], ...] = (
    lambda x, b: F.mish(F.max_pool2d(F.relu(x + b), 3, 2, 1)),
    lambda x, b: F.gelu(F.avg_pool2d(x + b, 3, 2, 1, ceil_mode=True)),
    lambda x, b: F.max_pool2d(x * b, 3, 2, ceil_mode=True, dilation=(1, 2)) + 1,
    lambda x, b: torch.sigmoid(F.avg_pool2d(x, (2, 3), (2, 1), (0, 1), count_include_pad=False)) * b,
)
IMAGES = (
    (2, 5, 11, 13), (1, 1, 7, 9), (3, 17, 31, 29), (2, 64, 56, 56), (4, 12, 12, 15), (1, 3, 224, 224), (7, 8, 6, 6),
    (2, 33, 17, 5), (1, 128, 14, 14), (5, 2, 97, 89),
)  # fmt: skip


def image(make: Make, sizes: tuple[int, ...], last: bool) -> Tensor:
    x = make(*sizes)
    return x.to(memory_format=LAST) if last else x


def pooled() -> dict[str, Given]:
    return {
        f"{'x'.join(map(str, s))}{' last' if last else ''}": (
            POOLS[(k + last) % 4], lambda make, s=s, last=last: (image(make, s, last), make(s[1], 1, 1)),
        )
        for last in (False, True)
        for k, s in enumerate(IMAGES)
    }  # fmt: skip


TAILS: tuple[Callable[..., Any], ...] = (
    lambda x, w, b: torch.tanh(F.gelu(F.conv2d(x, w, b, 2, 1))),
    lambda x, w, b: F.relu(F.conv2d(x, w, b, 1, 1)) * 2,
    lambda x, w, b: F.silu(F.conv2d(x, w, b)),
)
FILTERS = (
    (24, 16, 33, 31), (8, 3, 64, 64), (7, 5, 17, 19), (64, 64, 28, 28), (32, 8, 9, 11), (1, 16, 13, 13),
    (40, 24, 7, 50), (16, 1, 28, 28), (96, 32, 14, 14), (13, 11, 37, 41),
)  # fmt: skip
"""Channels behind and before, height, width."""


def convolved() -> dict[str, Given]:
    return {
        f"{o}x{c}x{h}x{w}{' last' if last else ''}": (
            TAILS[(k + last) % 3],
            lambda make, o=o, c=c, h=h, w=w, last=last: (
                image(make, (3, c, h, w), last), image(make, (o, c, 3, 3), last) / (3 * c**0.5), make(o),
            ),
        )
        for last in (False, True)
        for k, (o, c, h, w) in enumerate(FILTERS)
    }  # fmt: skip


def one_by_one() -> dict[str, Given]:
    found: dict[str, Given] = {}
    sizes = (
        (64, 64, 28, 28), (8, 16, 5, 7), (256, 64, 13, 13), (40, 24, 31, 29), (1, 32, 9, 9), (128, 512, 7, 7),
        (33, 72, 11, 3), (16, 8, 56, 56), (200, 136, 17, 1), (77, 264, 14, 14),
    )  # fmt: skip
    for k, (o, c, h, w) in enumerate(sizes):
        for added in (False, True):

            def inputs(make: Make, o=o, c=c, h=h, w=w, added=added) -> tuple[Tensor, ...]:
                x, weight = image(make, (3, c, h, w), True), make(o, c, 1, 1) / c**0.5
                return x, weight, make(o), *((image(make, (3, o, h, w), True),) if added else ())

            plain = (lambda x, w, b: F.relu(F.conv2d(x, w, b)), lambda x, w, b: F.silu(F.conv2d(x, w, b)))[k % 2]
            sum_of = lambda x, w, b, r: F.relu(F.conv2d(x, w, b) + r)  # noqa: E731
            found[f"{o}x{c}x{h}x{w}{' added' if added else ''}"] = sum_of if added else plain, inputs
    return found


def summed() -> dict[str, Given]:
    sums: tuple[Callable[..., Any], ...] = (
        lambda x, w, b: F.linear(x, w, b).mean(-1, keepdim=True),
        lambda x, w, b: F.linear(x, w, b).sum(-1),
        lambda x, w, b: F.linear(x, w, b).mean(-1) * 2,
    )
    sizes = (
        (64, 96, 48), (1, 1100, 33), (257, 13, 77), (1031, 331, 509), (16, 4096, 8), (4104, 264, 520), (65, 2, 1),
        (9, 97, 89), (300, 768, 3072), (3, 5001, 7), (128, 128, 128), (33, 1000, 2), (2000, 24, 301), (5, 20011, 40),
        (100, 511, 64), (70, 8, 1000), (1, 33000, 16), (512, 64, 11), (31, 2053, 257), (777, 200, 3),
    )  # fmt: skip
    return {
        f"{m}x{k}x{n}": (sums[i % 3], lambda make, m=m, k=k, n=n: (make(m, k), make.weight(n, k), make(n)))
        for i, (m, k, n) in enumerate(sizes)
    }


HALF = (torch.bfloat16, torch.float16)
CHAIN_SHAPES = (
    *chains("pointwise", "pointwise", flat()),
    *chains("pointwise crosswise", "pointwise", crosswise(), {"rows": bool}),
    *chains("pointwise turned", "pointwise", crosswise(), {"tile_rows": bool}),
    *chains("rotary", "pointwise", turned()),
    *chains("pieces", "pointwise", pieces()),
    *chains("pooling", "pooling", pooled()),
    *chains("convolution's tail", "pointwise", convolved(), constants=(1, 2), dtypes=HALF, run=True),
    *chains("1x1 convolution", "gemm_epilogue", one_by_one(), constants=(1, 2), dtypes=HALF, run=True),
    *chains("summed product", "rowwise", summed(), constants=(1, 2)),
)
