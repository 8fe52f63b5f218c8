"""Twenty shapes for each way in which rows are reduced, of norms, softmaxes, losses and sums."""

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

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (h := x + r), F.rms_norm(h, x.shape[-1:], w, 1e-6)


def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    return (x * 0.5).softmax(-1)


def masked_softmax(x: Tensor, m: Tensor) -> Tensor:
    return (x * 0.125).masked_fill(m, float("-inf")).softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def logsumexp(x: Tensor) -> Tensor:
    return F.leaky_relu(x.logsumexp(-1))


def total(x: Tensor) -> Tensor:
    return x.sum(-1) * 2


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(-1, keepdim=True), x - x.amin(-1, keepdim=True)


def deviation(x: Tensor) -> Tensor:
    return x.std(-1, keepdim=True) * x


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), t)


def losses(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, reduction="none", label_smoothing=0.1)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, w, b))


def classes_softmax(x: Tensor) -> Tensor:
    return (x * 2).softmax(1)


def classes_norm(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def classes_mean(x: Tensor) -> Tensor:
    return torch.tanh(x.mean(1))


def classes_loss(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t)


ROWS = (
    layer_norm,
    softmax,
    cross_entropy,
    total,
    add_rms_norm,
    log_softmax,
    losses,
    extremes,
    llama_norm,
    masked_softmax,
)
WALKS = (layer_norm, llama_norm, extremes, total, deviation, logsumexp)
STRIPS = (softmax, log_softmax, cross_entropy, masked_softmax)
ACROSS = (classes_softmax, classes_norm, classes_mean, classes_loss)


def sizes_of(function: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[[Make], tuple[Tensor, ...]]:
    """The inputs that a function takes beside a tensor of these sizes."""

    def inputs(make: Make) -> tuple[Tensor, ...]:
        n, c = sizes[-1], sizes[1] if len(sizes) > 1 else 1
        x = make(*sizes)
        more = {
            layer_norm: lambda: (make(n), make(n)),
            add_rms_norm: lambda: (make(*sizes), make(n)),
            llama_norm: lambda: (make(n),),
            masked_softmax: lambda: (make.mask(*sizes[:-1], n),),
            cross_entropy: lambda: (make.classes(n, sizes[0]),),
            losses: lambda: (make.classes(n, sizes[0]),),
            group_norm: lambda: (make(c), make(c)),
            classes_loss: lambda: (make.classes(c, sizes[0], *sizes[2:]),),
        }
        return x, *more.get(function, tuple)()

    return inputs


def rows(
    group: str, wants: dict[str, Any], functions: tuple[Callable[..., Any], ...], table: tuple[tuple[int, ...], ...]
) -> Iterator[Shape]:
    """The functions in turn, each on the next sizes."""
    for dtype, function, sizes in zip(cycle(DTYPES), cycle(functions), table):
        name = f"{group}-{'x'.join(map(str, sizes))}-{function.__name__}-{str(dtype)[6:]}"
        yield Shape(name, "rowwise", function, sizes_of(function, sizes), wants, (), dtype, (group,))


REGISTERS = (
    (37, 200), (67, 768), (19, 301), (265, 66), (9, 130), (5, 3001), (300, 301), (9, 133), (130, 129), (1, 1021),
    (130, 1000), (1, 4096), (127, 1031), (257, 48), (64, 3072), (1024, 100), (33, 997), (7, 2053), (511, 512), (97, 89),
)  # fmt: skip
SEVERAL = (
    (37, 20), (670, 8), (190, 31), (265, 6), (9, 13), (55, 30), (300, 11), (9, 3), (130, 29), (1, 21),
    (130, 10), (1, 40), (1270, 17), (257, 4), (64, 32), (1024, 10), (33, 9), (7, 2), (511, 16), (97, 19),
)  # fmt: skip
WALKED = (
    (3, 40000), (4, 33001), (9, 50257), (2, 65536), (4, 36000), (1, 99991), (5, 33333), (3, 40961), (2, 131072),
    (7, 33024), (1, 60000), (3, 35003), (2, 70001), (16, 34816), (4, 50000), (5, 44444), (2, 48611), (1, 250007),
    (6, 38400), (3, 100003),
)  # fmt: skip
STRIPED = (
    (3, 20011), (9, 50257), (4, 32000), (2, 128256), (40, 9001), (1, 99991), (17, 8200), (5, 30522), (3, 151936),
    (2, 65537), (33, 12289), (7, 16384), (1, 250880), (64, 10007), (3, 49408), (11, 40961), (2, 20480), (5, 33333),
    (13, 28996), (1, 119547),
)  # fmt: skip
HELD = (
    (100, 20011), (9, 30257), (4, 32000), (200, 32768), (150, 9001), (1, 65521), (170, 8200), (5, 30522), (130, 24571),
    (2, 50304), (33, 12289), (140, 16384), (1, 31999), (64, 10007), (3, 49408), (11, 40961), (2, 20480), (135, 33333),
    (13, 28996), (1, 30001),
)  # fmt: skip
SHARED = (
    (100, 20016), (9, 50257), (4, 32000), (200, 32768), (150, 12001), (1, 40001), (170, 16392), (5, 30522),
    (130, 24001), (2, 50304), (33, 12289), (140, 16384), (1, 31999), (64, 18007), (3, 49408), (11, 40961), (2, 20480),
    (135, 33333), (13, 28996), (1, 45001),
)  # fmt: skip
MANY = (
    (12700, 512), (13001, 768), (14000, 248), (6007, 3000), (20011, 512), (12801, 1024), (9001, 2048), (16001, 504),
    (15000, 760), (4001, 5120), (13100, 1016), (40000, 256), (8003, 1536), (12700, 1000), (30001, 512), (5003, 4096),
    (7001, 3072), (12711, 1280), (25000, 488), (6400, 2040),
)  # fmt: skip
BESIDE = (
    (2, 19, 6, 8), (7, 33, 5), (9, 33, 40), (2, 32, 64, 64), (1, 3, 7, 11), (3, 128, 129), (2, 255, 99), (5, 2, 640),
    (4, 1000, 8), (1, 21, 256, 256), (3, 65, 77), (2, 19, 13, 17), (10, 5, 99), (6, 64, 100), (1, 400, 331),
    (8, 7, 8, 9), (2, 150, 32, 32), (3, 97, 89), (1, 11, 1021), (33, 12, 7, 9),
)  # fmt: skip
WIDE_BESIDE = (
    (2, 19, 8, 8), (7, 33, 128), (9, 33, 64), (2, 32, 64, 64), (1, 3, 16, 16), (3, 128, 256), (2, 255, 192),
    (5, 2, 640), (4, 100, 64), (1, 21, 256, 256), (3, 65, 64), (2, 19, 32, 32), (10, 5, 512), (6, 64, 128),
    (1, 400, 320), (8, 7, 8, 16), (2, 150, 32, 32), (3, 97, 128), (1, 11, 1024), (33, 12, 8, 16),
)  # fmt: skip
IMAGES = (
    (3, 12, 5, 7), (9, 64), (2, 8, 33), (1, 4, 9, 11), (2, 32, 16, 16), (8, 16, 41, 128), (3, 20, 13, 17),
    (1, 128, 7, 7), (2, 320, 32, 32), (5, 12, 1, 1), (4, 4, 64, 64), (1, 8, 5, 6, 7), (33, 128), (2, 12, 97),
    (3, 64, 31, 29), (16, 32, 8, 8), (1, 512, 16, 16), (7, 36, 11, 3), (2, 16, 100, 100), (6, 8, 3, 3),
)  # fmt: skip
ROW_SHAPES = (
    *rows("rows in registers", {"rows": 1, "keep": True, "vector": None, "grid": None}, ROWS, REGISTERS),
    *rows("several rows a block", {"rows": lambda n: n > 1, "vector": None}, ROWS, SEVERAL),
    *rows("softmax in strips", {"strip": bool, "held": None}, STRIPS, STRIPED),
    *rows("softmax held in registers", {"held": True, "stash": None}, STRIPS[:3], HELD),
    *rows("softmax kept in shared memory", {"stash": bool}, STRIPS[:3], SHARED),
    *rows("row after row", {"grid": bool}, (layer_norm, softmax, add_rms_norm, masked_softmax, llama_norm), MANY),
    *rows("walked rows", {"keep": False, "strip": None, "blocks": bool}, WALKS, WALKED),
    *rows("rows side by side", {"vector": 1}, ACROSS, BESIDE),
    *rows("rows side by side in vectors", {"vector": lambda v: (v or 0) > 1}, ACROSS[:3], WIDE_BESIDE),
    *rows("group norm", {}, (group_norm,), IMAGES),
)
