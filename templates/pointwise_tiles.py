"""Pointwise chains whose operands lie in different orders, one transposed say: each warp takes a patch of both orders.

A flat walk reads the operand that lies crosswise one element a sector. Here the lanes of a warp are a patch of rows and
columns that fills whole 32-byte sectors either way: a lane has one vector of neighbouring elements along the walk's
last dimension, and lanes side by side across it have neighbours in the other operand. Where rows are no multiple of
such a vector it is shorter, and sectors are filled by more lanes, as far as there are any.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fusescout.templates.body import Cells
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.dialect import Dialect
from fusescout.templates.space import Operand
from fusescout.templates.space import Space
from fusescout.templates.space import address

from fusescout.ir import DTYPE_BYTES
from fusescout.template import Config

SECTOR_BYTES, LINE_BYTES, VECTOR_BYTES, WARP, MOST_LANES = 32, 128, 16, 32, 8
LEAST = 16
"""Rows and columns."""


@dataclass(frozen=True)
class Patch:
    """How a warp lies over the space.

    Attributes:
        space: with neighbouring dimensions merged.
        across: the dimensions that the crosswise operands are contiguous over, outermost first; the last dimension of
            the space is the other side.
        vector: elements of a lane, along the last dimension.
        lanes: lanes of a warp along the last dimension; the others lie across it.
    """

    space: Space
    across: tuple
    vector: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.space.sizes[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.space.sizes[k] for k in self.across)

    @property
    def outer(self) -> tuple:
        """Dimensions that a patch lies outside of."""
        return tuple(k for k in range(len(self.space.sizes) - 1) if k not in self.across)

    def is_crosswise(self, o: Operand) -> bool:
        """Whether neighbours of an operand lie along the rows, and not along the columns."""
        return not o.is_scalar and o.strides[self.across[-1]] == 1 and o.strides[-1] > 1

    def is_wide(self, o: Operand, vector: int, along_rows: bool = False) -> bool:
        """Whether vectors along the columns, or the rows, are aligned wherever they begin."""
        within = self.across if along_rows else (len(o.strides) - 1,)
        steps = (*(s for k, s in enumerate(o.strides) if k not in within), o.offset)
        return vector > 1 and o.strides[within[-1]] == 1 and o.spec.aligned and all(s % vector == 0 for s in steps)

    def offset(self, o: Operand, batch: str, row: str, col: str) -> str:
        """Text of where an element lies, from that of its place outside of the patch, and of its row and column."""
        across, sizes = self.across, self.space.sizes
        terms = [
            address(batch, tuple(sizes[k] for k in self.outer), tuple(o.strides[k] for k in self.outer)),
            address(f"({row})", tuple(sizes[k] for k in across), tuple(o.strides[k] for k in across)),
            f"({col}) * {o.strides[-1]}" if o.strides[-1] else "0",
        ]
        return " + ".join([*(t for t in terms if t != "0"), str(o.offset)])


def patch(space: Space) -> Patch | None:
    """The patch for a space of which some operand lies crosswise, if there are enough rows and columns; else None."""
    space = space.collapsed()
    crosswise = [o for o in space.operands if not o.is_scalar and o.strides[-1] > 1 and 1 in o.strides]
    if not crosswise or not any(o.strides and o.strides[-1] == 1 for o in space.operands):
        return None
    innermost = max(range(len(space.sizes)), key=lambda k: sum(o.strides[k] == 1 for o in crosswise))
    across = _contiguous([o for o in crosswise if o.strides[innermost] == 1], space.sizes, innermost)
    widest = VECTOR_BYTES // max(DTYPE_BYTES[o.dtype] for o in space.operands if o.strides[-1])
    vector = math.gcd(max(widest, 2), space.sizes[-1])
    smallest = min(DTYPE_BYTES[o.dtype] for o in crosswise)
    lanes = max(WARP * smallest // SECTOR_BYTES, SECTOR_BYTES // (vector * smallest))
    found = Patch(space, across, vector, min(lanes, MOST_LANES))
    return found if min(found.columns, found.rows) >= LEAST else None


def _contiguous(operands: list, sizes: tuple, innermost: int) -> tuple:
    """The dimensions over which all these operands are contiguous together, outermost first."""
    run, count = [innermost], sizes[innermost]
    while True:
        more = [k for k in range(len(sizes) - 1) if k not in run and all(o.strides[k] == count for o in operands)]
        if not more:
            return tuple(run)
        run.insert(0, more[0])
        count *= sizes[more[0]]


def configs(found: Patch) -> list[Config]:
    """Threads of a block and rows of a thread, best guess first."""
    return [{"threads": t, "rows": r} for t, r in ((256, 2), (256, 4), (128, 4))]


def tiled(
    found: Patch, parameters: tuple, config: Config, dialect: Dialect, chain: Callable[[dict, Cells], list]
) -> str:
    """Text of the kernel's body; `chain` gives the lines of one element from the names of its operands' elements."""
    space, vector, repeats = found.space, found.vector, config["rows"]
    warps, width = config["threads"] // WARP, found.lanes * vector
    beside = _beside(found, warps, repeats)  # warps side by side along the last dimension
    step = warps // beside * (WARP // found.lanes)  # rows of a block for each row of a thread
    across, along = -(-found.rows // (step * repeats)), -(-found.columns // (beside * width))
    blocks = math.prod(space.sizes[k] for k in found.outer) * across * along
    ragged, cut = found.rows % (step * repeats) != 0, found.columns % (beside * width) != 0

    def place(o: Operand, row: str, col: str = "col") -> str:
        start = found.offset(o, "batch", row, col)
        return f"{o.buffer}[{start} + v * {o.strides[-1]}]" if o.strides[-1] else f"{o.buffer}[{start}]"

    def loop(o: Operand) -> str:
        return f"for v in T.{'vectorized' if found.is_wide(o, vector) else 'unroll'}({vector}):"

    held = [o for o in space.operands if not o.is_scalar]
    elements = {o.name: f"{o.name}_r[i, v]" if o in held else f"{o.buffer}[{o.offset}]" for o in space.operands}
    cells = Cells("k", (1,), "0", dialect)
    body = chain(elements, cells)
    row = f"first + i * {step}"
    lines = [
        "tx = T.get_thread_binding()",
        f"warp, lane = tx // {WARP}, tx % {WARP}",
        f"col = (bx % {along} * {beside} + warp % {beside}) * {width} + lane % {found.lanes} * {vector}",
        f"first = bx // {along} % {across} * {step * repeats} + warp // {beside} * {WARP // found.lanes}"
        f" + lane // {found.lanes}",
        f"batch = bx // {along * across}",
        *(f"{o.name}_r = {own((repeats, vector), buffer_dtype(o, dialect))}" for o in held),
        *cells.lines(own),
        f"for i in T.unroll({repeats}):",
    ]
    for o in space.inputs:
        if o in held:  # rows and columns behind the last ones are read from these
            clamped = f"T.min({row}, {found.rows - 1})" if ragged else row
            col = f"T.min(col, {found.columns - vector})" if cut else "col"
            lines += [f"    {loop(o)}", f"        {o.name}_r[i, v] = {place(o, clamped, col)}"]
    lines += [f"for i in T.unroll({repeats}):", f"    for v in T.unroll({vector}):", *(f"        {b}" for b in body)]
    lines.append(f"for i in T.unroll({repeats}):")
    inside = [f"{row} < {found.rows}"] * ragged + [f"col < {found.columns}"] * cut
    guard = [f"    if {' and '.join(inside)}:"] if inside else []
    for o in space.outputs:
        deeper = "    " * (1 + len(guard))
        lines += [*guard, f"{deeper}{loop(o)}", f"{deeper}    {place(o, row)} = {o.name}_r[i, v]"]
    launch = f"with {dialect.kernel(blocks, threads=config['threads'])} as bx:"
    return indent([launch], 1) + indent(flat(parameters, dialect), 2) + indent(lines, 2)


def _beside(found: Patch, warps: int, repeats: int) -> int:
    """As many as divide the columns; more where a line of memory would be shared or rows would be too few for all."""
    width = found.lanes * found.vector
    beside, rows = math.gcd(warps, -(-found.columns // width)), WARP // found.lanes * repeats
    smallest = min(DTYPE_BYTES[o.dtype] for o in found.space.operands if not o.is_scalar)
    while beside < warps and (beside * width * smallest < LINE_BYTES or warps // beside * rows > found.rows):
        beside *= 2
    return beside


def own(shape: object, dtype: str) -> str:
    """Allocation of values of one thread."""
    return f'T.alloc_local({shape}, "{dtype}")'
