"""Pieces of generated source that the pointwise and the row template share: signature, loads, stores."""

from collections.abc import Callable

from fusescout.templates.dialect import Dialect
from fusescout.templates.space import Operand


def signature(name: str, operands: tuple, dialect: Dialect) -> str:
    """Head of the prim_func, from one operand for each parameter.

    They are declared as the tensors are; `flat` gives them one dimension.
    """
    lines = ["", "@T.prim_func", f"def {name}("]
    for o in operands:
        if dialect.cpu:  # only addresses are passed
            lines.append(f'    {o.buffer}: T.Tensor(({o.span},), "{dialect.storage(o.dtype)}"),')
        else:
            p = o.param
            lines.append(f'    {o.buffer}_: T.StridedTensor({p.shape}, {p.stride}, "{p.dtype}"),')
    return "\n".join([*lines, "):", ""])


def flat(operands: tuple, dialect: Dialect) -> list:
    """Lines that give each parameter its one-dimensional form (bools as bytes, which have vector loads)."""
    if dialect.cpu:
        return []
    return [f'{o.buffer} = T.Tensor(({o.span},), "{buffer_dtype(o, dialect)}", {o.buffer}_.data)' for o in operands]


def buffer_dtype(o: Operand, dialect: Dialect) -> str:
    """Dtype of an operand's elements where the kernel reads them."""
    return "uint8" if o.dtype == "bool" and not dialect.cpu else dialect.storage(o.dtype)


def loaded(element: str, o: Operand, dialect: Dialect) -> str:
    """Value of a buffer element of `o`."""
    if o.dtype == "bool" and not dialect.cpu:
        return f"let(T.NE({element}, T.uint8(0)))"
    return f"let({dialect.load(element, o.dtype)})"


def stored(value: str, o: Operand, dialect: Dialect) -> str:
    """What to assign to a buffer element of `o`."""
    return f'T.cast({value}, "uint8")' if o.dtype == "bool" and not dialect.cpu else dialect.store(value, o.dtype)


def indent(lines: list, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" for line in lines)


class Cells:
    """Buffers for values too large to be named; a template declares `lines()` above the loop that `emit` writes for."""

    def __init__(self, prefix: str, shape: tuple, at: str, dialect: Dialect) -> None:
        self.prefix, self.shape, self.at, self.dialect = prefix, shape, at, dialect
        self.used: dict = {}

    def __call__(self, value: int) -> str:
        name = self.used.setdefault(value, f"{self.prefix}{value}")
        return f"{name}[{self.at}]"

    def lines(self, allocate: Callable[[object, str], str] | None = None) -> list:
        """Their allocations: tiles of the block, or what `allocate` makes of a shape and a dtype."""
        allocate = allocate or self.dialect.tile
        return [f"{name} = {allocate(self.shape, 'float32')}" for name in self.used.values()]
