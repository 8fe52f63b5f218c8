"""The row template on CUDA."""

from fusescout.templates.body import Cells
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import stored
from fusescout.templates.expression import compute_dtype
from fusescout.templates.expression import emit
from fusescout.templates.rowwise_passes import START
from fusescout.templates.rowwise_passes import Passes
from fusescout.templates.rowwise_passes import combined


class CudaRows(Passes):
    """`rows` rows of up to `width` columns per block and step; wider rows are walked in chunks, once per pass.

    Tiles are `rows` x `width` register fragments. Columns behind the row's end hold anything; they are left out of
    reductions and stores. Rows behind the last one repeat it.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.count, self.width, self.columns = self.config["rows"], self.config["width"], self.rows.columns
        self.whole = self.width >= self.columns
        if not self.whole:
            self.crossing = []
        self.loop = f"for i, j in {self.dialect.parallel(self.count, self.width)}:"
        self.staged = {o.name for o in self.full_inputs() if o.spec.aligned}
        blocks = -(-self.rows.rows // self.count)
        exact = self.rows.rows % self.count == 0
        self.row = f"bx * {self.count} + i" if exact else f"T.min(bx * {self.count} + i, {self.rows.rows - 1})"
        self.launch = f"with {self.dialect.kernel(blocks, threads=self.config['threads'])} as bx:"

    def body(self) -> str:
        self.cells = Cells("k", (self.count, self.width), "i, j", self.dialect)
        lines: list = []
        if self.whole:
            for o in self.full_inputs():
                lines += self._load(o, "j", self.width != self.columns)
        known: dict = {}
        for level in range(self.rows.last_level + 1):
            lines += self._row_stage(level, known)
            lines += self._pass(level, known) if self.whole else self._walk(level, known)
            for r in self.reductions(level):
                lines.append(f"T.reduce_{r.kind}(t{r.value}, s{r.value}, dim=1)")
            known |= {v: self._get(v, f"c{v}[i, j]") for v in self.crossing if self.rows.levels[v] == level}
        start = [*flat(self.space.operands, self.dialect), *self._tiles(), *self.cells.lines()]
        return indent([self.launch], 1) + indent([*start, *lines], 2)

    # -- tiles
    def _tiles(self) -> list:
        tile, line = (self.count, self.width), (self.count,)
        make = [
            (f"{o.name}_r", tile, buffer_dtype(o, self.dialect)) for o in self.full_inputs() if o.name in self.staged
        ]
        full = [o for level in range(self.rows.last_level + 1) for o, _ in self.outputs(level, per_row=False)]
        make += [(f"{o.name}_r", tile, buffer_dtype(o, self.dialect)) for o in full]
        make += [(f"t{r}", tile, "float32") for r in self.rows.reductions]
        make += [(f"s{r}", line, "float32") for r in self.rows.reductions]
        make += [(f"c{v}", tile, self._dtype(v)) for v in self.crossing]
        for level in range(self.rows.last_level + 1):
            make += [(f"w{v}", line, self._dtype(v)) for v in self.row_ops(level)]
        make += [(f"w{o.index}", line, self._dtype(o.index)) for o in self.row_inputs()]
        return [f"{name} = {self.dialect.tile(shape, dtype)}" for name, shape, dtype in make]

    def _dtype(self, value: int) -> str:
        dtype = compute_dtype(self.graph.tensor(value).dtype)
        return "uint8" if dtype == "bool" else dtype

    def _get(self, value: int, element: str) -> str:
        return f"T.NE({element}, T.uint8(0))" if self.graph.tensor(value).dtype == "bool" else element

    def _put(self, value: int, text: str) -> str:
        return f'T.cast({text}, "uint8")' if self.graph.tensor(value).dtype == "bool" else text

    # -- steps
    def _row_stage(self, level: int, known: dict) -> list:
        """Per-row values of `level`."""
        inputs = self.row_inputs() if level == 0 else []
        for r in self.reductions(level - 1):
            known[r.value] = f"s{r.value}[i]"
        lines, values = [], dict(known)
        for o in inputs:
            lines.append(
                f"x{o.index} = {loaded(f'{o.name}[{self.space.offset(o, self.row, chr(48))}]', o, self.dialect)}"
            )
            values[o.index] = f"x{o.index}"
        ops = self.row_ops(level)
        more, values = emit(self.graph, values, self.dialect, ops)
        lines += more
        for v in (*(o.index for o in inputs), *ops):
            lines.append(f"w{v}[i] = {self._put(v, values[v])}")
            known[v] = self._get(v, f"w{v}[i]")
        for o, v in self.outputs(level, per_row=True):
            lines.append(f"{o.name}[{self.space.offset(o, self.row, '0')}] = {stored(values[v], o, self.dialect)}")
        return [f"for i in {self.dialect.parallel(self.count)}:", *("    " + line for line in lines)] if lines else []

    def _load(self, o, column: str, guarded: bool) -> list:
        """Lines that bring an input's tile in."""
        if o.name not in self.staged:
            return []
        return [self.loop, f"    {o.name}_r[i, j] = {self._global(o, column, guarded)}"]

    def _global(self, o, column: str, guarded: bool) -> str:
        element = f"{o.name}[{self.space.offset(o, self.row, column)}]"
        return (
            f"T.if_then_else({column} < {self.columns}, {element}, T.{buffer_dtype(o, self.dialect)}(0))"
            if guarded
            else element
        )

    def _targets(self, level: int) -> tuple:
        kept = [v for v in self.crossing if self.rows.levels[v] == level]
        return self.reductions(level), self.outputs(level, per_row=False), kept

    def _step(self, level: int, known: dict, column: str, guarded: bool, load: bool) -> list:
        """One tile's worth of a pass."""
        reductions, outputs, kept = self._targets(level)
        targets = [r.operand for r in reductions] + [v for _, v in outputs] + kept
        element = lambda o: f"{o.name}_r[i, j]" if o.name in self.staged else self._global(o, column, guarded)  # noqa: E731
        lines, values, read = self.chain(targets, known, element)
        for r in reductions:
            value = values[r.operand] if self.whole else combined(r.kind, f"t{r.value}[i, j]", values[r.operand])
            if guarded:
                rest = self.dialect.f32(START[r.kind]) if self.whole else f"t{r.value}[i, j]"
                value = f"where({column} < {self.columns}, {value}, {rest})"
            lines.append(f"t{r.value}[i, j] = {value}")
        lines += [f"c{v}[i, j] = {self._put(v, values[v])}" for v in kept]
        lines += [f"{o.name}_r[i, j] = {stored(values[v], o, self.dialect)}" for o, v in outputs]
        text = [line for o in read for line in self._load(o, column, guarded)] if load else []
        text += [self.loop, *("    " + line for line in lines)]
        for o, _ in outputs:
            store = f"{o.name}[{self.space.offset(o, self.row, column)}] = {o.name}_r[i, j]"
            text += [
                self.loop,
                *([f"    if {column} < {self.columns}:", f"        {store}"] if guarded else [f"    {store}"]),
            ]
        return text

    def _pass(self, level: int, known: dict) -> list:
        """A pass over rows that are in registers."""
        return (
            self._step(level, known, "j", self.width != self.columns, load=False) if any(self._targets(level)) else []
        )

    def _walk(self, level: int, known: dict) -> list:
        """A pass over rows in chunks."""
        if not any(self._targets(level)):
            return []
        lines = []
        for r in self.reductions(level):
            lines += [self.loop, f"    t{r.value}[i, j] = {self.dialect.f32(START[r.kind])}"]
        full, tail = divmod(self.columns, self.width)
        step = self._step(level, known, f"(k * {self.width} + j)", guarded=False, load=True)
        lines += [f"for k in T.serial({full}):", *("    " + line for line in step)]
        if tail:
            lines += self._step(level, known, f"({full * self.width} + j)", guarded=True, load=True)
        return lines
