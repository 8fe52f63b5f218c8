"""The row template for rows that several blocks share (`rows_in_parts.py`): configurations and text."""

import math

from fusescout.templates.dialect import Dialect
from fusescout.templates.pointwise_cuda import cuda_configs
from fusescout.templates.pointwise_cuda import cuda_text
from fusescout.templates.rows import Rows
from fusescout.templates.rows_in_parts import Shared
from fusescout.templates.rows_in_parts import lengths
from fusescout.templates.rows_in_parts import share
from fusescout.templates.rowwise_cuda import CudaRows
from fusescout.templates.rowwise_cuda import runs_across
from fusescout.templates.rowwise_cuda import side_by_side
from fusescout.templates.rowwise_cuda import vector_of
from fusescout.templates.rowwise_passes import crossing

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Config

ACROSS, ALONG = 128, 4096
"""Elements of a part that suit a block best: of many rows side by side, and of one."""
MANY, MOST, LONG = 1 << 20, 1 << 31, 1 << 16
"""Elements in all from and up to which three kernels are worth a try in place of one, and from which those of a row
that lies alone are. Beyond, addresses take 64 bits, and TileLang doesn't read in the vectors that are asked for."""


def configs(graph: Subgraph, rows: Rows, device: Device) -> list[Config]:
    """Lengths of parts and ways of the rest, best guess first; none where whole rows do as well.

    Args:
        graph: the chain.
        rows: as a block would have it that takes whole rows.
        device: its multiprocessors count.
    """
    alone = rows.rows >= 2 * device.cores or rows.columns < LONG
    if not MANY <= rows.rows * rows.columns < MOST or not rows.reductions:
        return []
    found, beside = lengths(graph)
    if not found or (alone and not beside):
        return []
    found.sort(key=lambda n: abs(math.log(n / (ACROSS if beside else ALONG))))
    rest = share(graph, found[0]).rest
    ways = [{f"last_{k}": v for k, v in way.items()} for way in cuda_configs(rest[1], device)[:2]] if rest else [{}]
    return [{"part": found[0], **way} for way in ways] + [{"part": n, **ways[0]} for n in found[1:2]]


def bodies(shared: Shared, config: Config, dialect: Dialect) -> list[str]:
    """Source of each kernel."""
    texts = [_reduced(stage, dialect) for stage in (shared.sums, shared.rows)]
    if shared.rest is not None:
        way = {k.removeprefix("last_"): v for k, v in config.items() if k.startswith("last_")}
        texts.append(cuda_text(*shared.rest, way, dialect))
    return texts


def _reduced(stage: Rows, dialect: Dialect) -> str:
    return CudaRows(stage, crossing(stage), dialect, tile(stage)).body()


def tile(stage: Rows) -> Config:
    """A block's rows and columns: neighbouring rows together where they lie side by side, in vectors where they can."""
    space = stage.space
    vector = vector_of(space)
    if not runs_across(space):
        threads = 256 if stage.columns > 1024 else 128
        width = -(-stage.columns // (threads * vector)) * threads * vector
        return {"threads": threads, "width": width, "rows": 1, "keep": True}
    threads, rows = 256, 64
    while rows > stage.rows or (rows > 8 and stage.rows % rows):
        rows //= 2
    free = not any(space.per_row(o) for o in space.inputs) and side_by_side(space) % rows == 0 and rows >= vector
    taken = vector if free else 1
    least = max(1, threads * taken // rows)
    return {
        "threads": threads,
        "width": least * -(-stage.columns // least),
        "rows": rows,
        "keep": True,
        "vector": taken,
    }
