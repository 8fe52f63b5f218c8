"""What both targets of the row template share: which values each pass computes."""

from fusescout.templates.body import loaded
from fusescout.templates.dialect import Dialect
from fusescout.templates.expansions import HIGH
from fusescout.templates.expansions import LOW
from fusescout.templates.expansions import PICK
from fusescout.templates.expression import emit
from fusescout.templates.operators import SAME
from fusescout.templates.rows import Rows

LOWEST = -3.4028234663852886e38
"""Where a maximum starts that exponentials are summed up against: -inf would give inf - inf."""
START = {"sum": 0.0, "head": 0.0, "sumexp": 0.0, "max": float("-inf"), "min": float("inf")}


def combined(kind: str, a: str, b: str) -> str:
    """Text of one reduction step."""
    return f"{kind}imum({a}, {b})" if kind in ("max", "min") else f"{a} + {b}"


def is_input(rows: Rows, value: int) -> bool:
    """Whether a value is an input, perhaps in another dtype: cheaper to get again than to keep."""
    op = rows.graph.op_of(value)
    return op is None or (op.name in SAME and is_input(rows, op.inputs[0]))


def crossing(rows: Rows) -> list:
    """Computed full-row values that a later pass needs again."""
    first = len(rows.graph.inputs)
    found = []
    for value in range(first, first + len(rows.graph.ops)):
        if is_input(rows, value):
            continue
        users = [u for u in rows.graph.users(value) if u not in rows.reductions and rows.graph.op_of(u).name != PICK]
        if value not in rows.row_values and any(rows.levels[u] > rows.levels[value] for u in users):
            found.append(value)
    return found


class Passes:
    """Base of the writers. Pass k computes the full-row values of level k and the reductions over them."""

    def __init__(self, rows: Rows, crossing: list, dialect: Dialect, config: dict) -> None:
        self.rows, self.space, self.dialect, self.config = rows, rows.space, dialect, config
        self.graph, self.crossing = rows.graph, crossing
        self.first = len(self.graph.inputs)
        self.tops = {r.top for r in rows.reductions.values()} - {None}

    def reductions(self, level: int) -> list:
        """Reductions fed by values of `level`."""
        return [r for r in self.rows.reductions.values() if self.rows.levels[r.value] == level + 1]

    def start(self, r) -> str:
        """What a reduction starts from."""
        return self.dialect.f32(LOWEST if r.value in self.tops else START[r.kind])

    def outputs(self, level: int, per_row: bool) -> list:
        """(operand, value) of the outputs that are ready at `level`."""
        pairs = zip(self.space.outputs, self.graph.outputs, strict=True)
        return [(o, v) for o, v in pairs if self.rows.levels[v] == level and (v in self.rows.row_values) == per_row]

    def row_ops(self, level: int) -> list:
        """Per-row values of `level` that are computed from other per-row values."""
        values = range(self.first, self.first + len(self.graph.ops))
        return [
            v
            for v in values
            if self.rows.levels[v] == level and v in self.rows.row_values and v not in self.rows.reductions
        ]

    def full_inputs(self) -> list:
        return [o for o in self.space.inputs if o.index not in self.rows.row_values]

    def row_inputs(self) -> list:
        return [o for o in self.space.inputs if o.index in self.rows.row_values]

    def chain(self, targets: list, known: dict, element) -> tuple:
        """Lines that compute the full-row values `targets`, all texts, and the inputs that are read.

        Args:
            known: texts of values that need not be computed.
            element: gives the buffer element of a full-row input.
        """
        need, stack = set(), list(targets)
        while stack:
            value = stack.pop()
            if value not in known and value not in need:
                need.add(value)
                op = self.graph.op_of(value)
                stack += op.inputs if op else ()
        read = [o for o in self.full_inputs() if o.index in need]
        lines = [f"x{o.index} = {loaded(element(o), o, self.dialect)}" for o in read]
        values = known | {o.index: f"x{o.index}" for o in read}
        more, values = emit(self.graph, values, self.dialect, sorted(v for v in need if v >= self.first), self.cells)
        return lines + more, values, read

    def row_chain(self, level: int, values: dict, row: str) -> tuple:
        """Lines that compute the per-row values of `level`, and all texts."""
        lines: list = []
        for v in self.row_ops(level):
            op = self.graph.op_of(v)
            if op.name in (HIGH, LOW):
                lines.append(f"v{v} = {_part(op, values[op.args[0].to])}")
                values = values | {v: f"v{v}"}
                continue
            if op.name != PICK:
                more, values = emit(self.graph, values, self.dialect, [v])
                lines += more
                continue
            whole, place = (a.to for a in op.args)
            per_row = {k: text for k, text in values.items() if k in self.rows.row_values}
            column = values[place]
            more, found, _ = self.chain([whole], per_row, lambda o: self.space.element(o, row, column))  # noqa: B023
            lines += [*more, f"v{v} = {found[whole]}"]
            values = values | {v: f"v{v}"}
        return lines, values


def _part(op, total: str) -> str:
    """A float64 sum's quotient as a float32 number, or what that number lacks."""
    quotient = f'({total} / T.cast({op.args[1]}, "float64"))'
    high = f'T.cast({quotient}, "float32")'
    return high if op.name == HIGH else f'T.cast({quotient} - T.cast({high}, "float64"), "float32")'
