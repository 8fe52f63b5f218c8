"""A sub-graph without its views: every value over all axes of its layout (size 1 where it lacks one).

Nothing is left but pointwise operators and reductions over axes. Pieces of unrolled axes are values, inputs and
outputs of their own; only those that an output needs are written out.
"""

import itertools
import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.extremes import plain_extremes
from fusescout.templates.layout import Layout
from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

MOST_OPS = 1024


@dataclass(frozen=True)
class Piece:
    """A view of tensor `index` along the axes: `strides` in elements (0 where it has none), from element `offset`."""

    index: int
    offset: int
    strides: tuple


@dataclass(frozen=True)
class Laid:
    """A sub-graph over axes of `sizes`. Its inputs and outputs are pieces of the original's."""

    graph: Subgraph
    sizes: tuple
    inputs: tuple
    outputs: tuple


def lay_out(graph: Subgraph) -> Laid:
    """`graph` over axes, outermost in memory first; reduced axes come last.

    Raises:
        Unsupported: views that can't be told by axes and few pieces.
    """
    return _Pieces(Layout(plain_extremes(graph))).laid()


class _Pieces:
    """Writes the sub-graph out piece by piece, from its outputs back."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.graph, self.axes = layout, layout.graph, layout.axes
        self.unrolled = {v: self._of(v, unrolled=True) for v in layout.dims}
        self.inputs: dict = {}
        self.ops: list = []
        self.made: dict = {}
        self.order = self._order()
        self.sizes = tuple(self.axes.sizes[a] for a in self.order)

    def _of(self, value: int, unrolled: bool) -> tuple:
        leaves = itertools.chain(*map(self.axes.leaves, self.layout.dims[value]))
        return tuple(a for a in leaves if self.axes.unrolled[a] == unrolled)

    def _order(self) -> list:
        """All walked axes in the order in which the largest tensor lies in memory; reduced ones last."""
        ends = [*self.graph.outputs, *range(len(self.graph.inputs))]
        main = max(ends, key=lambda v: len(self._of(v, unrolled=False)))
        steps = self._strides(main)
        axes = dict.fromkeys(a for v in self.layout.dims for a in self._of(v, unrolled=False))
        last = {a for atoms in self.layout.reduced.values() for a in self.axes.leaves(atoms)}
        if any(self.axes.unrolled[a] for a in last):
            raise Unsupported("it reduces a dimension that is cut into pieces")
        return sorted(axes, key=lambda a: (a in last, -steps.get(a, math.inf)))

    def _strides(self, value: int) -> dict:
        """Elements of memory per step of each axis of an input or output."""
        found = {}
        for dim, stride in zip(self.layout.dims[value], self.graph.tensor(value).stride, strict=True):
            found |= {a: s * stride for a, s in self.axes.strides(dim).items()}
        return found

    def _view(self, value: int, index: int, places: dict) -> Piece:
        strides = self._strides(value)
        offset = sum(p * strides[a] for a, p in places.items())
        return Piece(index, offset, tuple(strides.get(a, 0) for a in self.order))

    def laid(self) -> Laid:
        wanted, pieces = [], []
        for k, value in enumerate(self.graph.outputs):
            for places in self._places(value):
                wanted.append(self.piece(value, places))
                pieces.append(self._view(value, k, places))
        first = len(self.inputs)
        number = {key: k for k, key in enumerate(self.inputs)}  # ops are numbered behind the inputs, known only now
        number |= {("op", k): first + k for k in range(len(self.ops))}
        ops = tuple(
            replace(
                op, args=substitute(op.args, number), kwargs=tuple((k, substitute(v, number)) for k, v in op.kwargs)
            )
            for op in self.ops
        )
        inputs = tuple(self._view(value, value, dict(places)) for _, value, places in self.inputs)
        specs = tuple(self._spec(value) for _, value, _ in self.inputs)
        return Laid(Subgraph(specs, ops, tuple(number[w] for w in wanted)), self.sizes, inputs, tuple(pieces))

    def _places(self, value: int):
        axes = self.unrolled[value]
        for chosen in itertools.product(*(range(self.axes.sizes[a]) for a in axes)):
            yield dict(zip(axes, chosen, strict=True))

    def _spec(self, value: int) -> TensorSpec:
        mine = set(self._of(value, unrolled=False))
        shape = tuple(n if a in mine else 1 for a, n in zip(self.order, self.sizes, strict=True))
        spec = self.graph.tensor(value)
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        return TensorSpec(shape, spec.dtype, strides, spec.requires_grad, spec.aligned)

    def piece(self, value: int, places: dict) -> tuple:
        """Key of one piece of a value."""
        places = {a: p for a, p in places.items() if a in self.unrolled[value]}
        key = (value, tuple(sorted(places.items())))
        if key in self.made:
            return self.made[key]
        if value < len(self.graph.inputs):
            found: tuple = ("in", *key)
            self.inputs[found] = None
        elif value in self.layout.moves:
            found = self.piece(*self.layout.moves[value](places))
        else:
            found = self._compute(value, places)
        self.made[key] = found
        return found

    def _compute(self, value: int, places: dict) -> tuple:
        op = self.graph.op_of(value)
        if value in self.layout.windows:
            return self._pool(op, value, places)
        operands = {v: self.piece(v, places) for v in op.inputs}
        kwargs = substitute(op.kwargs, operands)
        if value in self.layout.reduced:
            axes = self.axes.leaves(self.layout.reduced[value])
            kwargs += (("axes", tuple(sorted(self.order.index(a) for a in axes))),)
        if len(self.ops) >= MOST_OPS:
            raise Unsupported("it has too many pieces")
        self.ops.append(Op(op.target, substitute(op.args, operands), kwargs, self._spec(value)))
        return ("op", len(self.ops) - 1)

    def _pool(self, op: Op, value: int, places: dict) -> tuple:
        """The largest or the mean of the pieces in a window."""
        cuts = self.axes.leaves(self.layout.windows[value])
        averages, spec, source = op.name.startswith("avg"), self._spec(value), op.args[0].to
        window = itertools.product(*(range(self.axes.sizes[a]) for a in cuts))
        found = [self.piece(source, places | dict(zip(cuts, chosen, strict=True))) for chosen in window]
        total = found[0]
        for piece in found[1:]:
            step = "aten.add.Tensor" if averages else "aten.maximum.default"
            self.ops.append(Op(step, (Ref(total), Ref(piece)), (), spec))
            total = ("op", len(self.ops) - 1)
        if averages:
            self.ops.append(Op("aten.div.Tensor", (Ref(total), len(found)), (), spec))
            total = ("op", len(self.ops) - 1)
        return total
