"""The row template on CUDA."""

import math

from fusescout.templates.body import Cells
from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import stored
from fusescout.templates.expression import compute_dtype
from fusescout.templates.rowwise_passes import Passes
from fusescout.templates.rowwise_passes import combined
from fusescout.templates.rowwise_spans import Slant
from fusescout.templates.rowwise_spans import Span
from fusescout.templates.space import Space
from fusescout.templates.space import even_runs

from fusescout.ir import DTYPE_BYTES


def runs_across(space: Space) -> bool:
    """Whether neighbouring rows lie side by side in memory, and a row's elements don't."""
    cut = len(space.sizes) - space.depth
    wide = [o for o in space.operands if not space.per_row(o)]
    steps = max(wide, key=lambda o: sum(s != 0 for s in o.strides)).strides
    along, across = ([s for s in part if s] for part in (steps[cut:], steps[:cut]))
    return bool(across) and min(across) < min(along)


def side_by_side(space: Space) -> int:
    """How many neighbouring rows lie side by side in all that has more than one element a row."""
    cut = len(space.sizes) - space.depth
    wide = [o.strides[:cut] for o in space.operands if not space.per_row(o)]
    return math.prod(space.sizes[k] for k in even_runs(space.sizes[:cut], wide)[-1])


def vector_of(space: Space) -> int:
    """Elements of a 16-byte vector of the narrowest operand that has more than one element a row."""
    return max(2, 16 // max(min(DTYPE_BYTES[o.dtype] for o in space.operands if not space.per_row(o)), 2))


class CudaRows(Passes):
    """`rows` rows of up to `width` columns per block and step; wider rows are walked in chunks, once per pass.

    Tiles are register fragments of `rows` x `width`, or of `width` x `rows` where rows lie side by side. Columns behind
    the row's end hold anything; they are left out of reductions and stores. Rows behind the last one repeat it.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.count, self.width, self.columns = self.config["rows"], self.config["width"], self.rows.columns
        self.whole = self.width >= self.columns
        if not self.whole:
            self.crossing = []
        self.across = runs_across(self.space)
        self.tile = (self.width, self.count) if self.across else (self.count, self.width)
        self.place, self.spot = "j, i" if self.across else "i, j", "j"
        self.loop = f"for {self.place} in {self.dialect.parallel(*self.tile)}:"
        self.staged = {o.name for o in self.full_inputs() if o.spec.aligned}
        blocks = -(-self.rows.rows // self.count)
        exact = self.rows.rows % self.count == 0
        self.row = f"bx * {self.count} + i" if exact else f"T.min(bx * {self.count} + i, {self.rows.rows - 1})"
        slant = Slant(self.space, self.columns, self.row)
        self.slant = slant if self.count == 1 and not self.across and slant.fits(self.width) else None
        self.launch = f"with {self.dialect.kernel(blocks, threads=self.config['threads'])} as bx:"

    def body(self) -> str:
        self.cells = Cells("k", self.tile, self.place, self.dialect)
        lines = self._ahead()
        known: dict = {}
        for level in range(self.rows.last_level + 1):
            lines += self._row_stage(level, known)
            if not self.whole:
                heads = [r for r in self.reductions(level) if r.kind == "head"]
                lines += self._step(level, known, self._head_span(), load=True, only=heads) if heads else []
                lines += [line for r in heads for line in self._total(r)]
            lines += self._pass(level, known) if self.whole else self._walk(level, known)
            lines += [line for r in self._later(level) for line in self._total(r)]
            known |= {v: self._get(v, f"c{v}[{self.place}]") for v in self.crossing if self.rows.levels[v] == level}
        start = [*flat(self.space.parameters, self.dialect), *self._tiles(), *self.cells.lines()]
        if blocks := self.config.get("blocks"):
            start.insert(0, f"T.annotate_min_blocks_per_sm({blocks})")
        return self._frame(start, lines)

    def _frame(self, start: list, lines: list) -> str:
        """The kernel, from what each block does once and what it does with its rows."""
        return indent([self.launch], 1) + indent([*start, *lines], 2)

    def _ahead(self) -> list:
        """Lines that ask for what of a row is kept, before anything waits."""
        return [line for o in self.full_inputs() for line in self._load(o, self._whole_span())] if self.whole else []

    def _later(self, level: int) -> list:
        """Reductions over all of a row."""
        return [r for r in self.reductions(level) if r.kind != "head"]

    def _total(self, r) -> list:
        """A reduction's results from its tile."""
        name, lines = {"max": "max", "min": "min"}.get(r.kind, "sum"), []
        if r.kind == "sumexp":
            change = f"exp(t{r.top}[{self.place}] - s{r.top}[i])"
            lines += [self.loop, f"    t{r.value}[{self.place}] = t{r.value}[{self.place}] * {change}"]
        parts = f"t{r.value}"
        if self._in_float64(r.value):
            lines += [self.loop, f'    d{r.value}[{self.place}] = T.cast({parts}[{self.place}], "float64")']
            parts = f"d{r.value}"
        lines.append(f"T.reduce_{name}({parts}, s{r.value}, dim={int(not self.across)}, batch={self._batch()})")
        if r.kind == "head":  # the width is a power of two: a product that is exact, however it is contracted
            scale = self.dialect.f32(1 / self.width)
            lines += [f"for i in {self.dialect.parallel(self.count)}:", f"    s{r.value}[i] = s{r.value}[i] * {scale}"]
        return lines

    def _batch(self) -> int:
        """How many of a thread's rows are reduced at once; of float64 parts it may have two, a vector of 16 bytes."""
        vector = self.config.get("vector", 1)
        return min(vector, 2) if any(map(self._in_float64, self.rows.reductions)) else vector

    def _in_float64(self, value: int) -> bool:
        """Whether a reduction's parts meet in float64."""
        return self.graph.tensor(value).dtype == "float64"

    # -- tiles
    def _tiles(self) -> list:
        tile, line = self.tile, (self.count,)
        make = self._input_tiles()
        full = [o for level in range(self.rows.last_level + 1) for o, _ in self.outputs(level, per_row=False)]
        make += [(f"{o.name}_r", tile, buffer_dtype(o, self.dialect)) for o in full]
        make += self._partial_tiles()
        make += [(f"s{r}", line, "float64" if self._in_float64(r) else "float32") for r in self.rows.reductions]
        make += [(f"d{r}", tile, "float64") for r in self.rows.reductions if self._in_float64(r)]
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
            lines.append(f"x{o.index} = {loaded(self.space.element(o, self.row, '0'), o, self.dialect)}")
            values[o.index] = f"x{o.index}"
        ops = self.row_ops(level)
        more, values = self.row_chain(level, values, self.row)
        lines += more
        for v in (*(o.index for o in inputs), *ops):
            lines.append(f"w{v}[i] = {self._put(v, values[v])}")
            known[v] = self._get(v, f"w{v}[i]")
        for o, v in self.outputs(level, per_row=True):
            lines.append(f"{self.space.element(o, self.row, '0')} = {stored(values[v], o, self.dialect)}")
        return [f"for i in {self.dialect.parallel(self.count)}:", *("    " + line for line in lines)] if lines else []

    # -- tiles of a row
    def _span(self, spot: str, first: bool, last: bool) -> Span:
        """A tile from `spot` on; `first` and `last`: elements in front of the row, or behind it, may be in it."""
        if self.slant:
            return self.slant.span(spot, first, last)
        return Span(spot, spot, f"{spot} < {self.columns}" if last else "")

    def _whole_span(self) -> Span:
        return self._span(self.spot, True, self.width != self.columns)

    def _head_span(self) -> Span:
        """A tile that is full: the first one, or the second where the first one starts in front of the row."""
        return self._span(f"({self.width} + {self.spot})" if self.slant else self.spot, False, False)

    def _load(self, o, span: Span) -> list:
        """Lines that bring an input's tile in."""
        if o.name not in self.staged:
            return []
        return [self.loop, f"    {self._staged(o)}[{self.place}] = {self._global(o, span)}"]

    def _element(self, o, span: Span) -> str:
        if self.slant and o.name in self.slant.operands:
            return self.slant.element(o, span)
        return self.space.element(o, self.row, span.column)

    def _global(self, o, span: Span) -> str:
        element = self._element(o, span)
        test = self._there(o, span)
        return f"T.if_then_else({test}, {element}, T.{buffer_dtype(o, self.dialect)}(0))" if test else element

    def _there(self, o, span: Span) -> str:
        """The test whether an element may be read; none where all may."""
        flat = self.slant and o.name in self.slant.operands
        if not span.inside or (flat and "<" not in span.inside):
            return ""
        return self.slant.in_reach(span) if flat else span.inside

    def _step(self, level: int, known: dict, span: Span, load: bool, only: list | None = None) -> list:
        """One tile's worth of a pass; `only`: of these reductions alone, started here."""
        reductions = only or self._later(level)
        outputs = [] if only else self.outputs(level, per_row=False)
        kept = [] if only else [v for v in self.crossing if self.rows.levels[v] == level]
        at = f"[{self.place}]"
        targets = [r.operand for r in reductions] + [v for _, v in outputs] + kept

        def element(o) -> str:
            return self._kept(f"{self._staged(o)}{at}", level) if o.name in self.staged else self._global(o, span)

        lines, values, read = self.chain(targets, known, element)
        for r in reductions:
            lines += self._accumulate(r, values[r.operand], span.inside, bool(only))
        lines += [f"c{v}{at} = {self._put(v, values[v])}" for v in kept]
        lines += [f"{o.name}_r{at} = {stored(values[v], o, self.dialect)}" for o, v in outputs]
        text = [line for o in read for line in self._load(o, span)] if load else []
        text += [self.loop, *("    " + line for line in lines)]
        text += [] if only else self._merge(level)
        for o, _ in outputs:
            store = f"{self._element(o, span)} = {o.name}_r{at}"
            text += [self.loop, *([f"    if {span.inside}:", f"        {store}"] if span.inside else [f"    {store}"])]
        return text

    def _accumulate(self, r, value: str, inside: str, first: bool) -> list:
        """Lines that take one element of a row into a reduction's tile; `inside` tests for the row's end."""
        tile = f"t{r.value}[{self.place}]"
        if r.value in self.tops:  # its maximum is kept where exponentials are summed up
            return []
        whole = self.whole or first
        rest = self.start(r) if whole else tile
        if r.kind != "sumexp":
            value = value if whole else combined(r.kind, tile, value)
            return [f"{tile} = " + (f"where({inside}, {value}, {rest})" if inside else value)]
        top, one = f"t{r.top}[{self.place}]", self.dialect.f32(1)
        changed = f"{tile} * where(g{r.value}, e{r.value}, {one}) + where(g{r.value}, {one}, e{r.value})"
        highest = f"T.max(m{r.value}, {value})"  # it may drop NaN: the sum keeps it
        return [
            f"m{r.value} = let({top})",
            f"e{r.value} = let(exp(-fabs({value} - m{r.value})))",
            f"g{r.value} = let({value} > m{r.value})",
            f"{tile} = " + (f"where({inside}, {changed}, {tile})" if inside else changed),
            f"{top} = " + (f"where({inside}, {highest}, m{r.value})" if inside else highest),
        ]

    def _staged(self, o) -> str:
        """The tile that an input is loaded into."""
        return f"{o.name}_r"

    def _kept(self, element: str, level: int) -> str:
        """An element of an input's tile, as a pass reads it."""
        return element

    def _input_tiles(self) -> list:
        staged = [o for o in self.full_inputs() if o.name in self.staged]
        return [(self._staged(o), self.tile, buffer_dtype(o, self.dialect)) for o in staged]

    def _partial_tiles(self) -> list:
        """Name, shape and dtype of what reductions are partially in."""
        return [(f"t{r}", self.tile, "float32") for r in self.rows.reductions]

    def _starts(self, level: int) -> list:
        """Lines before a walk: its reductions' partial results."""
        later = self._later(level)
        return [line for r in later for line in (self.loop, f"    t{r.value}[{self.place}] = {self.start(r)}")]

    def _chunks(self, number: int) -> str:
        """The loop over the chunks of a walk."""
        return f"T.serial({number})"

    def _merge(self, level: int) -> list:
        """Lines after a chunk of a walk."""
        return []

    def _has_work(self, level: int) -> bool:
        kept = any(self.rows.levels[v] == level for v in self.crossing)
        return bool(self._later(level) or self.outputs(level, per_row=False) or kept)

    def _pass(self, level: int, known: dict) -> list:
        """A pass over rows that are in registers."""
        if not self._has_work(level):
            return []
        return self._step(level, known, self._whole_span(), load=False)

    def _walk(self, level: int, known: dict) -> list:
        """A pass over rows in chunks."""
        if not self._has_work(level):
            return []
        lines = self._starts(level)
        full, tail = divmod(self.columns, self.width)
        first, back = bool(self.slant), level > 0
        chunk = f"{full - 1} - k" if back else "k + 1" if first else "k"
        steps = [self._span(f"(({chunk}) * {self.width} + {self.spot})", False, False)]
        if first:
            steps.insert(0, self._span(self.spot, True, False))
        if tail or first:
            steps.append(self._span(f"({full * self.width} + {self.spot})", False, True))
        for span in reversed(steps) if back else steps:  # back to front: what was read last is in the cache
            step = self._step(level, known, span, load=True)
            if "k" in span.spot:
                step = [f"for k in {self._chunks(full - first)}:", *("    " + line for line in step)]
            lines += step
        return lines
