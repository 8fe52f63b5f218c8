"""Operands that the copy engine can't load, because their rows don't start at multiples of 16 bytes, made ones it can.

A weight that is a parameter is prepared once with longer rows; of other operands each call makes such a copy, in a
launch of its own ahead of the product. What lies between a row's end and the next one is never read: the copy engine
fills up with zeros on both sides of the product.
"""

import math
from dataclasses import replace

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.dialect import HALF
from fusescout.templates.gemm_batch import indices
from fusescout.templates.gemm_problem import Matrix
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_small import loadable
from fusescout.templates.gemm_source import Writer
from fusescout.templates.prepared_weight import beside
from fusescout.templates.prepared_weight import can_prepare

from fusescout.constants import Split
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.shared_input import Writer as Graph
from fusescout.shared_input import dense
from fusescout.template import Param

ELEMENTS = 8
"""16-bit elements in 16 bytes."""
COPY = """
    with T.Kernel(T.ceildiv(@@count, 1024), threads=256) as (part):
        for i in T.Parallel(1024):
            if part * 1024 + i < @@count:
                @@into[@@place] = @@source[@@place]
"""
SCATTERED = """
    with T.Kernel(T.ceildiv(@@count, 1024), threads=256) as (part):
        tx = T.get_thread_binding()
        for k in T.serial(4):
            i = k * 256 + tx
            if part * 1024 + i < @@count:
                @@into[@@place] = @@source[@@place]
"""
"""Of what begins at any address: neighbouring elements go to neighbouring threads, for a vector can't be read there."""


def can_be_even(p: Problem) -> bool:
    """Whether copies of the operands can be loaded; their elements are counted with 32 bits."""
    operands = (p.x, *p.weights)
    return all(o.dtype in HALF for o in operands) and all(math.prod(_shape(p, o)) < 1 << 31 for o in operands)


def evened(p: Problem) -> Problem:
    """The problem with operands that can be loaded."""
    return replace(p, x=_even(p, p.x), weights=tuple(_even(p, w) for w in p.weights))


def prepared_weight(graph: Subgraph, p: Problem) -> Split | None:
    """The parts of a sub-graph with a weight that can't be loaded as it lies; None if it can, or is no parameter."""
    w = p.w
    if loadable(w) or len(p.weights) > 1 or any(w.batch) or not can_prepare(graph, w.input):
        return None
    write, size = Graph(Subgraph((graph.inputs[w.input],), (), ())), (w.rows, w.columns)
    given = write.emit("as_strided.default", TensorSpec(size, w.dtype, (w.pitch, 1)), Ref(0), size, (w.pitch, 1))
    even = _even(p, w)
    gap = (0, even.pitch - w.columns)
    made = write.emit("constant_pad_nd.default", dense((w.rows, even.pitch), w.dtype), given, gap, 0)
    return beside(graph, w.input, write.subgraph([made]))


def with_prepared(graph: Subgraph, p: Problem) -> Problem:
    """The problem of a steady part: its weight is the last input."""
    return replace(p, weights=(replace(_even(p, p.w), input=len(graph.inputs) - 1),))


def copying(base: type) -> type:
    """A writer that copies what can't be loaded, then does as `base`."""
    return type("Copying", (_Copying, base), {})


def _even(p: Problem, o: Matrix) -> Matrix:
    if loadable(o):
        return o
    rows, columns = (o.columns, o.rows) if o.turned else (o.rows, o.columns)
    pitch = -(-columns // ELEMENTS) * ELEMENTS
    batch: list = []
    matrix = rows * pitch
    for n, step in reversed(list(zip(p.batch, o.batch, strict=True))):
        batch.insert(0, matrix if step else 0)
        matrix *= n if step else 1
    return replace(o, pitch=pitch, batch=tuple(batch), aligned=True)


def _shape(p: Problem, o: Matrix) -> tuple:
    return (*(n for n, s in zip(p.batch, o.batch, strict=True) if s), o.rows, o.columns)


class _Copying(Writer):
    """The copies are scratch; in their place the kernel takes the operands as they lie, named `…_in`."""

    def __init__(self, problem: Problem, config: dict, dialect: object) -> None:
        super().__init__(evened(problem), config, dialect)
        operands = dict(zip(("x", "w0", "w1"), (problem.x, *problem.weights), strict=False))
        self.lying = Writer(problem, config, dialect)
        self.uneven = [name for name, o in operands.items() if not loadable(o)]
        self.unaligned = {f"{name}_in" for name, o in operands.items() if not o.aligned}

    def params(self) -> tuple:
        lying = {q.name: replace(q, name=f"{q.name}_in") for q in self.lying.params() if q.name in self.uneven}
        even = super().params()
        scratch = [replace(q, role="scratch", index=k) for k, q in enumerate(q for q in even if q.name in lying)]
        return (*(lying.get(q.name, q) for q in even), *scratch)

    def source(self, name: str) -> str:
        head, start, body = super().source(name).partition("    with T.Kernel(")
        return head + "".join(f"{self._copy(q)}\n" for q in self.params() if q.name.endswith("_in")) + start + body

    def _copy(self, q: Param) -> str:
        place = ", ".join(indices(q.shape, "(part * 1024 + i)"))
        names = {"into": q.name.removesuffix("_in"), "source": q.name}
        text = SCATTERED if q.name in self.unaligned else COPY
        return schedules.fill(text, count=str(math.prod(q.shape)), place=place, **names)
