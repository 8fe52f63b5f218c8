"""The pointwise template on CUDA: its configurations and text, from a graph without views and its iteration space."""

from fusescout.templates.body import Cells
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import stored
from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import emit
from fusescout.templates.pointwise_staged import configs as staged_configs
from fusescout.templates.pointwise_staged import staged
from fusescout.templates.pointwise_tiles import configs as tile_configs
from fusescout.templates.pointwise_tiles import patch
from fusescout.templates.pointwise_tiles import tiled
from fusescout.templates.space import Operand
from fusescout.templates.space import Space

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES
from fusescout.ir import Subgraph
from fusescout.template import Config


def cuda_configs(space: Space, device: Device) -> list[Config]:
    """Block sizes, best guess first."""
    widest = max(DTYPE_BYTES[o.dtype] for o in space.operands if not o.strides or o.strides[-1] or o.is_scalar)
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


def cuda_text(graph: Subgraph, space: Space, config: Config, dialect: Dialect) -> str:
    """The launch and its body."""
    if "rows" not in config and "tile_rows" not in config:
        return _flat(graph, space, config, dialect)
    found, write = patch(space), tiled if "rows" in config else staged
    return write(found, space.parameters, config, dialect, lambda e, c: chain(graph, found.space, e, dialect, c))


def chain(graph: Subgraph, space: Space, elements: dict, dialect: Dialect, cells: Cells) -> list:
    """Lines of the whole chain for one position; `elements` has each operand's buffer element."""
    lines = [f"x{o.index} = {loaded(elements[o.name], o, dialect)}" for o in space.inputs]
    values = {o.index: f"x{o.index}" for o in space.inputs}
    first = len(graph.inputs)
    more, values = emit(graph, values, dialect, range(first, first + len(graph.ops)), cells)
    results = zip(space.outputs, graph.outputs, strict=True)
    return [*lines, *more, *(f"{elements[o.name]} = {stored(values[v], o, dialect)}" for o, v in results)]


def _flat(graph: Subgraph, space: Space, config: Config, dialect: Dialect) -> str:
    """Full blocks through registers, the rest element by element."""
    block = config["threads"] * config["items"]
    full, tail = divmod(space.numel, block)
    staged = [o for o in space.operands if not o.is_scalar and o.spec.aligned]

    def at(o: Operand, position: str) -> str:
        return space.at(o, position)

    loop = f"for j in {dialect.parallel(block)}:"
    main = [f"{o.name}_r = {dialect.tile((block,), buffer_dtype(o, dialect))}" for o in staged]
    for o in staged:
        if o.role != "output":
            main += [loop, f"    {o.name}_r[j] = {at(o, f'bx * {block} + j')}"]
    elements = {o.name: f"{o.name}_r[j]" if o in staged else at(o, f"bx * {block} + j") for o in space.operands}
    cells = Cells("k", (block,), "j", dialect)
    lines = chain(graph, space, elements, dialect, cells)
    main += [*cells.lines(), loop, *("    " + line for line in lines)]
    for o in staged:
        if o.role == "output":
            main += [loop, f"    {at(o, f'bx * {block} + j')} = {o.name}_r[j]"]

    def remainder(extent: int, position: str) -> list:
        cells = Cells("rest", (extent,), "j", dialect)
        lines = chain(graph, space, {o.name: at(o, position) for o in space.operands}, dialect, cells)
        if cells.used and extent != block:  # buffers need a full block: its last threads repeat the last element
            return remainder(block, f"T.min({full * block} + j, {space.numel - 1})")
        return [*cells.lines(), f"for j in {dialect.parallel(extent)}:", *("    " + line for line in lines)]

    rest = remainder(tail, f"{full * block} + j") if tail else []
    launch = f"with {dialect.kernel(full + (tail > 0), threads=config['threads'])} as bx:"
    text = indent([launch], 1) + indent(flat(space.parameters, dialect), 2)
    if not tail:
        return text + indent(main, 2)
    if not full:
        return text + indent(rest, 2)
    return text + indent([f"if bx < {full}:"], 2) + indent(main, 3) + indent(["else:"], 2) + indent(rest, 3)
