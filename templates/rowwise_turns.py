"""Rows that fit into registers, one after the other, on CUDA.

As many blocks as the device runs at once go over all rows; each asks for its next row before it computes this one, so
that bytes are under way all the time, and a block is started once.
"""

from fusescout.templates.body import indent
from fusescout.templates.rowwise_cuda import CudaRows
from fusescout.templates.rowwise_spans import Span


class Turns(CudaRows):
    """Block `bx` takes rows bx, bx + grid, …: `turns` of them. What all rows share is loaded where it is used."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.grid = self.config["grid"]
        self.slant = None  # it would be another one for each turn
        self.turns = -(-self.rows.rows // (self.grid * self.count))
        self.row = self._row("turn", self.grid * self.turns * self.count == self.rows.rows)
        self.launch = f"with {self.dialect.kernel(self.grid, threads=self.config['threads'])} as bx:"
        self.cut = len(self.space.sizes) - self.space.depth

    def _row(self, turn: str, exact: bool = False) -> str:
        row = f"(bx + ({turn}) * {self.grid}) * {self.count} + i"
        return row if exact else f"T.min({row}, {self.rows.rows - 1})"

    def _ahead(self) -> list:
        return []

    def _moving(self) -> list:
        """Inputs that each row has its own of."""
        return [o for o in self.full_inputs() if o.name in self.staged and any(o.strides[: self.cut])]

    def _load(self, o, span: Span) -> list:
        return [] if o in self._moving() else super()._load(o, span)

    def _pass(self, level: int, known: dict) -> list:
        return self._step(level, known, self._whole_span(), load=True) if self._has_work(level) else []

    def _next(self, turn: str) -> list:
        """Lines that ask for a turn's row."""
        here, self.row = self.row, self._row(turn)
        loads = [(o, self._global(o, self._whole_span())) for o in self._moving()]
        self.row = here
        return [line for o, text in loads for line in (self.loop, f"    {o.name}_n[{self.place}] = {text}")]

    def _input_tiles(self) -> list:
        tiles = super()._input_tiles()
        moving = {self._staged(o): f"{o.name}_n" for o in self._moving()}
        return [*tiles, *((moving[name], shape, dtype) for name, shape, dtype in tiles if name in moving)]

    def _frame(self, start: list, lines: list) -> str:
        taken = [
            line
            for o in self._moving()
            for line in (self.loop, f"    {o.name}_r[{self.place}] = {o.name}_n[{self.place}]")
        ]
        turn = [*taken, *self._next("turn + 1"), *lines]
        before = [*start, *self._next("0"), f"for turn in T.serial({self.turns}):"]
        return indent([self.launch], 1) + indent(before, 2) + indent(turn, 3)
