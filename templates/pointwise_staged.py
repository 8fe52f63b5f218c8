"""Pointwise chains whose operands lie in different orders, turned in shared memory: whole lines of memory either way.

A block has a tile of rows and columns. Crosswise operands come and go along the rows, all others along the columns, in
vectors and with lanes side by side; what is crosswise is handed over in shared memory, whose pitch is one element more
than the rows. Patches of a warp (`pointwise_tiles.py`) do without, but ask for lines in pieces of a sector: on an H200,
1 GB of float32 took them 662 us from channels-last to channels-first memory, and Inductor 522.
"""

import math
from collections.abc import Callable

from fusescout.templates.body import Cells
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.dialect import Dialect
from fusescout.templates.pointwise_tiles import VECTOR_BYTES
from fusescout.templates.pointwise_tiles import Patch
from fusescout.templates.pointwise_tiles import own
from fusescout.templates.space import Operand

from fusescout.ir import DTYPE_BYTES
from fusescout.template import Config

SHARED_BYTES = 48 * 1024
"""Four blocks on a multiprocessor at least."""
PAD = 1


def configs(found: Patch) -> list[Config]:
    """Threads of a block, rows and columns of its tile, best guess first."""
    made = []
    for threads, rows, columns in ((256, 64, 64), (256, 32, 64), (128, 32, 32)):
        waste = _waste(found.rows, rows) * _waste(found.columns, columns)
        if _shared_bytes(found, rows, columns) <= SHARED_BYTES:
            made.append((waste, {"threads": threads, "tile_rows": rows, "tile_columns": columns}))
    made.sort(key=lambda m: m[0] > 1.25)
    return [config for _, config in made[:2]]


def _waste(size: int, tile: int) -> float:
    return -(-size // tile) * tile / size


def _shared_bytes(found: Patch, rows: int, columns: int) -> int:
    turned = [o for o in found.space.operands if found.is_crosswise(o)]
    return sum(columns * (rows + PAD) * DTYPE_BYTES[o.dtype] for o in turned)


def staged(
    found: Patch, parameters: tuple, config: Config, dialect: Dialect, chain: Callable[[dict, Cells], list]
) -> str:
    """Text of the kernel's body; `chain` gives the lines of one element from the names of its operands' elements."""
    return _Staged(found, config, dialect).body(parameters, chain)


class _Staged:
    """The text: crosswise inputs into shared memory, the chain, crosswise outputs out of it."""

    def __init__(self, found: Patch, config: Config, dialect: Dialect) -> None:
        self.found, self.space, self.dialect = found, found.space, dialect
        self.threads, self.rows, self.columns = config["threads"], config["tile_rows"], config["tile_columns"]
        self.each = self.rows * self.columns // self.threads
        self.across, self.along = -(-found.rows // self.rows), -(-found.columns // self.columns)
        self.held = [o for o in self.space.operands if not o.is_scalar]

    def body(self, parameters: tuple, chain: Callable[[dict, Cells], list]) -> str:
        turned = {o.name for o in self.held if self.found.is_crosswise(o)}
        vector = math.gcd(self.found.vector, self.each, self.columns)
        steps = self.each // vector
        row, col = self._spot("i", vector)
        elements = {o.name: f"{o.name}_r[i, v]" for o in self.held} | {t: f"{t}_s[{col} + v, {row}]" for t in turned}
        elements |= {o.name: f"{o.buffer}[{o.offset}]" for o in self.space.operands if o.is_scalar}
        cells = Cells("k", (1,), "0", self.dialect)
        values = chain(elements, cells)
        come = [o for o in self.space.inputs if o.name in turned]
        go = [o for o in self.space.outputs if o.name in turned]
        straight = [o for o in self.held if o.name not in turned]
        lines = [
            "tx = T.get_thread_binding()",
            f"top, left = bx % {self.across} * {self.rows}, bx // {self.across} % {self.along} * {self.columns}",
            f"batch = bx // {self.across * self.along}",
            *(f"{o.name}_s = {self._shared(o)}" for o in (*come, *go)),
            *(f"{o.name}_r = {own(self._shape(o), buffer_dtype(o, self.dialect))}" for o in (*come, *go)),
            *(f"{o.name}_r = {own((steps, vector), buffer_dtype(o, self.dialect))}" for o in straight),
            *cells.lines(own),
        ]
        lines += [line for o in come for line in self._load(o, self._across(o), "k", True)]
        lines += [line for o in come for line in self._hand_over(o, "{s} = {r}")]
        lines += [line for o in straight if o.role != "output" for line in self._load(o, vector, "i", False)]
        lines += ["T.sync_threads()"] if come else []
        lines += [
            f"for i in T.unroll({steps}):",
            f"    for v in T.unroll({vector}):",
            *(f"        {b}" for b in values),
        ]
        lines += [line for o in straight if o.role == "output" for line in self._store(o, vector, "i", False)]
        lines += ["T.sync_threads()"] if go else []
        lines += [line for o in go for line in self._hand_over(o, "{r} = {s}")]
        lines += [line for o in go for line in self._store(o, self._across(o), "k", True)]
        blocks = math.prod(self.space.sizes[k] for k in self.found.outer) * self.across * self.along
        launch = f"with {self.dialect.kernel(blocks, threads=self.threads)} as bx:"
        return indent([launch], 1) + indent(flat(parameters, self.dialect), 2) + indent(lines, 2)

    # -- tiles
    def _shared(self, o: Operand) -> str:
        return self.dialect.stage((self.columns, self.rows + PAD), buffer_dtype(o, self.dialect))

    def _across(self, o: Operand) -> int:
        """Elements of a lane's vector along the rows."""
        return math.gcd(min(VECTOR_BYTES // DTYPE_BYTES[o.dtype], self.each), self.found.rows, self.rows)

    def _shape(self, o: Operand) -> tuple:
        vector = self._across(o)
        return (self.each // vector, vector)

    # -- places
    def _spot(self, step: str, vector: int, turned: bool = False) -> tuple:
        """Row and column in the tile at which a thread's vector begins."""
        number, beside = f"({step} * {self.threads} + tx)", (self.rows if turned else self.columns) // vector
        along, other = f"{number} % {beside} * {vector}", f"{number} // {beside}"
        return (along, other) if turned else (other, along)

    def _loop(self, o: Operand, vector: int, turned: bool) -> tuple:
        """The loop over a vector, and what a step of it adds to the address."""
        axis = self.found.across[-1] if turned else len(o.strides) - 1
        wide = self.found.is_wide(o, vector, turned)
        step = f" + v * {o.strides[axis]}" if o.strides[axis] else ""
        return f"for v in T.{'vectorized' if wide else 'unroll'}({vector}):", step

    # -- moves
    def _load(self, o: Operand, vector: int, step: str, turned: bool) -> list:
        """An input's vectors; behind the last row and column there are those in front of it."""
        row, col = self._spot(step, vector, turned)
        last = (self.found.rows - (vector if turned else 1), self.found.columns - (1 if turned else vector))
        ragged, cut = self._ends()
        row = f"T.min(top + {row}, {last[0]})" if ragged else f"top + {row}"
        col = f"T.min(left + {col}, {last[1]})" if cut else f"left + {col}"
        loop, more = self._loop(o, vector, turned)
        at = f"{o.buffer}[{self.found.offset(o, 'batch', row, col)}{more}]"
        return [
            f"for {step} in T.unroll({self.each // vector}):",
            f"    {loop}",
            f"        {o.name}_r[{step}, v] = {at}",
        ]

    def _hand_over(self, o: Operand, move: str) -> list:
        """Between a thread's vectors along the rows and shared memory."""
        vector = self._across(o)
        row, col = self._spot("k", vector, True)
        text = move.format(s=f"{o.name}_s[{col}, {row} + v]", r=f"{o.name}_r[k, v]")
        return [f"for k in T.unroll({self.each // vector}):", f"    for v in T.unroll({vector}):", f"        {text}"]

    def _store(self, o: Operand, vector: int, step: str, turned: bool) -> list:
        row, col = (
            f"{start} + {spot}" for start, spot in zip(("top", "left"), self._spot(step, vector, turned), strict=True)
        )
        ragged, cut = self._ends()
        inside = [f"{row} < {self.found.rows}"] * ragged + [f"{col} < {self.found.columns}"] * cut
        loop, more = self._loop(o, vector, turned)
        deeper = "    " * (1 + bool(inside))
        return [
            f"for {step} in T.unroll({self.each // vector}):",
            *([f"    if {' and '.join(inside)}:"] if inside else []),
            f"{deeper}{loop}",
            f"{deeper}    {o.buffer}[{self.found.offset(o, 'batch', row, col)}{more}] = {o.name}_r[{step}, v]",
        ]

    def _ends(self) -> tuple:
        """Whether rows, and columns, end within a tile."""
        return self.found.rows % self.rows != 0, self.found.columns % self.columns != 0
