"""Twenty shapes for each schedule of attention."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from attention_cases import attend
from attention_cases import capped
from attention_cases import repeated
from attention_cases import side_by_side
from attention_cases import windows
from attention_cases import written
from gemm_shapes import HALVES
from shape_table import Make
from shape_table import Shape
from torch import Tensor


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return side_by_side(attend(q, k, v, is_causal=True))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True, enable_gqa=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return side_by_side(attend(q, k, v, bias, scale=0.2))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q, k, v, mask)


LONG = (
    (plain, 2, 197, 197, 3, 64), (causal, 2, 129, 129, 3, 64), (masked, 1, 140, 140, 2, 64),
    (biased, 2, 256, 256, 4, 64), (written, 2, 150, 150, 3, 64), (grouped, 1, 320, 320, 8, 128),
    (capped, 1, 131, 131, 2, 96), (plain, 2, 300, 77, 4, 64), (causal, 1, 200, 200, 2, 256),
    (plain, 1, 300, 300, 2, 72), (masked, 3, 40, 211, 2, 80), (biased, 1, 17, 509, 2, 32),
    (repeated, 2, 170, 170, 4, 32), (causal, 2, 130, 200, 2, 128), (written, 1, 1031, 331, 2, 64),
    (plain, 1, 16, 4096, 1, 64), (windows, 4, 144, 144, 3, 32), (grouped, 1, 1025, 1025, 4, 64),
    (plain, 5, 512, 512, 1, 128), (causal, 1, 997, 997, 3, 80),
)  # fmt: skip
"""Function, batch, queries, keys, heads and their width."""
SHORT = (
    (plain, 2, 197, 197, 3, 64), (causal, 2, 77, 77, 3, 64), (masked, 1, 140, 140, 2, 64),
    (biased, 2, 197, 197, 4, 64), (written, 2, 150, 150, 3, 64), (grouped, 1, 127, 127, 8, 64),
    (capped, 1, 66, 66, 2, 96), (plain, 2, 300, 77, 4, 64), (windows, 4, 49, 49, 3, 32), (plain, 1, 300, 13, 2, 72),
    (masked, 3, 40, 70, 2, 80), (biased, 1, 17, 101, 2, 32), (repeated, 2, 70, 70, 4, 32),
    (causal, 2, 130, 128, 2, 64), (written, 1, 1031, 31, 2, 64), (plain, 1, 16, 2, 1, 64),
    (windows, 8, 64, 64, 3, 32), (grouped, 3, 50, 50, 4, 16), (plain, 5, 512, 64, 1, 128), (causal, 1, 97, 97, 3, 40),
)  # fmt: skip
"""As above; all keys of a row fit one tile."""


def shapes(schedule: str, table: tuple[Any, ...]) -> Iterator[Shape]:
    """The stream also with two blocks on a multiprocessor, where they fit."""
    for number, (dtype, (function, batch, rows, keys, count, width)) in enumerate(zip(cycle(HALVES), table)):
        wants: dict[str, Any] = {"schedule": schedule}
        width = min(width, 128) if schedule == "ahead" else width
        if schedule == "stream":
            wants["ctas"] = 2 if number % 2 and width <= 64 else None
        name = f"attention {schedule}-{function.__name__}-{batch}x{rows}x{keys}x{count}x{width}"
        given = _inputs(function, batch, rows, keys, count, width)
        yield Shape(name, "attention", function, given, wants, (), dtype, (f"attention {schedule}",), True)


def _inputs(
    function: Callable[..., Any], batch: int, rows: int, keys: int, count: int, width: int
) -> Callable[[Make], tuple[Tensor, ...]]:
    few = count // 2 if function in (grouped, repeated) else count

    def inputs(make: Make) -> tuple[Tensor, ...]:
        q, k, v = (make(batch, n, h, width).transpose(1, 2) for n, h in ((rows, count), (keys, few), (keys, few)))
        if function is masked:
            return q, k, v, make.mask(rows, keys)
        if function is capped:
            return q, k, v, make.mask(rows, keys)
        if function is biased:
            return q, k, v, make(1, count, rows, keys)
        if function is written:
            return q, k, v, make(batch, 1, 1, keys)
        if function is windows:
            return q, k, v, make(count, rows, keys), make(batch // 2, rows, keys)
        return q, k, v

    return inputs


ATTENTION = (*shapes("ahead", LONG), *shapes("stream", LONG), *shapes("whole", SHORT))
