"""Search space and cost model of products whose time is that of reading the weight: few rows, or few tiles.

The model counts clocks: what the memory needs for all bytes, what the busiest multiprocessor needs for its blocks'
bytes with so many of them in flight, and the chain of dependent steps. The largest of these counts, and for few rows
a quarter of all, as they overlap badly. It only orders configs; which one runs is measured.
"""

import math

from fusescout.templates.dialect import E4M3
from fusescout.templates.dialect import NARROW
from fusescout.templates.gemm_problem import Matrix
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_vector import MOST_ROWS
from fusescout.templates.gemm_vector import SIZES
from fusescout.templates.gemm_vector import VECTOR_BYTES
from fusescout.templates.gemm_vector import vector

from fusescout.device import Device

BULK_BYTES = 16
"""The copy engine needs addresses and row pitches in multiples of this."""
FEW = 64
"""Rows up to which the weight's bytes decide."""
SHARED_BYTES = 227 * 1024
MEMORY_BYTES_PER_S, CLOCK_HZ = 4.0e12, 1.75e9
"""For a device whose ceilings have not been measured, and the clock that all but the memory runs at."""
LATENCY = 1000
"""Clocks from a load to its data: the bytes in flight in this time are what a multiprocessor can read."""
SM_BYTES = 48
"""Bytes per clock that one multiprocessor gets from the level-2 cache; two thirds of it where all wait for memory."""
JOIN = {"cluster": 1200, "memory": 3500}
"""Clocks until sums have met: two barriers of a cluster, or a second launch."""
START = 600

# Threads along K of a column (or along N of a row of a weight [K, N]), columns of a thread, steps ahead, threads.
DOTS = ((32, 4, 2, 256), (32, 2, 4, 256), (32, 2, 2, 128), (128, 4, 2, 128), (256, 4, 2, 256), (256, 2, 2, 256))
DOTS_ACROSS = ((4, 256), (4, 512), (8, 256), (2, 256))
# BN, BK, stages, threads
TILES = (
    (64, 128, 4, 128),
    (64, 128, 3, 128),
    (64, 256, 3, 128),
    (128, 128, 4, 256),
    (128, 64, 4, 256),
    (64, 64, 8, 128),
)


def copied(p: Problem) -> bool:
    """Whether the copy engine can load the operands."""
    return all(map(loadable, (p.x, *p.weights)))


def loadable(o: Matrix) -> bool:
    """Whether the copy engine can load an operand: narrow elements, rows that start at multiples of 16 bytes."""
    size = SIZES.get(o.dtype, 0)
    return o.dtype in NARROW and o.aligned and not any(s * size % BULK_BYTES for s in (o.pitch, *o.batch))


def dotted(p: Problem) -> bool:
    """Whether dot products on CUDA cores can do it: a few rows, and adjacent elements along them."""
    return p.M <= MOST_ROWS and not p.x.turned and p.x.dtype != E4M3


def vectors(p: Problem) -> list:
    """Configs of dot products on CUDA cores, for up to `MOST_ROWS` rows."""
    if not dotted(p):
        return []
    (along, beside), most = vector(p), VECTOR_BYTES // SIZES[p.x.dtype]
    found: list = []
    if p.transposed:
        shapes = [(lanes, columns, ahead, threads) for lanes, columns, ahead, threads in DOTS]
    else:
        wider = most // beside  # narrow loads: more threads side by side
        shapes = [(threads // min(n * wider, 32), beside, 1, threads) for n, threads in DOTS_ACROSS]
    for lanes, columns, ahead, threads in shapes:
        if lanes // 2 * along >= p.K and lanes > 32:
            continue  # half of the threads have nothing to do
        ahead *= min(most // max(along, beside), 4)  # narrow loads: more of them
        config = {
            "schedule": "vector", "lanes": lanes, "columns": columns, "threads": threads,
            "ahead": min(ahead, math.ceil(p.K / (lanes * along))), "BN": threads // lanes * columns,
        }  # fmt: skip
        if _registers(p, config) <= 65536 // threads - 24 and config not in found:
            found.append(config)
    return found


def splits(p: Problem, device: Device) -> list:
    """Configs that share a tile's steps along K: for few rows, or where whole tiles are fewer than multiprocessors."""
    tiles = math.ceil(p.M / 128) * math.ceil(p.N / 128) * math.prod(p.batch)
    if p.M > FEW and tiles > 0.75 * device.cores:
        return []
    bm = next((m for m in (16, 32, 64) if m >= p.M), 128)
    every = []
    for bn, bk, stages, threads in TILES:
        found = []
        for share in (1, 2, 4, 8):
            config = {
                "schedule": "split", "BM": bm, "BN": bn, "BK": bk, "stages": stages, "threads": threads,
                "splits": share, "join": "cluster",
            }  # fmt: skip
            steps = _steps(p, config)
            config["stages"] = min(stages, steps)  # a buffer that no step fills would be allocated all the same
            if steps < 2 or (share - 1) * steps >= math.ceil(p.K / bk):
                continue  # no loop to pipeline, or nothing to do for the last block
            if _shared(p, config) <= SHARED_BYTES and bm * bn * len(p.weights) // threads <= 128:
                found.append(config)
        every += sorted(found, key=lambda c: tile_clocks(p, c, device))[:2]
    every.sort(key=lambda c: tile_clocks(p, c, device))
    return every + [{**c, "join": "memory"} for c in every if c["splits"] > 1][:2]


def varied(configs: list) -> list:
    """The same order, but with no more than two configs of one schedule among the first four: the model is a guess."""
    first: list = []
    for config in configs:
        if len(first) < 4 and sum(c["schedule"] == config["schedule"] for c in first) < 2:
            first.append(config)
    return first + [c for c in configs if c not in first]


def clocks(p: Problem, c: dict, device: Device) -> float:
    """Clocks of a config for few rows or few tiles."""
    return _dot_clocks(p, c, device) if c["schedule"] == "vector" else tile_clocks(p, c, device)


def tile_clocks(p: Problem, c: dict, device: Device) -> float:
    """Clocks of a kernel with tiles of BM rows and BN columns."""
    gemms, share, steps = len(p.weights), c.get("splits", 1), _steps(p, c)
    blocks = math.ceil(p.M / c["BM"]) * math.ceil(p.N / c["BN"]) * math.prod(p.batch) * share
    resident = max(1, min(SHARED_BYTES // (_shared(p, c) + 1024), 2048 // (c["threads"] + 128)))
    if c["schedule"] != "split":  # its registers are a whole multiprocessor's
        resident = c.get("ctas", 1)
    busiest = math.ceil(blocks / max(device.cores, 1))
    stage = (c["BM"] + gemms * c["BN"]) * c["BK"] * SIZES[p.x.dtype]
    flight = min(busiest, resident) * min(c["stages"], steps) * stage
    product = c["BM"] * c["BN"] * gemms * c["BK"] / 2048
    wide = c["schedule"] == "split" or c["BM"] >= 64  # one tensor-core instruction of a whole warpgroup
    drain = 150 + c["BK"] / 16 * (20 if wide else 35)
    join = JOIN[c["join"]] if share > 1 else 0
    return join + _overlapped(
        p,
        _memory(p, device),
        busiest * steps * stage / min(_sm_bytes(p), flight / LATENCY),
        math.ceil(busiest / resident) * steps * max(drain, product),
        busiest * steps * product,
    )


def _dot_clocks(p: Problem, c: dict, device: Device) -> float:
    gemms, size, (along, beside) = len(p.weights), SIZES[p.x.dtype], vector(p)
    width = max(along, beside)
    busiest = math.ceil(math.ceil(p.N / c["BN"]) * math.prod(p.batch) / max(device.cores, 1))
    resident = max(1, min(2048 // c["threads"], 65536 // (c["threads"] * (_registers(p, c) + 8))))
    weights = c["BN"] * p.K * gemms  # elements of a block
    load = c["columns"] * gemms * along * size * c["ahead"]  # bytes a thread has in flight
    flight = min(busiest, resident) * c["threads"] * load
    inputs = c["threads"] // c["lanes"] * p.M * p.K if p.transposed else p.M * p.K
    converted = inputs + weights
    issue = (weights * p.M + converted) / 128 + p.M * c["columns"] * gemms * 10 * c["threads"] / 128
    reads = (weights + inputs) * max(size / 128, 1 / (32 * width))  # the level-1 cache: 128 bytes, or one request
    return _overlapped(
        p,
        _memory(p, device),
        busiest * weights * size / min(_sm_bytes(p), flight / LATENCY),
        busiest * issue,
        busiest * reads,
    )


def _overlapped(p: Problem, *parts: float) -> float:
    return START + max(parts) + (sum(parts) / 4 if p.M <= FEW else 0.0)


def _sm_bytes(p: Problem) -> float:
    return SM_BYTES * (2 / 3 if p.M <= FEW else 1.0)


def _memory(p: Problem, device: Device) -> float:
    """Clocks that the weights' bytes take."""
    rate = (device.copy_bytes_per_s or MEMORY_BYTES_PER_S) / CLOCK_HZ
    matrices = math.prod(n for n, s in zip(p.batch, p.w.batch, strict=True) if s)
    return len(p.weights) * p.N * p.K * matrices * SIZES[p.x.dtype] / rate


def _registers(p: Problem, c: dict) -> float:
    """Registers of a thread of dot products, roughly."""
    held = c["ahead"] * c["columns"] * vector(p)[0] * SIZES[p.x.dtype] / 4
    return 40 + 1.25 * len(p.weights) * (p.M * c["columns"] + held)


def _steps(p: Problem, c: dict) -> int:
    return math.ceil(p.K / (c["BK"] * c.get("splits", 1)))


def _shared(p: Problem, c: dict) -> int:
    gemms = len(p.weights)
    stages = c["stages"] * (c["BM"] + gemms * c["BN"]) * c["BK"] * SIZES[p.x.dtype]
    return max(stages, gemms * c["BM"] * (c["BN"] + 4) * 4)
