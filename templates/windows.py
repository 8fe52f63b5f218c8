"""Reads a sub-graph as pooling with a chain of pointwise operators in front of it and one behind."""

import math
from dataclasses import dataclass

from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import compute_dtype
from fusescout.templates.expression import emit
from fusescout.templates.expression import unsupported
from fusescout.templates.layout import AFFINE
from fusescout.templates.layout import WINDOWS
from fusescout.templates.layout import argument
from fusescout.templates.operators import Unsupported
from fusescout.templates.space import Operand
from fusescout.templates.space import is_dense

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph

VIEWS = ("view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t")
"""Operators whose result says by its strides where it lies in the memory of their argument."""
LARGEST = 256
"""Elements of a window; each is read by a step of a loop."""


@dataclass(frozen=True)
class Window:
    """The window of a pooling operator, one number for each of the last dimensions. `divisor` 0: the elements count."""

    average: bool
    size: tuple
    stride: tuple
    padding: tuple
    dilation: tuple
    counts_padding: bool
    divisor: int

    @property
    def count(self) -> int:
        return math.prod(self.size)

    def sticks_out(self, source: tuple, pooled: tuple, d: int) -> bool:
        """Whether some window reaches over an end of dimension `d` of the pooled ones."""
        last = (pooled[d] - 1) * self.stride[d] - self.padding[d] + (self.size[d] - 1) * self.dilation[d]
        return self.padding[d] > 0 or last >= source[d]


@dataclass(frozen=True)
class Pooling:
    """A sub-graph around one pooling operator.

    Attributes:
        value: its value index; `source` is what it reads.
        front: value indices of the operators in front of it, `behind` of those behind.
        inputs: operands at places of the source, and at places of the result (`here`); strides by dimension.
        outputs: operands of the shape of the result.
        order: dimensions of the result, outermost in memory first.
    """

    graph: Subgraph
    value: int
    source: int
    window: Window
    front: tuple
    behind: tuple
    inputs: tuple
    here: tuple
    outputs: tuple
    order: tuple

    @property
    def shape(self) -> tuple:
        return self.graph.tensor(self.value).shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def operands(self) -> tuple:
        return (*self.inputs, *self.here, *self.outputs)

    @property
    def parameters(self) -> tuple:
        """One operand for each kernel parameter."""
        return tuple({o.buffer: o for o in self.operands}.values())

    def is_side_by_side(self, o: Operand) -> bool:
        """Whether neighbouring elements of the result have neighbouring elements of `o`, at an aligned address."""
        last = self.order[-1]
        pooled = last >= len(self.shape) - len(self.window.size)
        return o.strides[last] == 1 and o.spec.aligned and not (o in self.inputs and pooled)


def read(graph: Subgraph) -> Pooling:
    """The parts of a sub-graph.

    Raises:
        Unsupported: it isn't one pooling operator between pointwise ones, or something else is needed of it.
    """
    first = len(graph.inputs)
    pools = [first + k for k, op in enumerate(graph.ops) if op.name in WINDOWS]
    if len(pools) != 1:
        raise Unsupported(f"it holds {len(pools)} pooling operators, not one")
    value = pools[0]
    op = graph.op_of(value)
    source = op.args[0].to
    shape, pooled = graph.tensor(source).shape, graph.tensor(value).shape
    above = _above(graph, source)
    front = tuple(v for v in sorted(above) if v >= first)
    behind = tuple(first + k for k in range(len(graph.ops)) if first + k not in {*front, value})
    if any(v not in (value, *behind) for v in graph.outputs):
        raise Unsupported("what is in front of the pooling is needed as well")
    if compute_dtype(graph.tensor(source).dtype) != "float32":
        raise Unsupported(f"{op.target} on {graph.tensor(source).dtype}")
    if any(i in front and leaf(graph, i) is None for v in behind for i in graph.op_of(v).inputs):
        raise Unsupported("what is in front of the pooling is needed behind it as well")
    inputs = _operands(graph, (source, *front), shape, "w")
    here = _operands(graph, behind, pooled, "x")
    outputs = tuple(
        Operand(f"out{k}", f"out{k}", "output", v, k, graph.tensor(v), graph.tensor(v).stride)
        for k, v in enumerate(graph.outputs)
    )
    if any(o.spec.shape != pooled or not is_dense(o.spec) for o in outputs) or 0 in (*pooled, *shape):
        raise Unsupported("a result has another shape than the pooling's, or gaps in memory")
    order = tuple(sorted(range(len(pooled)), key=lambda d: (-outputs[0].strides[d], d)))
    window = _window(op, len(shape))
    found = Pooling(graph, value, source, window, front, behind, inputs, here, outputs, order)
    for values, known in ((front, inputs), (behind, here)):
        emit(graph, {o.index: "x" for o in known} | {value: "x"}, Dialect("cpu"), computed(graph, values))
    return found


def computed(graph: Subgraph, values: tuple) -> list:
    """Those of `values` that are no views of inputs."""
    return [v for v in values if leaf(graph, v) is None]


def leaf(graph: Subgraph, value: int) -> int | None:
    """The input that a value is, or is only a view of."""
    op = graph.op_of(value)
    if op is None:
        return value
    return leaf(graph, op.args[0].to) if op.name in VIEWS and isinstance(op.args[0], Ref) else None


def _above(graph: Subgraph, value: int) -> set:
    found, stack = set(), [value]
    while stack:
        v = stack.pop()
        if v not in found:
            found.add(v)
            op = graph.op_of(v)
            stack += op.inputs if op else ()
    return found


def _operands(graph: Subgraph, values: tuple, shape: tuple, prefix: str) -> tuple:
    """What `values` read from memory at a place in `shape`. The first is read itself if it is no operator's result."""
    found: dict = {}
    rank = len(shape)
    for v in values:
        op = graph.op_of(v)
        if leaf(graph, v) is not None:
            if v == values[0] and graph.tensor(v).shape == shape:
                found[v] = graph.tensor(v).stride
            continue
        if reason := unsupported(op, graph):
            raise Unsupported(reason)
        if not _broadcasts(graph.tensor(v).shape, shape):
            raise Unsupported(f"{op.target} has another shape than the pooling")
        own = {a.to for k in AFFINE.get(op.name, ()) if isinstance(a := argument(op, k, ""), Ref)}
        for i in op.inputs:
            if leaf(graph, i) is None:
                continue
            spec = graph.tensor(i)
            if i in own:
                strides = tuple(spec.stride[0] if d == 1 else 0 for d in range(rank))
            elif _broadcasts(spec.shape, shape):
                strides = tuple(0 if n == 1 else s for n, s in zip(spec.shape, spec.stride, strict=True))
                strides = (0,) * (rank - len(strides)) + strides
            else:
                raise Unsupported(f"{op.target} reads a tensor of another shape than the pooling's")
            if found.setdefault(i, strides) != strides:
                raise Unsupported("a tensor is read in two ways")
    operands = []
    for v, strides in found.items():
        k = leaf(graph, v)
        compute_dtype(graph.inputs[k].dtype)
        operands.append(Operand(f"{prefix}{v}", f"in{k}", "input", v, k, graph.inputs[k], strides))
    return tuple(operands)


def _broadcasts(small: tuple, large: tuple) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))


def _window(op: Op, rank: int) -> Window:
    depth = int(op.name[-2])
    if rank < depth:
        raise Unsupported("pooling of too few dimensions")

    def each(position: int, name: str, default) -> tuple:
        found = argument(op, position, name, default)
        found = found if isinstance(found, tuple) else (found,)
        return found * depth if len(found) == 1 else found

    size, average = each(1, "kernel_size", 1), op.name.startswith("avg")
    window = Window(
        average=average,
        size=size,
        stride=each(2, "stride", ()) or size,
        padding=each(3, "padding", 0),
        dilation=(1,) * depth if average else each(4, "dilation", 1),
        counts_padding=bool(argument(op, 5, "count_include_pad", True)),
        divisor=(argument(op, 6, "divisor_override") or 0) if average else 0,
    )
    if window.count > LARGEST:
        raise Unsupported(f"a window of {window.count} elements")
    return window
