"""The iteration space of a template: which element of each operand belongs to which step.

Every value of a pointwise region lives in one broadcast shape. Its dimensions are put in the order in which the first
output lies in memory, so that a flat walk writes that output from front to back; each operand is then known by one
stride per dimension (0 where it is broadcast), and its address by a text over the flat position.
"""

import math
from dataclasses import dataclass

from fusescout.templates.operators import Unsupported

from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.template import Param


@dataclass(frozen=True)
class Operand:
    """A kernel parameter in the iteration space: `strides[k]` elements per step of dimension k."""

    name: str
    role: str
    index: int
    spec: TensorSpec
    strides: tuple

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def is_scalar(self) -> bool:
        return not any(self.strides)

    @property
    def span(self) -> int:
        """Elements from the first to the last one touched, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.spec.shape, self.spec.stride, strict=True))

    @property
    def param(self) -> Param:
        shape, stride = (self.spec.shape, self.spec.stride) if self.spec.shape else ((1,), (1,))
        return Param(self.name, self.role, self.index, shape, stride, self.dtype)


@dataclass(frozen=True)
class Space:
    """`sizes` of the dimensions, outermost first (none is 1), and the operands. The last `depth` make a row."""

    sizes: tuple
    inputs: tuple
    outputs: tuple
    depth: int = 0

    @property
    def operands(self) -> tuple:
        return self.inputs + self.outputs

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def offset(self, o: Operand, row: str, column: str) -> str:
        """Text of an operand's offset at a row and a place in it."""
        cut = len(self.sizes) - self.depth
        parts = (address(row, self.sizes[:cut], o.strides[:cut]), address(column, self.sizes[cut:], o.strides[cut:]))
        return " + ".join(p for p in parts if p != "0") or "0"

    def per_row(self, o: Operand) -> bool:
        """Whether an operand has one element per row."""
        return not any(o.strides[len(self.sizes) - self.depth :])

    def collapsed(self) -> "Space":
        """The same space with neighbouring dimensions merged where all operands allow it."""
        groups = _groups(self.sizes, [o.strides for o in self.operands])
        sizes = tuple(math.prod(self.sizes[k] for k in g) for g in groups)

        def merged(o: Operand) -> Operand:
            return Operand(o.name, o.role, o.index, o.spec, tuple(o.strides[g[-1]] for g in groups))

        return Space(sizes, tuple(map(merged, self.inputs)), tuple(map(merged, self.outputs)))


def space_of(graph: Subgraph, shape: tuple | None = None, depth: int = 0) -> Space:
    """The space of `graph`'s outputs.

    Args:
        shape: the full shape; by default that of the outputs, which then must agree.
        depth: so many last dimensions keep their order and place (rows).

    Raises:
        Unsupported: outputs of different shapes, or one that doesn't fill its memory.
    """
    if shape is None:
        shape = graph.tensor(graph.outputs[0]).shape
        if any(graph.tensor(v).shape != shape for v in graph.outputs):
            raise Unsupported("its outputs differ in shape")
    for value in graph.outputs:
        spec = graph.tensor(value)
        if not _dense(spec):
            raise Unsupported(f"its output {spec} leaves gaps in memory or overlaps itself")
    if 0 in shape:
        raise Unsupported("its output is empty: there is nothing to compute")
    channels = channel_inputs(graph)
    inputs = [broadcast_strides(spec, shape, channels.get(k)) for k, spec in enumerate(graph.inputs)]
    outputs = [broadcast_strides(graph.tensor(v), shape) for v in graph.outputs]
    first = outputs[0]
    lead = len(shape) - depth
    order = sorted(range(lead), key=lambda d: -first[d])
    order = [d for d in (*order, *range(lead, len(shape))) if shape[d] != 1]

    def operand(name: str, role: str, index: int, spec: TensorSpec, strides: tuple) -> Operand:
        return Operand(name, role, index, spec, tuple(strides[d] for d in order))

    return Space(
        tuple(shape[d] for d in order),
        tuple(operand(f"in{k}", "input", k, graph.inputs[k], strides) for k, strides in enumerate(inputs)),
        tuple(
            operand(f"out{k}", "output", k, graph.tensor(graph.outputs[k]), strides)
            for k, strides in enumerate(outputs)
        ),
        sum(d >= lead for d in order),
    )


def channel_inputs(graph: Subgraph) -> dict:
    """Inputs that line up with dimension 1 (a batch norm's), and the rank of what they are lined up with.

    Raises:
        Unsupported: one is computed, or used elsewhere with the usual alignment.
    """
    found: dict = {}
    others: set = set()
    for op in graph.ops:
        own = [a.to for a in op.args[1:5] if isinstance(a, Ref)] if op.name == "batch_norm" else []
        others |= set(op.inputs) - set(own)
        for value in own:
            if value >= len(graph.inputs):
                raise Unsupported("a batch norm's statistics or weights are computed in the chain")
            found[value] = len(op.out.shape)
    found = {value: rank for value, rank in found.items() if rank > 2}
    if others & set(found) or (found and len(graph.tensor(graph.outputs[0]).shape) not in found.values()):
        raise Unsupported("a batch norm's statistics are also used with another alignment")
    return found


def broadcast_strides(spec: TensorSpec, shape: tuple, channel_rank: int | None = None) -> tuple:
    """Strides of an input expanded to `shape`: 0 where it is broadcast."""
    dims = list(zip(spec.shape, spec.stride, strict=True))
    if channel_rank is not None:
        dims += [(1, 0)] * (channel_rank - 2)
    if len(dims) > len(shape):
        if any(n != 1 for n, _ in dims[: len(dims) - len(shape)]):
            raise Unsupported("an input is larger than the output")
        dims = dims[len(dims) - len(shape) :]
    dims = [(1, 0)] * (len(shape) - len(dims)) + dims
    if any(n not in (1, m) for (n, _), m in zip(dims, shape, strict=True)):
        raise Unsupported("an input is larger than the output")
    return tuple(0 if n == 1 else s for n, s in dims)


def address(position: str, sizes: tuple, strides: tuple) -> str:
    """Text of an element's offset, from the text of its flat position in a space of `sizes`."""
    groups = _groups(sizes, [strides])
    terms = []
    inner = math.prod(sizes)
    for count, group in enumerate(groups):
        n, stride = math.prod(sizes[k] for k in group), strides[group[-1]]
        inner //= n
        if stride == 0:
            continue
        text = position if inner == 1 else f"({position}) // {inner}"
        text = text if count == 0 else f"({text}) % {n}"
        terms.append(text if stride == 1 else f"({text}) * {stride}")
    return " + ".join(terms) or "0"


def _groups(sizes: tuple, strides: list) -> list:
    """Runs of neighbouring dimensions that every set of strides walks evenly."""
    groups: list = []
    for k in range(len(sizes)):
        if groups and all(s[groups[-1][-1]] == sizes[k] * s[k] for s in strides):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def _dense(spec: TensorSpec) -> bool:
    expected = 1
    for stride, n in sorted((s, n) for n, s in zip(spec.shape, spec.stride, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True
