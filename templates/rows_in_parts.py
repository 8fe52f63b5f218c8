"""Rows that many blocks share: sums of parts, what becomes of a row, and a pointwise rest, one kernel each.

A block that takes a whole row is too much where rows are few and long, and reads in pieces where neighbouring rows lie
side by side, as groups of channels do. So the long dimension that both are walked along in memory, the pixels, is cut
into parts of equal length. The first kernel sums over each part, channel by channel; the second over parts and the
row's channels, and computes what a row has one of; the third is pointwise, in the order of its results.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.expansions import HIGH
from fusescout.templates.expansions import LOW
from fusescout.templates.expansions import contiguous
from fusescout.templates.expansions_in_parts import InParts
from fusescout.templates.expression import compute_dtype
from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import lay_out
from fusescout.templates.rows import REDUCTIONS
from fusescout.templates.rows import Rows
from fusescout.templates.rows import levelled
from fusescout.templates.space import Operand
from fusescout.templates.space import Space
from fusescout.templates.space import even_runs
from fusescout.templates.space import space_of

from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

LEAST, MOST = 8, 4096
"""Elements of a part."""


@dataclass(frozen=True)
class Shared:
    """The three kernels.

    Attributes:
        sums: over each part.
        rows: over the parts of each row.
        rest: graph and space of what is pointwise then; None if nothing is.
    """

    sums: Rows
    rows: Rows
    rest: tuple[Subgraph, Space] | None

    @property
    def spaces(self) -> list:
        """Of each kernel."""
        return [self.sums.space, self.rows.space, *([self.rest[1]] if self.rest else [])]


@dataclass(frozen=True)
class _Axes:
    """How the dimensions of a row-wise space lie in memory, by their numbers there.

    Attributes:
        outer: outside of the long dimension: of rows, and reduced ones.
        long: reduced dimensions that make it, outermost first.
        inner: inside of it, of rows and reduced ones.
    """

    outer: tuple
    long: tuple
    inner: tuple


def lengths(graph: Subgraph) -> tuple[list[int], bool]:
    """The lengths that a part may have, in rising order; and whether what is cut has rows, or their channels, inside.

    There are no lengths where rows can't be shared.
    """
    try:
        space, axes, _ = _read(graph)
        total = math.prod(space.sizes[d] for d in axes.long)
        found = [n for n in range(LEAST, min(MOST, total // 2) + 1) if total % n == 0]
        if found:
            share(graph, found[0])
    except Unsupported:
        return [], False
    return found, bool(axes.inner)


def share(graph: Subgraph, length: int) -> Shared:
    """The kernels for parts of a length.

    Raises:
        Unsupported: rows can't be shared: other reductions than sums, or memory that isn't walked evenly.
    """
    space, axes, laid = _read(graph)
    cut = _Cut(space, axes, length)
    split = Subgraph(
        tuple(cut.spec(s) for s in laid.inputs),
        tuple(map(cut.op, laid.ops)),
        laid.outputs,
    )
    return _Stages(InParts(split, cut.last).result(), cut).shared()


def _read(graph: Subgraph) -> tuple[Space, _Axes, Subgraph]:
    laid = lay_out(graph)
    reduced = {op.kwarg("axes") for op in laid.graph.ops if op.kwarg("axes") is not None}
    depth = max(map(len, reduced), default=0)
    if not depth or reduced != {tuple(range(len(laid.sizes) - depth, len(laid.sizes)))}:
        raise Unsupported("its reductions differ in dimensions")
    space = space_of(graph, laid, depth)
    full = [o for o in space.inputs if all(o.strides)]
    if not full:
        raise Unsupported("no input is as large as its rows")
    lead, steps = len(space.sizes) - depth, full[0].strides
    order = sorted(range(len(steps)), key=lambda d: -steps[d])
    start = next(k for k, d in enumerate(order) if d >= lead)
    end = next((k for k in range(start, len(order)) if order[k] < lead), len(order))
    for first in range(start, end):  # the weights of channels cut these off
        long = order[first:end]
        sizes, strides = [space.sizes[d] for d in long], [[o.strides[d] for d in long] for o in space.operands]
        if len(even_runs(sizes, strides)) == 1:
            return space, _Axes(tuple(order[:first]), tuple(long), tuple(order[end:])), laid.graph
    raise Unsupported("its operands don't lie evenly along the rows")


class _Cut:
    """Brings shapes, operators and operands to the dimensions outer, parts, inner, and `last`: elements of a part."""

    def __init__(self, space: Space, axes: _Axes, length: int) -> None:
        self.space, self.axes, self.length = space, axes, length
        self.parts, rest = divmod(math.prod(space.sizes[d] for d in axes.long), length)
        if rest or self.parts < 2 or length < 2:
            raise Unsupported("the parts of its rows differ in length")
        self.lead = len(space.sizes) - space.depth
        self.part, self.last = len(axes.outer), len(axes.outer) + 1 + len(axes.inner)
        kept = [(d, k) for k, d in enumerate(axes.outer)] + [(d, self.part + 1 + k) for k, d in enumerate(axes.inner)]
        self.place = dict(kept)
        self.row_dims = tuple(self.place[d] for d in range(self.lead))
        self.own = tuple(sorted(k for d, k in kept if d >= self.lead))
        self.sizes = self.shape(space.sizes)

    def shape(self, given: tuple) -> tuple:
        along = [given[d] for d in self.axes.long]
        whole = [self.space.sizes[d] for d in self.axes.long]
        if along != whole and any(n != 1 for n in along):
            raise Unsupported("a value is as long as some of its rows' dimensions")
        pair = (self.parts, self.length) if along == whole else (1, 1)
        outer, inner = ([given[d] for d in some] for some in (self.axes.outer, self.axes.inner))
        return (*outer, pair[0], *inner, pair[1])

    def spec(self, spec: TensorSpec) -> TensorSpec:
        return _dense(self.shape(spec.shape), spec.dtype)

    def op(self, op: Op) -> Op:
        kwargs = tuple((k, (self.part, *self.own, self.last) if k == "axes" else v) for k, v in op.kwargs)
        return replace(op, kwargs=kwargs, out=self.spec(op.out))

    def operand(self, o: Operand) -> Operand:
        step = o.strides[self.axes.long[-1]]
        outer, inner = ([o.strides[d] for d in some] for some in (self.axes.outer, self.axes.inner))
        return replace(o, strides=(*outer, step * self.length, *inner, step))


class _Stages:
    """Cuts an expanded graph behind its sums over parts, and behind those over rows."""

    def __init__(self, graph: Subgraph, cut: _Cut) -> None:
        self.graph, self.cut, self.first = graph, cut, len(graph.inputs)
        self.given = {o.index: cut.operand(o) for o in cut.space.inputs}
        self.results = [(cut.operand(o), v) for o, v in zip(cut.space.outputs, graph.outputs, strict=True)]
        sums = {v for v in self._ops() if graph.op_of(v).name in REDUCTIONS}
        self.partial = {v for v in sums if graph.op_of(v).args[1] == (cut.last,)}
        self.total = sums - self.partial
        self.of_rows = self._behind(self.total)
        if self.partial & self.of_rows:
            raise Unsupported("one sum over its rows needs another one's result")

    def shared(self) -> Shared:
        one = {v for v in self.of_rows if self._is_row(v)}
        full = [(o, v) for o, v in self.results if v not in one]
        if any(self.graph.tensor(v).shape[self.cut.last] == 1 for _, v in full):
            raise Unsupported("a result has one value for each part of a row")
        rest = self._closure([v for _, v in full], one)
        row_values = sorted(rest & one)
        per_row = [(o, v) for o, v in self.results if v in one]
        bridge = sorted(self._closure([*row_values, *(v for _, v in per_row)], self._bridges()) & self._bridges())
        if not bridge:
            raise Unsupported("nothing is summed")
        parts = {v: self._scratch(f"part{v}", tuple(range(self.cut.last))) for v in bridge}
        rows = {v: self._scratch(f"row{v}", self.cut.row_dims, self.graph.tensor(v).dtype) for v in row_values}
        first = self._stage(tuple(range(self.cut.last + 1)), 1, set(), [(parts[v], v) for v in bridge], {})
        order = (*self.cut.row_dims, self.cut.part, *self.cut.own)
        ends = [*((rows[v], v) for v in row_values), *per_row]
        second = self._stage(order, 1 + len(self.cut.own), set(bridge), ends, parts)
        last = self._rest(full, set(row_values), rows) if full else None
        return Shared(levelled(*first), levelled(*second), last)

    def _rest(self, full: list, given: set, rows: dict) -> tuple[Subgraph, Space]:
        steps = full[0][0].strides
        order = tuple(sorted(range(len(steps)), key=lambda d: -steps[d]))
        return self._stage(order, 0, given, full, rows)

    def _stage(self, order: tuple, depth: int, given: set, ends: list, scratch: dict) -> tuple[Subgraph, Space]:
        """What leads to `ends`, pairs of operand and value, from inputs and `given` values; dimensions in `order`."""
        need = self._closure([v for _, v in ends], given)
        reads = sorted(v for v in need if v < self.first or v in given)
        made = sorted(need - set(reads))
        number = {v: k for k, v in enumerate([*reads, *made])}
        known = self.given | scratch

        def operand(o: Operand, index: int) -> Operand:
            return replace(o, strides=tuple(o.strides[d] for d in order), index=index)

        graph = Subgraph(
            tuple(self._turned(self.graph.tensor(v), order) for v in reads),
            tuple(self._op(self.graph.op_of(v), number, order) for v in made),
            tuple(number[v] for _, v in ends),
        )
        inputs = tuple(operand(known[v], k) for k, v in enumerate(reads))
        outputs = tuple(operand(o, k) for k, (o, _) in enumerate(ends))
        return graph, Space(tuple(self.cut.sizes[d] for d in order), inputs, outputs, depth)

    def _op(self, op: Op, number: dict, order: tuple) -> Op:
        args = substitute(op.args, number)
        if op.name in REDUCTIONS:
            args = (args[0], tuple(sorted(order.index(d) for d in op.args[1])), *args[2:])
        return replace(op, args=args, kwargs=substitute(op.kwargs, number), out=self._turned(op.out, order))

    def _turned(self, spec: TensorSpec, order: tuple) -> TensorSpec:
        if any(n != 1 for d, n in enumerate(spec.shape) if d not in order):
            raise Unsupported("a row needs more than sums of its parts")
        return _dense(tuple(spec.shape[d] for d in order), spec.dtype)

    def _scratch(self, name: str, dims: tuple, dtype: str = "float32") -> Operand:
        """Memory for a value over some dimensions; floats as they are computed, in float32."""
        held = compute_dtype(dtype)
        strides, count = [0] * (self.cut.last + 1), 1
        for d in reversed(dims):
            strides[d], count = count, count * self.cut.sizes[d]
        return Operand(name, name, "scratch", 0, 0, TensorSpec((count,), held, (1,)), tuple(strides))

    # -- values
    def _ops(self) -> range:
        return range(self.first, self.first + len(self.graph.ops))

    def _behind(self, sources: set) -> set:
        found = set(sources)
        for v in self._ops():
            if found & set(self.graph.op_of(v).inputs):
                found.add(v)
        return found

    def _is_row(self, value: int) -> bool:
        shape = self.graph.tensor(value).shape
        return all(shape[d] == 1 for d in (self.cut.part, *self.cut.own, self.cut.last))

    def _bridges(self) -> set:
        """Sums over parts as float32 numbers: themselves, or their two halves."""
        halves = {v for v in self._ops() if self.graph.op_of(v).name in (HIGH, LOW)}
        of_parts = {v for v in halves if self.graph.op_of(v).inputs[0] in self.partial}
        return of_parts | {v for v in self.partial if self.graph.tensor(v).dtype == "float32"}

    def _closure(self, wanted: list, given: set) -> set:
        """What `wanted` needs, `given` values and inputs included, but not what those need."""
        need: set = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value not in need:
                need.add(value)
                op = None if value in given else self.graph.op_of(value)
                stack += op.inputs if op else ()
        return need


def _dense(shape: tuple, dtype: str) -> TensorSpec:
    return TensorSpec(shape, dtype, contiguous(shape))
