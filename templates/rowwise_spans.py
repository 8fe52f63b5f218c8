"""Where in a row a tile of the CUDA row kernels lies, and which of its elements are the row's.

Rows whose length is no multiple of a vector start at any address. Their tiles start at the vector boundary in front of
the row instead, so that loads stay wide; what lies in front of the row is left out like what lies behind it.
"""

from dataclasses import dataclass

from fusescout.templates.space import Operand
from fusescout.templates.space import Space

from fusescout.ir import DTYPE_BYTES


@dataclass(frozen=True)
class Span:
    """Texts of a tile's element: its `column` in the row, the test whether it is `inside`, and its `spot`.

    The spot counts from where the tiles of the row start. Without a test every element is inside.
    """

    column: str
    spot: str
    inside: str


class Slant:
    """Rows of `columns` elements behind each other, read from the vector boundary in front of each.

    Attributes:
        vector: elements of a vector.
        operands: names of the operands that lie like this; others are read element by element.
    """

    def __init__(self, space: Space, columns: int, row: str) -> None:
        wide = [o for o in space.operands if not space.per_row(o)]
        flat = [o for o in wide if o.spec.aligned and not o.offset and _is_flat(o, space.sizes)]
        self.operands = {o.name for o in flat}
        self.vector = max((16 // DTYPE_BYTES[o.dtype] for o in flat), default=1)
        self.columns = columns
        self.lead = f"(({row}) * {columns}) % {self.vector}"
        self.start = f"(({row}) * {columns}) // {self.vector} * {self.vector}"

    def fits(self, width: int) -> bool:
        """Whether it makes a difference, and tiles of `width` take a row and what is in front."""
        if not self.operands or self.columns % self.vector == 0:
            return False
        most = self.columns + self.vector - 1
        return most <= width or (self.columns // width >= 2 and self.columns % width + self.vector - 1 <= width)

    def span(self, spot: str, first: bool, last: bool) -> Span:
        column = f"({spot} - {self.lead})"
        tests = [f"{column} >= 0"] * first + [f"{column} < {self.columns}"] * last
        return Span(column, spot, f"T.And({tests[0]}, {tests[1]})" if len(tests) == 2 else "".join(tests))

    def element(self, o: Operand, span: Span) -> str:
        return f"{o.buffer}[{self.start} + {span.spot}]"

    def in_reach(self, span: Span) -> str:
        """Whether a vector holds any element of the row or one in front of it."""
        return f"({span.spot}) // {self.vector} * {self.vector} < {self.columns} + {self.lead}"


def _is_flat(o: Operand, sizes: tuple) -> bool:
    expected = 1
    for n, stride in zip(reversed(sizes), reversed(o.strides), strict=True):
        if stride != expected:
            return False
        expected *= n
    return True
