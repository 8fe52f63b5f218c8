"""Attention in one kernel, forward: scores are never in memory, whatever is added to them, hides or caps them.

It takes `scaled_dot_product_attention` with its mask, bias, causal order and grouped heads, and what is written out by
hand. Libraries are strong where nothing is added to the scores; a bias in memory, windows of 49 or 197 tokens and
copies of repeated heads are what this is for. Which one runs is measured.
"""

from fusescout.templates.attention_problem import Problem
from fusescout.templates.attention_problem import read
from fusescout.templates.attention_source import AttentionWriter
from fusescout.templates.attention_source import bulk
from fusescout.templates.attention_source import padded
from fusescout.templates.attention_source import staged
from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import Dialect
from fusescout.templates.gemm_batch import Refused
from fusescout.templates.gemm_configs import HOPPER
from fusescout.templates.gemm_configs import SHARED_BYTES
from fusescout.templates.source import build

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES
from fusescout.ir import Subgraph
from fusescout.template import Config
from fusescout.template import Kernel

NAME = "attention"
FAMILY = "attention"

NARROWEST, WIDEST = 16, 256
FEWEST_ROWS = 16
LONGEST_WHOLE = {False: 256, True: 128}
"""Keys of a row that one tile holds; in causal order half of them are computed for nothing."""
LARGEST_ON_CPU = 1 << 23
"""Multiply-adds: there it is a scalar loop, which proves the kernel and beats no library."""

AHEAD = (
    (128, 128, 2, 256),
    (192, 128, 2, 384),
    (128, 64, 3, 256),
    (128, 176, 2, 256),
    (192, 64, 3, 384),
    (64, 128, 2, 128),
)
RATES = {"stream": 1.0, "ahead": 1.3, "whole": 1.0}
"""How well a multiprocessor is used by one warpgroup; a guess that only orders configs."""
REGISTERS = {(False, False): 208, (False, True): 176, (True, False): 132}
"""Numbers a thread can hold, by whether there are more than two warpgroups, and two blocks on a multiprocessor."""
STREAMS = (
    (128, 128, 2, 256, 1),
    (128, 64, 2, 256, 1),
    (64, 128, 2, 128, 1),
    (64, 128, 2, 128, 2),
    (64, 64, 2, 128, 2),
    (64, 64, 3, 128, 2),
    (128, 64, 3, 256, 1),
    (192, 128, 2, 384, 1),
    (64, 64, 2, 128, 1),
)
"""Queries and keys of a tile, stages, threads that compute, blocks on a multiprocessor."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if it is attention over heads of a width that tensor cores take, and of 16-bit numbers."""
    try:
        p = read(graph)
    except Refused as reason:
        return f"{reason}."
    if device.kind == "cpu":
        if p.matrices * p.rows * p.keys * (p.width + p.value_width) > LARGEST_ON_CPU:
            return "On a CPU the library's attention, which works on blocks, is the faster one by far."
        return None if p.q.dtype in ("float32", *HALF) else f"Attention in {p.q.dtype} is not computed here."
    if p.q.dtype not in HALF:
        return f"Its products need 16-bit numbers, not {p.q.dtype}."
    if any(n % 8 or not NARROWEST <= n <= WIDEST for n in (p.width, p.value_width)):
        return f"Heads of width {p.width} and {p.value_width} don't fit its tiles."
    if any(o.strides[1] != 1 for o in (p.q, p.k, p.v, p.y)):
        return "The numbers of a head don't lie side by side in memory."
    if not all(graph.inputs[o.index].aligned for o in (p.q, p.k, p.v, *p.operands)):
        return "An input doesn't begin at a multiple of 16 bytes, as copies in hardware need."
    if p.rows < FEWEST_ROWS:
        return f"There are only {p.rows} queries: the keys would be walked by a few blocks."
    if p.keys == 1:
        return "There is only one key: no tile of it can be copied, and the result is its value."
    return None if configs(graph, device) else "Its tiles need more shared memory than there is."


def configs(graph: Subgraph, device: Device) -> list[Config]:
    """Those that fit, by how much of their tiles is of use and how well tiles of that size do."""
    p = read(graph)
    if device.kind == "cpu":
        return [{"schedule": "serial"}]
    found: list = []
    if p.keys <= LONGEST_WHOLE[p.causal]:
        keys = padded(p.keys)
        found += [_config("whole", m, keys, 1, 2 * m) for m in (64, 128)]
    if p.keys > 64:
        found += [_config("stream", *shape) for shape in STREAMS]
    if p.keys > 64 and device.arch in HOPPER and all(map(bulk, (p.q, p.k, p.v))):
        found += [_config("ahead", *shape) for shape in AHEAD]
    found = sorted((c for c in found if _fits(p, c, device)), key=lambda c: _cost(p, c, device))
    firsts = list({c["schedule"]: c for c in reversed(found)}.values())  # the best of each way, whatever it is worth
    return sorted(firsts, key=found.index) + [c for c in found if c not in firsts]


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """One kernel for all of it."""
    dialect = Dialect(device.kind, fast=device.kind == "cuda")  # its products have 16-bit factors
    writer = AttentionWriter(read(graph), config, dialect)
    source = writer.source(NAME)
    return Kernel(build(source, NAME), writer.params(), source, writer.pass_configs())


def _config(schedule: str, rows: int, keys: int, stages: int, threads: int, ctas: int = 1) -> dict:
    config = {"schedule": schedule, "BM": rows, "BN": keys, "stages": stages, "threads": threads}
    return {**config, "ctas": ctas} if ctas > 1 else config


def _fits(p: Problem, c: dict, device: Device) -> bool:
    d, dv, ctas = padded(p.width), padded(p.value_width), c.get("ctas", 1)
    if ctas > 1 and device.arch not in HOPPER:
        return False
    if c["schedule"] != "whole" and c["BN"] >= p.keys:
        return False  # a pipelined loop of one trip
    per_key = (d + dv) * 2 + sum(c["BM"] * DTYPE_BYTES[o.dtype] for o in p.operands if staged(p, o))
    ends = d + dv if c["schedule"] == "ahead" else max(d, dv)  # else the result takes the place of the queries
    shared = c["BM"] * ends * 2 + c["stages"] * c["BN"] * per_key
    registers = c["BM"] * (c["BN"] * 3 // 2 + dv) // c["threads"]
    most = REGISTERS[c["threads"] > 256, ctas > 1]
    return ctas * shared + 1024 <= SHARED_BYTES and registers <= most


def _cost(p: Problem, c: dict, device: Device) -> float:
    """Only the order of configs rests on it: padded work over a guessed rate, in waves of blocks."""
    m, n, ctas = c["BM"], c["BN"], c.get("ctas", 1)
    blocks = -(-p.rows // m) * p.matrices
    beside = 4 if c["schedule"] == "whole" else ctas
    warpgroups = min(c["threads"] // 128 * beside, 3)
    rate = RATES[c["schedule"]] * warpgroups**0.5 * (1.0 if n >= 128 else 0.9)
    step = m * n * (padded(p.width) + padded(p.value_width) + 48) / rate
    waves = -(-blocks // (max(device.cores, 1) * beside)) * beside
    return waves * (-(-p.keys // n) * step + (m + n) * 512)
