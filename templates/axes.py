"""Axes of a sub-graph: every dimension of every value as a product of atomic axes that all values share.

A view, a transpose, a broadcast or a dropped dimension then is no operator any more: it says which axes a value has. An
axis that is cut into pieces by slices, or put together from pieces by `cat` and `stack`, is unrolled: a value has one
piece for each place on it, and a slice or a `cat` only says which piece of which value is meant.
"""

import math

from fusescout.templates.operators import Unsupported

MOST_PIECES = 16
"""Pieces of one axis; each is written out in the kernel."""


class Axes:
    """Atomic axes, by number. Two that turn out to be walked together become one; one may be split into finer ones."""

    def __init__(self) -> None:
        self.sizes: list = []
        self.unrolled: list = []
        self._parts: dict = {}

    def new(self, size: int, unrolled: bool = False) -> tuple:
        """A dimension of `size` as a list of axes: none where it is 1."""
        if size == 1:
            return ()
        if unrolled and size > MOST_PIECES:
            raise Unsupported(f"an axis is cut into {size} pieces")
        self.sizes.append(size)
        self.unrolled.append(unrolled)
        return (len(self.sizes) - 1,)

    def leaves(self, atoms: tuple) -> tuple:
        """The atoms as what they have been split into or merged with."""
        found: list = []
        for a in atoms:
            found += self.leaves(self._parts[a]) if a in self._parts else (a,)
        return tuple(found)

    def size(self, atoms: tuple) -> int:
        return math.prod(self.sizes[a] for a in atoms)

    def strides(self, dim: tuple) -> dict:
        """Steps in a dimension per step of each of its axes."""
        leaves = self.leaves(dim)
        return {a: self.size(leaves[k + 1 :]) for k, a in enumerate(leaves)}

    def same(self, a: tuple, b: tuple) -> None:
        """Make two lists of axes of equal size one."""
        left, right = list(self.leaves(a)), list(self.leaves(b))
        while left and right:
            x, y = self.leaves((left.pop(),)), self.leaves((right.pop(),))
            if len(x) > 1 or len(y) > 1:  # split meanwhile
                left, right = left + list(x), right + list(y)
                continue
            self._match(x[0], y[0], left, right)
        if left or right:
            raise Unsupported("sizes of two views don't agree")

    def _match(self, x: int, y: int, left: list, right: list) -> None:
        """Make the innermost axes one, as far as the smaller of them goes; the rest goes back to its list."""
        m, n = self.sizes[x], self.sizes[y]
        if x == y:
            return
        if m == n:
            self._become(y, (x,))
        elif m > n and m % n == 0:
            outer = self.new(m // n)
            self._become(x, (*outer, y))
            left += outer
        elif n > m and n % m == 0:
            outer = self.new(n // m)
            self._become(y, (*outer, x))
            right += outer
        elif (common := math.gcd(m, n)) > 1:
            inner = self.new(common)
            for axis, rest in ((x, left), (y, right)):
                outer = self.new(self.sizes[axis] // common)
                self._become(axis, (*outer, *inner))
                rest += outer
        else:
            raise Unsupported(f"a dimension is split in two ways, {m} and {n}, that have no common part")

    def _become(self, axis: int, parts: tuple) -> None:
        self._parts[axis] = parts
        for part in parts:
            self.unrolled[part] = self.unrolled[part] or self.unrolled[axis]
            if self.unrolled[part] and self.sizes[part] > MOST_PIECES:
                raise Unsupported(f"an axis is cut into {self.sizes[part]} pieces")

    def cut(self, dim: tuple, length: int) -> tuple:
        """Cut a dimension into pieces of `length`; gives the axes inside a piece."""
        inner = self.new(length)
        self.same(dim, (*self.new(self.size(self.leaves(dim)) // length, unrolled=True), *inner))
        return inner

    def moved(self, dim: tuple, start: int, step: int, to: tuple, places: dict) -> dict:
        """Places on the unrolled axes of `dim` at which position = start + step * position in `to`.

        Args:
            places: the place on each unrolled axis of `to`.
        """
        outer, inner = self.strides(to), self.strides(dim)
        walked = {a: s * step for a, s in outer.items() if not self.unrolled[a]}
        if walked != {a: s for a, s in inner.items() if not self.unrolled[a]}:
            raise Unsupported("a slice or a concatenation cuts axes in a way that is not handled")
        position = start + step * sum(places[a] * s for a, s in outer.items() if self.unrolled[a])
        found = {}
        for a, stride in sorted(inner.items(), key=lambda item: -item[1]):
            if self.unrolled[a]:
                found[a], position = divmod(position, stride)
                if found[a] >= self.sizes[a]:
                    raise Unsupported("a slice reaches beyond an axis")
        if position:
            raise Unsupported("a slice cuts through a piece of an axis")
        return found
