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
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import signature
from fusescout.templates.body import stored
from fusescout.templates.dialect import Dialect
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import compute_dtype
from fusescout.templates.expression import emit
from fusescout.templates.expression import unsupported
from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import Laid
from fusescout.templates.pieces import lay_out
from fusescout.templates.pointwise_staged import configs as staged_configs
from fusescout.templates.pointwise_staged import staged
from fusescout.templates.pointwise_tiles import configs as tile_configs
from fusescout.templates.pointwise_tiles import patch
from fusescout.templates.pointwise_tiles import tiled
from fusescout.templates.source import build
from fusescout.templates.space import Operand
from fusescout.templates.space import Space
from fusescout.templates.space import address
from fusescout.templates.space import space_of

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES
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
    widest = max(DTYPE_BYTES[o.dtype] for o in space.operands)
    natural = max(2, 16 // widest)
    found = [
        {"threads": t, "items": i}
        for t, i in (
            (256, natural),
            (128, natural),
            (256, 2 * natural),
            (512, natural),
            (128, 2 * natural),
            (256, 4 * natural),
        )
    ]
    # blocks that fill the device come first; among them the order above
    found.sort(key=lambda c: space.numel < c["threads"] * c["items"] * device.cores)
    crosswise = patch(space)
    return staged_configs(crosswise) + tile_configs(crosswise) + found if crosswise else found


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """The chain as one kernel."""
    dialect = dialect_for(device.kind, tuple(s.dtype for s in graph.output_specs))
    laid, space = _parts(graph)
    name = f"fs_pointwise_{graph.key[:10]}"
    if dialect.cpu:
        body = _cpu(laid.graph, space.collapsed(), config, dialect)
    elif "rows" in config or "tile_rows" in config:
        found, write = patch(space), tiled if "rows" in config else staged
        body = write(
            found, space.parameters, config, dialect, lambda e, c: _chain(laid.graph, found.space, e, dialect, c)
        )
    else:
        body = _cuda(laid.graph, space, config, dialect)
    text = dialect.header() + signature(name, space.parameters, dialect) + body
    return Kernel(build(text, name), tuple(o.param for o in space.parameters), text, dialect.pass_configs)


def _chain(graph: Subgraph, space: Space, elements: dict, dialect: Dialect, cells: Cells) -> list:
    """Lines of the whole chain for one position; `elements` has each operand's buffer element."""
    lines = [f"x{o.index} = {loaded(elements[o.name], o, dialect)}" for o in space.inputs]
    values = {o.index: f"x{o.index}" for o in space.inputs}
    first = len(graph.inputs)
    more, values = emit(graph, values, dialect, range(first, first + len(graph.ops)), cells)
    results = zip(space.outputs, graph.outputs, strict=True)
    return [*lines, *more, *(f"{elements[o.name]} = {stored(values[v], o, dialect)}" for o, v in results)]


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
    chain = _chain(graph, space, elements, dialect, cells)
    lines = [
        f"with {dialect.kernel(*grid)} as (bx, by):",
        *("    " + line for line in cells.lines()),
        f"    for i in T.serial({extent(rows, row_block, 'bx')}):",
        f"        for j in T.serial({extent(columns, column_block, 'by')}):",
        f"            r = bx * {row_block} + i",
    ]
    return indent(lines, 1) + indent(chain, 4)


def _cuda(graph: Subgraph, space: Space, config: Config, dialect: Dialect) -> str:
    """Full blocks through registers, the rest element by element."""
    block = config["threads"] * config["items"]
    full, tail = divmod(space.numel, block)
    staged = [o for o in space.operands if not o.is_scalar and o.spec.aligned]

    def at(o: Operand, position: str) -> str:
        return space.at(o, position)

    loop = f"for j in {dialect.parallel(block)}:"
    main = [f"{o.name}_r = {dialect.tile((block,), buffer_dtype(o, dialect))}" for o in staged]
    for o in staged:
        if o.role == "input":
            main += [loop, f"    {o.name}_r[j] = {at(o, f'bx * {block} + j')}"]
    elements = {o.name: f"{o.name}_r[j]" if o in staged else at(o, f"bx * {block} + j") for o in space.operands}
    cells = Cells("k", (block,), "j", dialect)
    chain = _chain(graph, space, elements, dialect, cells)
    main += [*cells.lines(), loop, *("    " + line for line in chain)]
    for o in staged:
        if o.role == "output":
            main += [loop, f"    {at(o, f'bx * {block} + j')} = {o.name}_r[j]"]

    def remainder(extent: int, position: str) -> list:
        cells = Cells("rest", (extent,), "j", dialect)
        chain = _chain(graph, space, {o.name: at(o, position) for o in space.operands}, dialect, cells)
        if cells.used and extent != block:  # buffers need a full block: its last threads repeat the last element
            return remainder(block, f"T.min({full * block} + j, {space.numel - 1})")
        return [*cells.lines(), f"for j in {dialect.parallel(extent)}:", *("    " + line for line in chain)]

    rest = remainder(tail, f"{full * block} + j") if tail else []
    launch = f"with {dialect.kernel(full + (tail > 0), threads=config['threads'])} as bx:"
    text = indent([launch], 1) + indent(flat(space.parameters, dialect), 2)
    if not tail:
        return text + indent(main, 2)
    if not full:
        return text + indent(rest, 2)
    return text + indent([f"if bx < {full}:"], 2) + indent(main, 3) + indent(["else:"], 2) + indent(rest, 3)
