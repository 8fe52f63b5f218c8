"""Pointwise chains: any number of inputs and outputs, any strides, any broadcasting, views, slices, `cat` and `stack`.

One walk over the first output's memory; pieces of a dimension that is sliced or put together are computed side by
side. On CUDA each block takes `threads * items` elements: loads into registers as wide as each operand's layout allows,
the whole chain there, wide stores; elements behind the last full block go through a loop of their own, so that no other
block tests bounds. Operands that lie crosswise are turned in shared memory
(`pointwise_staged.py`) or walked in patches (`pointwise_tiles.py`). On the CPU, rows of the
collapsed space are split over threads and the innermost loop is left to the C++ compiler's vectoriser.
"""

import math

from fusescout.templates.body import Cells
from fusescout.templates.body import indent
from fusescout.templates.body import signature
from fusescout.templates.dialect import Dialect
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import compute_dtype
from fusescout.templates.expression import unsupported
from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import Laid
from fusescout.templates.pieces import lay_out
from fusescout.templates.pointwise_cuda import chain
from fusescout.templates.pointwise_cuda import cuda_configs
from fusescout.templates.pointwise_cuda import cuda_text
from fusescout.templates.source import build
from fusescout.templates.space import Space
from fusescout.templates.space import address
from fusescout.templates.space import space_of

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Config
from fusescout.template import Kernel

NAME = "pointwise"
FAMILY = "pointwise"


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if it is pointwise but for views that `pieces.py` resolves, and its outputs have one shape."""
    try:
        for spec in graph.inputs:
            compute_dtype(spec.dtype)
        laid, _ = _parts(graph)
    except Unsupported as reason:
        return str(reason)
    return next((reason for op in laid.graph.ops if (reason := unsupported(op, laid.graph))), None)


def _parts(graph: Subgraph) -> tuple[Laid, Space]:
    laid = lay_out(graph)
    return laid, space_of(graph, laid)


def configs(graph: Subgraph, device: Device) -> list[Config]:
    """Block sizes, best guess first."""
    _, space = _parts(graph)
    if device.kind == "cpu":
        return [{"block": b} for b in (16384, 4096, 65536) if b < 4 * space.numel] or [{"block": 16384}]
    return cuda_configs(space, device)


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """The chain as one kernel."""
    dialect = dialect_for(device.kind, tuple(s.dtype for s in graph.output_specs))
    laid, space = _parts(graph)
    name = f"fs_pointwise_{graph.key[:10]}"
    if dialect.cpu:
        body = _cpu(laid.graph, space.collapsed(), config, dialect)
    else:
        body = cuda_text(laid.graph, space, config, dialect)
    text = dialect.header() + signature(name, space.parameters, dialect) + body
    return Kernel(build(text, name), tuple(o.param for o in space.parameters), text, dialect.pass_configs)


def _cpu(graph: Subgraph, space: Space, config: Config, dialect: Dialect) -> str:
    """Rows over threads; a single long row is cut into blocks."""
    outer, columns = space.sizes[:-1], space.sizes[-1] if space.sizes else 1
    rows = math.prod(outer)
    row_block = max(1, min(rows, config["block"] // columns))
    column_block = min(columns, config["block"])
    grid = (-(-rows // row_block), -(-columns // column_block))
    elements = {}
    for o in space.operands:
        inner = f"(by * {column_block} + j) * {o.strides[-1]}" if o.strides and o.strides[-1] else "0"
        start = address("r", outer, o.strides[:-1]) if outer else "0"
        elements[o.name] = f"{o.buffer}[{start} + {inner} + {o.offset}]"

    def extent(total: int, block: int, at: str) -> str:
        return str(block) if total % block == 0 else f"T.min({block}, {total} - {at} * {block})"

    cells = Cells("k", (1,), "0", dialect)
    computed = chain(graph, space, elements, dialect, cells)
    lines = [
        f"with {dialect.kernel(*grid)} as (bx, by):",
        *("    " + line for line in cells.lines()),
        f"    for i in T.serial({extent(rows, row_block, 'bx')}):",
        f"        for j in T.serial({extent(columns, column_block, 'by')}):",
        f"            r = bx * {row_block} + i",
    ]
    return indent(lines, 1) + indent(computed, 4)
