"""ATen pointwise operators as TileLang expressions.

Floats are computed in float32 and rounded where a value is stored, never in between: a cast down and up again inside a
chain costs accuracy and buys nothing. Integers, bools and comparisons keep their dtypes. NaN and ±inf take the way
they take in eager: no `max` that drops NaN, no x * sigmoid(x) where it would turn an eager 0 into NaN.
"""

import re
from collections.abc import Callable
from collections.abc import Iterable

from fusescout.templates.activations import ACTIVATIONS
from fusescout.templates.dialect import E4M3
from fusescout.templates.dialect import NARROW
from fusescout.templates.dialect import Dialect
from fusescout.templates.operators import OPERATORS as GENERAL
from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

OPERATORS = {**GENERAL, **ACTIVATIONS}
FLOAT = ("float32", *NARROW)
INT = ("int64", "int32", "int16", "int8", "uint8")

LARGEST_E4M3 = 448.0
LARGEST = 2000
"""TileLang's analysis copies a named value into every use; a value of more terms than this goes through a buffer."""


def compute_dtype(dtype: str) -> str:
    """The dtype a value of `dtype` has inside a kernel."""
    if dtype in FLOAT:
        return "float32"
    if dtype in INT or dtype == "bool":
        return dtype
    raise Unsupported(f"{dtype} is not computed in TileLang kernels here")


class Writer:
    """Writes the lines of one kernel body: one assignment per operator, plus the helpers it needs."""

    def __init__(self, graph: Subgraph, values: dict, dialect, cells: Callable | None = None) -> None:
        self.graph, self.values, self.dialect, self.cells = graph, dict(values), dialect, cells
        self.lines: list = []
        self.sizes: dict = {}
        self.op: Op = None
        self.index = 0

    def write(self, index: int) -> None:
        """Append the lines of the op that makes value `index`."""
        self.op, self.index, self.helpers = self.graph.op_of(index), index, 0
        self.need_quantised()
        text = OPERATORS[self.op.name](self)
        self.assign(f"v{index}", text)
        self.values[index] = f"v{index}"
        if self.sizes[f"v{index}"] <= LARGEST or self.out != "float32":
            return
        if self.cells is None:
            raise Unsupported("its values are used in one another so often that TileLang would not come to an end")
        self.values[index] = self.cells(index)
        self.lines.append(f"{self.values[index]} = v{index}")

    def assign(self, name: str, text: str) -> None:
        """Append `name = text` and count the terms it stands for."""
        self.lines.append(f"{name} = let({text})")
        self.sizes[name] = 1 + sum(self.sizes.get(used, 0) for used in re.findall(r"\bv\d+(?:_\d+)?\b", text))

    # -- arguments
    def arg(self, position: int, name: str = "", default=None):
        """An argument as it is in the graph, positional or by name."""
        if position < len(self.op.args):
            return self.op.args[position]
        return self.op.kwarg(name, default)

    @property
    def out(self) -> str:
        """Compute dtype of the result."""
        if not isinstance(self.op.out, TensorSpec):
            raise Unsupported(f"{self.op.target} gives more than one tensor")
        return compute_dtype(self.op.out.dtype)

    def dtype_of(self, arg) -> str:
        if isinstance(arg, Ref):
            return compute_dtype(self.graph.tensor(arg.to).dtype)
        return "bool" if isinstance(arg, bool) else "int64" if isinstance(arg, int) else "float32"

    def common(self, *args) -> str:
        """Dtype in which eager compares or combines these arguments."""
        tensors = [self.dtype_of(a) for a in args if isinstance(a, Ref)]
        every = [self.dtype_of(a) for a in args]
        if "float32" in every:
            return "float32"
        tensors = [d for d in tensors if d != "bool"] or [d for d in every if d != "bool"]
        if not tensors:
            return "bool"
        return tensors[0] if len(set(tensors)) == 1 else "int64"

    def cast(self, text: str, dtype: str, to: str) -> str:
        if dtype == to:
            return text
        if to == "bool":
            return f"T.NE({text}, {self.literal(0, dtype)})"
        return f'T.cast({text}, "{to}")'

    def literal(self, value, dtype: str) -> str:
        if dtype == "float32":
            return self.dialect.f32(value)
        if dtype == "bool":
            return f"T.bool({bool(value)})"
        if isinstance(value, float) and value != int(value):
            raise Unsupported(f"{value} is not a whole number for {dtype}")
        return f"T.{dtype}({int(value)})"

    def value(self, arg, dtype: str | None = None) -> str:
        """Text of an argument, a tensor or a number, in `dtype` (default: that of the result)."""
        dtype = dtype or self.out
        if isinstance(arg, Ref):
            return self.cast(self.values[arg.to], self.dtype_of(arg), dtype)
        if isinstance(arg, bool | int | float):
            return self.literal(arg, dtype)
        raise Unsupported(f"argument {arg!r} of {self.op.target}")

    def x(self, position: int = 0, name: str = "", default=None) -> str:
        """Text of argument `position` in the result's dtype."""
        return self.value(self.arg(position, name, default))

    def number(self, position: int, name: str, default):
        """A plain number argument, not a tensor."""
        found = self.arg(position, name, default)
        if isinstance(found, Ref) or not isinstance(found, bool | int | float):
            raise Unsupported(f"{self.op.target} with {name} = {found!r}")
        return found

    def let(self, text: str) -> str:
        """Name a helper value that is used more than once."""
        self.helpers += 1
        name = f"v{self.index}_{self.helpers}"
        self.assign(name, text)
        return name

    def f(self, value: float) -> str:
        return self.dialect.f32(value)

    def need_quantised(self) -> None:
        """8 bits are for results, clamped to what they hold: frameworks differ in what becomes of larger numbers."""
        if not isinstance(self.op.out, TensorSpec) or self.op.out.dtype != E4M3:
            return
        source = self.op.args[0]
        if isinstance(source, Ref) and self.graph.tensor(source.to).dtype == E4M3:
            return
        if any(self.graph.op_of(u).out.dtype != E4M3 for u in self.graph.users(self.index)):
            raise Unsupported("values are rounded to 8 bits in the middle of it")
        clamp = self.graph.op_of(source.to) if isinstance(source, Ref) else None
        limits = (clamp.args[1:3] if clamp and clamp.name == "clamp" else ()) or (None,)
        if len(limits) != 2 or not all(isinstance(v, float | int) and abs(v) <= LARGEST_E4M3 for v in limits):
            raise Unsupported("values that are not clamped to ±448 are made 8-bit floats")

    def need_float(self) -> None:
        if self.out != "float32":
            raise Unsupported(f"{self.op.target} on {self.out}")


def unsupported(op: Op, graph: Subgraph) -> str | None:
    """Why `op` can't be written as an expression, or None."""
    if op.name not in OPERATORS:
        return f"{op.target} is not a pointwise operator these templates know"
    try:
        writer = Writer(graph, dict.fromkeys(range(len(graph.inputs) + len(graph.ops)), "x"), Dialect("cpu"))
        writer.write(len(graph.inputs) + next(k for k, o in enumerate(graph.ops) if o is op))
    except Unsupported as reason:
        return str(reason)
    return None


def emit(graph: Subgraph, values: dict, dialect, only: Iterable[int], cells: Callable | None = None) -> tuple:
    """Lines that compute the ops with value indices `only`, in order, and the texts of all values then known.

    Args:
        values: text of each value already there, by index: float32 for all float dtypes, else the value's own dtype.
            A text is used as an operand, perhaps several times: a name or a call, not a sum.
        only: value indices of pointwise ops; what they read is in `values` or comes before.
        cells: makes a float32 buffer element for a value that grows too large, and gives its text. Without it such
            chains raise `Unsupported`.
    """
    writer = Writer(graph, values, dialect, cells)
    for index in only:
        writer.write(index)
    return writer.lines, writer.values
