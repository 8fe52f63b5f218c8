"""What both targets of the row template share: which values each pass computes."""

from fusescout.templates.body import loaded
from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import emit
from fusescout.templates.rows import Rows
from fusescout.templates.space import Space

START = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


def combined(kind: str, a: str, b: str) -> str:
    """Text of one reduction step."""
    return f"{a} + {b}" if kind == "sum" else f"{kind}imum({a}, {b})"


class Passes:
    """Base of the writers. Pass k computes the full-row values of level k and the reductions over them."""

    def __init__(self, rows: Rows, space: Space, crossing: list, dialect: Dialect, config: dict) -> None:
        self.rows, self.space, self.dialect, self.config = rows, space, dialect, config
        self.graph, self.crossing = rows.graph, crossing
        self.first = len(self.graph.inputs)

    def reductions(self, level: int) -> list:
        """Reductions fed by values of `level`."""
        return [r for r in self.rows.reductions.values() if self.rows.levels[r.value] == level + 1]

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
