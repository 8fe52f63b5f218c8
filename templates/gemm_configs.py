"""The search space of the GEMM templates: schedules and tiles, ordered by a cost model of one Hopper multiprocessor."""

import math

from fusescout.templates import gemm_small as small
from fusescout.templates.dialect import E4M3
from fusescout.templates.gemm_problem import Problem

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES

HOPPER = ("sm_90", "sm_90a")
SHARED_BYTES = 227 * 1024
MMA_PER_CLOCK = 2048
"""16-bit multiply-adds per clock of one multiprocessor's tensor cores."""
COSTLY = {
    "gelu": 18,
    "silu": 14,
    "sigmoid": 13,
    "tanh": 20,
    "exp": 12,
    "erf": 28,
    "softplus": 30,
    "mish": 40,
    "div": 8,
    "pow": 30,
}
"""Clocks for 128 elements of an epilogue operator; one that is not listed takes about two."""
SHORT = 64
"""Steps along K for which the copy engine isn't missed."""
PROMOTED = 128
"""Terms of 8 bits that the tensor cores may add up by themselves where their sums are promoted."""
MANY = 4096
"""Rows from which on a tile of a width of its own is worth another kernel."""

# schedule, BM, BN, BK, stages, extra. Shared memory decides what fits; the cost model what comes first.
WARP_SPECIALISED = (
    ("pingpong", 128, 128, 64, 4, {}),
    ("pingpong", 64, 256, 64, 4, {}),
    ("pingpong", 128, 128, 64, 3, {}),
    ("pingpong", 64, 128, 64, 6, {}),
    ("pingpong", 64, 192, 64, 5, {}),
    ("pingpong", 128, 64, 64, 6, {}),
    ("pingpong", 64, 64, 64, 8, {}),
    ("coop", 128, 256, 64, 3, {}),
    ("coop", 128, 256, 64, 3, {"cluster": 2}),
    ("pingpong", 128, 128, 64, 4, {"cluster": 2}),
    ("coop", 256, 128, 64, 3, {}),
    ("coop", 128, 192, 64, 4, {}),
    ("coop", 128, 128, 64, 5, {}),
    ("coop", 128, 64, 64, 6, {}),
    ("roles", 128, 128, 64, 2, {"threads": 128, "ctas": 2}),
    ("roles", 128, 128, 64, 4, {}),
    ("roles", 128, 256, 64, 3, {}),
    ("auto", 128, 128, 64, 2, {"threads": 128, "ctas": 2, "swizzle": 8}),
    ("auto", 64, 128, 64, 3, {"threads": 128, "ctas": 2, "swizzle": 8}),
    ("auto", 64, 64, 64, 5, {"threads": 128, "ctas": 2, "swizzle": 8}),
    ("auto", 128, 256, 64, 3, {"swizzle": 8}),
    ("auto", 128, 128, 64, 4, {"swizzle": 8}),
    ("auto", 64, 128, 64, 4, {"threads": 128, "swizzle": 8}),
    ("auto", 64, 64, 128, 4, {"threads": 128}),
)
GENERIC = tuple(
    ("auto", bm, bn, 32, stages, {"threads": 128, "policy": "Square"})
    for bm, bn, stages in ((128, 128, 3), (128, 64, 3), (64, 64, 4))
)
FEW_ROWS = tuple(
    ("auto", bm, bn, bk, stages, {"threads": 128, "policy": "FullCol"})
    for bn, bk, stages in ((32, 256, 4), (32, 128, 6), (64, 128, 5), (64, 256, 3), (32, 64, 8), (128, 64, 5))
    for bm in (16, 32, 64)
)

# Share of the tensor cores' rate that a schedule's main loop is taken to reach, for a deep K. A guess that only orders
# configs: which one runs is measured.
EFFICIENCY = {"pingpong": 0.9, "coop": 0.9, "roles": 0.82, "auto": 0.75}


def space(problem: Problem, device: Device, more: int = 0) -> list:
    """All configs that fit, best guess first; `more` clocks are what 128 elements take beside the epilogue's ops."""
    if device.kind == "cpu":
        return [_config(("plain", 32, min(problem.N, 256), problem.K, 1, {}), device)]
    found: list = small.vectors(problem)
    if not small.copied(problem):
        return sorted(found, key=lambda c: clocks(problem, c, device))
    if device.arch in HOPPER:
        found += [c for c in small.splits(problem, device) if not problem.promoted or c["BK"] <= PROMOTED]
    rows = FEW_ROWS if problem.M <= small.FEW else ()
    shapes = rows + (WARP_SPECIALISED + _of_a_width(problem) if device.arch in HOPPER else GENERIC)
    for shape in map(_of_8_bits, shapes) if problem.x.dtype == E4M3 else shapes:
        config = _config(shape, device)
        while config["stages"] > (3 if _by_hand(config) else 2) and not _fits(problem, config):
            config["stages"] -= 1
        if _fits(problem, config) and config not in found:
            found.append(config)
    found.sort(key=lambda c: clocks(problem, c, device, more))
    return small.varied(found) if any(c["schedule"] in ("vector", "split") for c in found) else found


def single_steps(p: Problem, device: Device) -> list:
    """Configs with one short step along K, whose operands each thread loads by itself, however they lie."""
    deep = math.ceil(p.K / 16) * 16
    if deep > SHORT:
        return []
    shapes = ((128, 128, 256), (128, 64, 128), (64, 128, 128), (64, 64, 128))
    found = [_config(("auto", bm, bn, deep, 1, {"threads": threads}), device) for bm, bn, threads in shapes]
    return sorted(found, key=lambda c: clocks(p, c, device))


def _of_a_width(p: Problem) -> tuple:
    """Tiles as wide as the columns allow, where all other ones leave more than a tenth of many rows' work unused."""
    if p.M * math.prod(p.batch) < MANY or p.N <= 64:
        return ()
    waste = min(math.ceil(p.N / bn) * bn / p.N for bn in {bn for _, _, bn, *_ in WARP_SPECIALISED})
    width = math.ceil(p.N / math.ceil(p.N / 256) / 16) * 16
    shapes = (("coop", 128, width, 64, 4, {}), ("pingpong", 64, width, 64, 5, {}))
    return shapes if waste > 1.1 and width % 64 else ()


def _of_8_bits(shape: tuple) -> tuple:
    """A tile of the same bytes along K."""
    schedule, bm, bn, bk, *rest = shape
    return (schedule, bm, bn, bk * 2, *rest)


def _config(shape: tuple, device: Device) -> dict:
    schedule, bm, bn, bk, stages, extra = shape
    config = {
        "schedule": schedule,
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "stages": stages,
        "threads": 256,
        "policy": "FullRow",
        **extra,
    }
    if schedule in ("roles", "coop", "pingpong"):
        cluster = config.get("cluster", 1)
        config["grid"] = max(device.cores // cluster * cluster, cluster) * config.get("ctas", 1)
        config["group"] = 8
    return config


def _by_hand(config: dict) -> bool:
    return config["schedule"] in ("coop", "pingpong")


def _fits(p: Problem, c: dict) -> bool:
    gemms, outputs = len(p.weights), len(p.outputs)
    loads = c["stages"] * (c["BM"] + gemms * c["BN"]) * c["BK"] * DTYPE_BYTES[p.x.dtype]
    buffers = 2 if c["schedule"] == "pingpong" else 0 if c["schedule"] == "auto" else 1
    shared = loads + buffers * c["BM"] * c["BN"] * 2
    warpgroups = 1 if c["schedule"] == "pingpong" else c["threads"] // 128
    sums = c["BM"] * c["BN"] * gemms // (128 * warpgroups)
    registers = sums * (1 + p.promoted) + c["BM"] * c["BN"] * (outputs - 1) // (2 * 128 * warpgroups)
    if p.promoted and (c["BK"] != PROMOTED or c["schedule"] == "roles" or sums > 64):
        return False  # with more sums, and a step's beside them, a residual's epilogue spills
    if c["schedule"] == "roles" and c["BK"] >= p.K:
        return False  # a pipelined loop of one trip
    if p.M <= small.FEW and c["BM"] > 16 and c["BM"] // 2 >= p.M:
        return False  # a smaller tile does
    if c.get("cluster", 1) * c["BM"] >= p.M + c["BM"] or (p.batch and "cluster" in c):
        return False  # a cluster would have nothing to share
    return shared * c.get("ctas", 1) + 1024 <= SHARED_BYTES and sums <= 128 and registers <= 192


def clocks(p: Problem, c: dict, device: Device, more: int = 0) -> float:
    """Clocks the kernel is expected to take; only the order of configs rests on it."""
    if p.M <= small.FEW or c["schedule"] == "split":
        return small.clocks(p, c, device)
    sms, gemms = max(device.cores, 1), len(p.weights)
    pair = c["BM"] * c.get("cluster", 1)
    tiles = math.ceil(p.M / pair) * c.get("cluster", 1) * math.ceil(p.N / c["BN"]) * math.prod(p.batch)
    elements = c["BM"] * c["BN"]
    steps = math.ceil(p.K / c["BK"])
    # A tile of m x n loads (m + n) per step for m * n products: below 128 x 128 the level-2 cache is the limit.
    size = DTYPE_BYTES[p.x.dtype]
    mma = elements * gemms * c["BK"] / MMA_PER_CLOCK * size / 2
    load = (c["BM"] + gemms * c["BN"] / c.get("cluster", 1)) * c["BK"] * size / 48
    main = steps * max(mma / EFFICIENCY[c["schedule"]], load) + 600
    tail = (
        2
        + more
        + sum(COSTLY.get(p.graph.op_of(v).name, 2) for v in p.epilogue)
        + 4 * sum(o.kind not in ("row", "scalar") for o in p.operands)
    )
    tail = elements * tail / 128 + elements * 2 * len(p.outputs) / 32
    waves = math.ceil(tiles / sms)
    if c["schedule"] == "pingpong":
        return waves * max(main - 600, tail) + min(main, tail) + 600
    if c.get("ctas", 1) == 2:
        return math.ceil(tiles / (2 * sms)) * (2 * main - 600 + 0.6 * tail)
    if c["schedule"] == "roles":
        return waves * (main - 300 + 0.9 * tail)
    return waves * (main - (500 if c["schedule"] == "coop" else 0) + tail)
