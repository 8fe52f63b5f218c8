"""The expansions for rows that are summed part by part: each sum is one over a part, and one over the parts.

Deviations are taken from the mean of their own part first: with n elements in each, the squares about the row's mean
are those about the parts' means, and n times the squares of these means' own deviations. Nothing is lost in a
difference of large sums, and a row is read once for both moments (Chan, Golub and LeVeque, 1979).
"""

from fusescout.templates.expansions import HIGH
from fusescout.templates.expansions import LOW
from fusescout.templates.expansions import Expansion
from fusescout.templates.expansions import Moments
from fusescout.templates.operators import Unsupported

from fusescout.ir import Ref
from fusescout.ir import Subgraph


class InParts(Expansion):
    """As `Expansion`; the last dimension, number `last`, is a part's."""

    def __init__(self, graph: Subgraph, last: int) -> None:
        self.last = last
        super().__init__(graph, walked=False, cpu=False)

    def reduce(self, name: str, x: Ref, axes: tuple, *more: Ref, dtype: str = "float32") -> Ref:
        """A sum over rows, by way of their parts."""
        if name != "sum" or more:
            raise Unsupported(f"a {name} over rows that several blocks share")
        if self.last not in axes or self.spec(x).shape[self.last] == 1:
            return super().reduce(name, x, axes, dtype=dtype)
        of_parts = super().reduce(name, x, (self.last,), dtype=dtype)
        if dtype == "float64":
            of_parts = self.part(HIGH, of_parts, 1)
        return super().reduce(name, of_parts, tuple(a for a in axes if a != self.last), dtype=dtype)

    def pick(self, x: Ref, place: Ref) -> Ref:
        raise Unsupported("an element of rows that several blocks share")

    def moments(self, x: Ref, axes: tuple) -> Moments:
        """Mean and squares of rows; in float32 all sums meet in float64."""
        exact = self.spec(x).dtype == "float32"
        length, count = self.spec(x).shape[self.last], self.count(x, axes)
        if length == 1:
            raise Unsupported("moments of rows without parts")
        rest = tuple(a for a in axes if a != self.last)
        if not exact:
            total = super().reduce("sum", x, (self.last,))
            own = self.full("div", total, length)
            mean = self.full("div", super().reduce("sum", total, rest), count)
            d = self.full("sub", x, own)
            squares = super().reduce("sum", self.full("mul", d, d), (self.last,))
            off = self.full("sub", own, mean)
            squares = self._about_the_mean(squares, off, length, rest)
            return Moments(mean, self.full("sub", x, mean), None, mean, squares)
        total = super().reduce("sum", x, (self.last,), dtype="float64")
        own, own_low = self.part(HIGH, total, length), self.part(LOW, total, length)
        high, low = (super(InParts, self).reduce("sum", part, rest, dtype="float64") for part in (own, own_low))
        parts = count // length  # all as long, so the mean is that of their means
        mean = self.part(HIGH, high, parts)
        mean_low = self.full("add", self.part(LOW, high, parts), self.part(HIGH, low, parts))
        d = self.full("sub", x, own)
        squares = self.part(HIGH, super().reduce("sum", self.full("mul", d, d), (self.last,), dtype="float64"), 1)
        off = self.full("add", self.full("sub", own, mean), self.full("sub", own_low, mean_low))
        squares = self._about_the_mean(squares, off, length, rest, "float64")
        return Moments(mean, self.full("sub", x, mean), mean_low, mean, squares)

    def _about_the_mean(self, squares: Ref, off: Ref, length: int, axes: tuple, dtype: str = "float32") -> Ref:
        """The squares about a row's mean, from those about its parts' means and how far these are off."""
        moved = self.full("add", squares, self.full("mul", self.full("mul", off, off), length))
        found = super().reduce("sum", moved, axes, dtype=dtype)
        return self.part(HIGH, found, 1) if dtype == "float64" else found
