"""A vocabulary head with its cross entropy: the scores are never in memory, only a few numbers per row and tile of it.

A GEMM whose epilogue leaves for each row the largest score of its tile, the sum of exponentials less it and the score
of the row's class; then the row template puts the tiles together. That takes 8 bytes for every `BN` scores.
A class that there isn't, and that isn't the ignored one, gives NaN: eager raises on the CPU and asserts on a GPU.
"""

from fusescout.templates import gemm_epilogue
from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import Dialect
from fusescout.templates.gemm_configs import HOPPER
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_problem import Refused
from fusescout.templates.loss_finish import finish
from fusescout.templates.loss_problem import read
from fusescout.templates.loss_problem import scores_of
from fusescout.templates.loss_source import LANES
from fusescout.templates.loss_source import LossWriter
from fusescout.templates.rowwise import written
from fusescout.templates.source import build

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Config
from fusescout.template import Kernel

NAME = "linear_cross_entropy"
FAMILY = "linear_cross_entropy"

SCHEDULES = ("auto", "roles", "coop", "pingpong")
LARGEST_TILE = 256
FEWEST_ROWS = 64
"""Less than the smallest tile of the schedules whose rows lie within one warp."""
EPILOGUE_CLOCKS = 28
"""Of 128 scores: a maximum, an exponential, a sum and the comparison with the class."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if it is a linear whose scores only a cross entropy of class numbers reads."""
    try:
        problem, loss = read(graph)
    except Refused as reason:
        return f"{reason}."
    if any(o.kind not in ("row", "scalar") for o in problem.operands):
        return "An operand has a value for each row."
    if loss.out.dtype not in ("float32", *HALF):
        return f"A loss in {loss.out.dtype} is not computed here."
    if loss.rows < 2 or loss.classes <= (LANES if device.kind == "cpu" else 2 * LARGEST_TILE):
        return "There are so few scores that nothing is saved."
    if device.kind != "cpu" and problem.M < FEWEST_ROWS:
        return "There are fewer rows than its tiles have."
    if reason := gemm_epilogue.refusal(scores_of(graph), device, 1):
        return reason
    return None if configs(graph, device) else "None of the GEMM's schedules that it has an epilogue for fits."


def configs(graph: Subgraph, device: Device) -> list:
    """Those of the GEMM whose tiles' rows lie within one warp: they are reduced without shared memory.

    None in clusters: TileLang 0.1.15 launches the kernels behind the GEMM as clusters too, which their grids refuse.
    """
    problem = read(graph)[0]
    if device.kind == "cpu":
        half = -(-problem.N // 2)
        tile = min(LARGEST_TILE, -(-half // LANES) * LANES)
        return [{"schedule": "plain", "BM": 32, "BN": tile, "BK": problem.K, "stages": 1}]
    whole = device.arch in HOPPER
    found = [c for c in space(problem, device, EPILOGUE_CLOCKS) if c["schedule"] in SCHEDULES and "cluster" not in c]
    return [c for c in found if not whole or c["policy"] == "FullRow"]


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """One kernel for the scores, one for what the tiles make of each row, one for the rows where they are reduced."""
    problem, loss = read(graph)
    dialect = Dialect(device.kind, fast=device.kind == "cuda")  # its products have 16-bit factors
    tiles = -(-problem.N // config["BN"])
    behind = finish(loss, tiles)
    writer = LossWriter(problem, loss, config, dialect, behind)
    bodies = written(behind.stages, _rows_config(loss.rows, tiles), dialect)
    source = writer.source(NAME) + "\n" + "\n".join(body.replace(", prelude=PRELUDE", "") for body in bodies)
    return Kernel(build(source, NAME), writer.params(), source, writer.pass_configs())


def _rows_config(rows: int, tiles: int) -> dict:
    """As the row template chooses where rows lie side by side; 8 of them are the 32 bytes that memory gives at once."""
    threads, side_by_side = 256, 8
    least = threads // side_by_side
    steps = -(-tiles // least)
    width = least * (steps if steps <= 64 else 4)
    return {"block": 1 << 14, "threads": threads, "rows": side_by_side, "width": width, "keep": True, "vector": 1}
