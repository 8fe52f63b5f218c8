"""The row template on the CPU."""

from fusescout.templates.body import Cells
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import stored
from fusescout.templates.expression import compute_dtype
from fusescout.templates.rowwise_passes import Passes
from fusescout.templates.rowwise_passes import combined

LANES = 32
STEPS = 32
"""Steps of `LANES` columns that are summed up before they are added to the row's total: keeps sums accurate."""


class CpuRows(Passes):
    """Each thread takes `block` elements' worth of rows, one row after the other."""

    def body(self) -> str:
        count, columns = self.rows.rows, self.rows.columns
        block = max(1, min(count, self.config["block"] // columns))
        grid = -(-count // block)
        extent = str(block) if count % block == 0 else f"T.min({block}, {count} - bx * {block})"
        lines = [f"with {self.dialect.kernel(grid)} as bx:"]
        for r in self.rows.reductions.values():
            lines += [f"    {n}{r.value} = {self.dialect.tile((k,))}" for n, k in (("t", LANES), ("p", LANES))]
        for v in self.crossing:
            lines.append(f"    b{v} = {self.dialect.tile((columns,), compute_dtype(self.graph.tensor(v).dtype))}")
        self.cells = Cells("k", (1,), "0", self.dialect)
        row = self._row()
        lines += ["    " + line for line in self.cells.lines()]
        lines += [f"    for i in T.serial({extent}):", f"        r = bx * {block} + i"]
        return indent(lines, 1) + indent(row, 3)

    def _row(self) -> list:
        """Lines of one row."""
        known, lines = {}, []
        for o in self.row_inputs():
            known[o.index] = f"x{o.index}"
            lines.append(f"x{o.index} = {loaded(self.space.element(o, 'r', '0'), o, self.dialect)}")
        for level in range(self.rows.last_level + 1):
            more, known = self.row_chain(level, known, "r")
            lines += more
            lines += [
                f"{self.space.element(o, 'r', '0')} = {stored(known[v], o, self.dialect)}"
                for o, v in self.outputs(level, per_row=True)
            ]
            lines += self._pass(level, known)
            for r in self.reductions(level):
                lines += self._total(r)
                known[r.value] = f"t{r.value}[0]"
            known |= {v: f"b{v}[j]" for v in self.crossing if self.rows.levels[v] == level}
        return lines

    def _pass(self, level: int, known: dict) -> list:
        """All columns of one row: full values of `level`, and partial reductions of them."""
        reductions, outputs = self.reductions(level), self.outputs(level, per_row=False)
        kept = [v for v in self.crossing if self.rows.levels[v] == level]
        targets = [r.operand for r in reductions] + [v for _, v in outputs] + kept
        if not targets:
            return []
        element = lambda o: self.space.element(o, "r", "j")  # noqa: E731
        lines, values, _ = self.chain(targets, known, element)
        lines += [f"b{v}[j] = {values[v]}" for v in kept]
        lines += [f"{element(o)} = {stored(values[v], o, self.dialect)}" for o, v in outputs]
        columns = self.rows.columns
        if not reductions:
            return [f"for j in T.serial({columns}):", *("    " + line for line in lines)]
        steps, tail = divmod(columns, LANES)
        text = []
        for r in reductions:
            text += [f"for l in T.serial({LANES}):", f"    t{r.value}[l] = {self.start(r)}"]
        if steps:
            text += [f"for c in T.serial({-(-steps // STEPS)}):"]
            for r in reductions:
                text += [f"    for l in T.serial({LANES}):", f"        p{r.value}[l] = {self.start(r)}"]
            extent = str(STEPS) if steps % STEPS == 0 else f"T.min({STEPS}, {steps} - c * {STEPS})"
            text += [f"    for k in T.serial({extent}):", f"        for l in T.serial({LANES}):"]
            text += [f"            j = (c * {STEPS} + k) * {LANES} + l", *("            " + line for line in lines)]
            text += [
                f"            p{r.value}[l] = {combined(r.kind, f'p{r.value}[l]', values[r.operand])}"
                for r in reductions
            ]
            for r in reductions:
                text += [f"    for l in T.serial({LANES}):"]
                text += [f"        t{r.value}[l] = {combined(r.kind, f't{r.value}[l]', f'p{r.value}[l]')}"]
        if tail:
            text += [f"for l in T.serial({tail}):", f"    j = {steps * LANES} + l", *("    " + line for line in lines)]
            text += [f"    t{r.value}[l] = {combined(r.kind, f't{r.value}[l]', values[r.operand])}" for r in reductions]
        return text

    def _total(self, r) -> list:
        """The row's result from the lanes, halving them: as accurate as it is short."""
        lines, half = [], LANES // 2
        while half:
            step = combined(r.kind, f"t{r.value}[l]", f"t{r.value}[l + {half}]")
            lines += [f"for l in T.serial({half}):", f"    t{r.value}[l] = {step}"]
            half //= 2
        return lines
