"""The iteration space of a template: which element of each operand belongs to which step.

Its dimensions are the axes of a sub-graph (`pieces.py`), in the order in which its largest tensor lies in memory, so
that a flat walk goes through that from front to back. Each operand is known by one stride per dimension (0 where it
lacks it), and its address by a text over the flat position.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import Laid

from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.template import Param


@dataclass(frozen=True)
class Operand:
    """A piece of a kernel parameter in the iteration space: `strides[k]` elements per step of dimension k.

    Attributes:
        name: its own name.
        buffer: name of the parameter; several pieces of one tensor share it.
        index: number of the value it is, in the sub-graph without views, or of that sub-graph's output.
        tensor: number of the input, output or scratch tensor it is a piece of.
        spec: of that tensor.
        offset: elements in front of it.
    """

    name: str
    buffer: str
    role: str
    index: int
    tensor: int
    spec: TensorSpec
    strides: tuple
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def is_scalar(self) -> bool:
        return not any(self.strides)

    @property
    def span(self) -> int:
        """Elements of the tensor from the first to the last one touched, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.spec.shape, self.spec.stride, strict=True))

    @property
    def param(self) -> Param:
        shape, stride = (self.spec.shape, self.spec.stride) if self.spec.shape else ((1,), (1,))
        return Param(self.buffer, self.role, self.tensor, shape, stride, self.dtype)


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
    def parameters(self) -> tuple:
        """One operand for each kernel parameter."""
        return tuple({o.buffer: o for o in self.operands}.values())

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def at(self, o: Operand, position: str) -> str:
        """Text of an operand's element at a flat position."""
        return f"{o.buffer}[{_shifted(address(position, self.sizes, o.strides), o.offset)}]"

    def element(self, o: Operand, row: str, column: str) -> str:
        """Text of an operand's element at a row and a place in it."""
        cut = len(self.sizes) - self.depth
        parts = (address(row, self.sizes[:cut], o.strides[:cut]), address(column, self.sizes[cut:], o.strides[cut:]))
        return f"{o.buffer}[{_shifted(' + '.join(p for p in parts if p != '0') or '0', o.offset)}]"

    def per_row(self, o: Operand) -> bool:
        """Whether an operand has one element per row."""
        return not any(o.strides[len(self.sizes) - self.depth :])

    def collapsed(self) -> "Space":
        """The same space with neighbouring dimensions merged where all operands allow it."""
        groups = even_runs(self.sizes, [o.strides for o in self.operands])
        sizes = tuple(math.prod(self.sizes[k] for k in g) for g in groups)

        def merged(o: Operand) -> Operand:
            return replace(o, strides=tuple(o.strides[g[-1]] for g in groups))

        return Space(sizes, tuple(map(merged, self.inputs)), tuple(map(merged, self.outputs)))


def space_of(graph: Subgraph, laid: Laid, depth: int = 0) -> Space:
    """The space of a sub-graph.

    Args:
        graph: as captured.
        laid: the same without views.
        depth: so many last dimensions make a row; an output may have one element per row, or be a scalar.

    Raises:
        Unsupported: an output that doesn't fill its memory, or that lacks some dimensions.
    """
    lead = len(laid.sizes) - depth
    for spec in graph.output_specs:
        if not is_dense(spec):
            raise Unsupported(f"its output {spec} leaves gaps in memory or overlaps itself")
    for piece in laid.outputs:
        if not _fills(piece.strides[:lead], depth > 0) or not _fills(piece.strides[lead:], True):
            raise Unsupported("its outputs differ in shape")

    def operands(kind: str, role: str, pieces: tuple, specs: tuple) -> tuple:
        shared = [p.index for p in pieces]
        return tuple(
            Operand(
                f"{kind}{p.index}" if shared.count(p.index) == 1 else f"{kind}{p.index}_{k}",
                f"{kind}{p.index}", role, k, p.index, specs[p.index], p.strides, p.offset,
            )
            for k, p in enumerate(pieces)
        )  # fmt: skip

    inputs = operands("in", "input", laid.inputs, graph.inputs)
    return Space(laid.sizes, inputs, operands("out", "output", laid.outputs, graph.output_specs), depth)


def _fills(strides: tuple, or_lacks: bool) -> bool:
    return all(strides) or (or_lacks and not any(strides))


def _shifted(address: str, offset: int) -> str:
    return address if not offset else str(offset) if address == "0" else f"{address} + {offset}"


def address(position: str, sizes: tuple, strides: tuple) -> str:
    """Text of an element's offset, from the text of its flat position in a space of `sizes`."""
    groups = even_runs(sizes, [strides])
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


def even_runs(sizes: tuple, strides: list) -> list:
    """Runs of neighbouring dimensions that every set of strides walks evenly."""
    groups: list = []
    for k in range(len(sizes)):
        if groups and all(s[groups[-1][-1]] == sizes[k] * s[k] for s in strides):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def is_dense(spec: TensorSpec) -> bool:
    """Whether a tensor fills its memory, element by element, in some order of its dimensions."""
    expected = 1
    for stride, n in sorted((s, n) for n, s in zip(spec.shape, spec.stride, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True
