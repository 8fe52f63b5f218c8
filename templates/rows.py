"""Reads a sub-graph as work on rows: pointwise segments with reductions over whole rows between them.

Every value gets a level: how many reductions must have run before it can be computed. What is then reduced over the
rows themselves, such as the mean of a loss, is a second stage: one row made of a value per row of the first.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates.expansions import PICK
from fusescout.templates.expansions import RULES
from fusescout.templates.expansions import Expansion
from fusescout.templates.expression import unsupported
from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import lay_out
from fusescout.templates.space import Operand
from fusescout.templates.space import Space
from fusescout.templates.space import space_of

from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

REDUCTIONS = {"sum": "sum", "amax": "max", "amin": "min", "head": "head", "sumexp": "sumexp"}


@dataclass(frozen=True)
class Reduction:
    """Value `value` is the `kind` ("sum", "max", "min", "head", "sumexp") of value `operand` over each row.

    Attributes:
        top: for "sumexp", the value that is the operand's maximum, found in the same pass.
    """

    value: int
    operand: int
    kind: str
    top: int | None = None


@dataclass(frozen=True)
class Rows:
    """A sub-graph of primitive operators over rows.

    Attributes:
        graph: inputs, primitive ops and outputs; reductions among the ops.
        space: its iteration space, in which the last `space.depth` dimensions make a row.
        reductions: in order, by value.
        levels: level of each value.
        row_values: values that have one element per row.
    """

    graph: Subgraph
    space: Space
    reductions: dict
    levels: tuple
    row_values: frozenset

    @property
    def columns(self) -> int:
        return math.prod(self.space.sizes[len(self.space.sizes) - self.space.depth :])

    @property
    def rows(self) -> int:
        return math.prod(self.space.sizes[: len(self.space.sizes) - self.space.depth])

    @property
    def last_level(self) -> int:
        return max(self.levels)


def read(graph: Subgraph, walked: bool, cpu: bool) -> tuple:
    """The stages of `graph`: one `Rows`, or two.

    Args:
        walked: rows don't fit into registers, so each pass reads them again.
        cpu: for the CPU.

    Raises:
        Unsupported: an operator that is neither pointwise nor a reduction of whole rows, or rows that differ.
    """
    laid = lay_out(graph)
    axes = {op.kwarg("axes") for op in laid.graph.ops if op.kwarg("axes") is not None}
    if not axes:
        raise Unsupported("it has no reduction over rows")
    depth = max(map(len, axes))
    if axes != {tuple(range(len(laid.sizes) - depth, len(laid.sizes)))} or not depth:
        raise Unsupported("its reductions differ in shape or dimensions, or reduce one element")
    for op in laid.graph.ops:
        if op.name not in RULES and (reason := unsupported(op, laid.graph)):
            raise Unsupported(reason)
    space = space_of(graph, laid, depth)
    return stages(Expansion(laid.graph, walked, cpu).result(), space)


def stages(graph: Subgraph, space: Space) -> tuple:
    """Primitive operators over `space`, cut in front of the reductions over rows, if there are any."""
    rank, first = len(space.sizes), len(graph.inputs)
    lead = rank - space.depth
    late: set = set()
    for k, op in enumerate(graph.ops):
        over_rows = op.name in REDUCTIONS and op.args[1][0] < lead
        if over_rows and op.args[1] != tuple(range(lead)):
            raise Unsupported("it reduces some of its rows' dimensions")
        if over_rows or late & set(op.inputs):
            late.add(first + k)
    outs = list(zip(space.outputs, graph.outputs, strict=True))
    if any(lead and not all(o.strides[:lead]) for o, v in outs if v not in late):
        raise Unsupported("its outputs differ in shape")
    if not late:
        return (levelled(graph, space),)
    if any(v < first for value in late for v in graph.op_of(value).inputs):
        raise Unsupported("an input is needed behind a reduction over the rows")
    bridge = sorted({v for value in late for v in graph.op_of(value).inputs} - late)
    if any(n != 1 for v in bridge for n in graph.tensor(v).shape[lead:]):
        raise Unsupported("it reduces rows to one")
    early = [v for v in range(first, first + len(graph.ops)) if v not in late]
    number = {v: v for v in range(first)} | {v: first + k for k, v in enumerate(early)}
    one = Subgraph(
        graph.inputs,
        tuple(_renumbered(graph.op_of(v), number) for v in early),
        (*(number[v] for _, v in outs if v not in late), *(number[v] for v in bridge)),
    )
    row_sizes = space.sizes[:lead]
    scratch = [_scratch(k, graph.tensor(v), row_sizes, space.depth) for k, v in enumerate(bridge)]
    kept = tuple(o for o, v in outs if v not in late)
    first_space = replace(space, outputs=(*kept, *scratch))
    number = {v: k for k, v in enumerate(bridge)} | {v: len(bridge) + k for k, v in enumerate(sorted(late))}
    two = Subgraph(
        tuple(_rows_only(graph.tensor(v), lead) for v in bridge),
        tuple(
            replace(op, out=_rows_only(op.out, lead))
            for op in (_renumbered(graph.op_of(v), number) for v in sorted(late))
        ),
        tuple(number[v] for _, v in outs if v in late),
    )
    second_space = Space(
        row_sizes,
        tuple(replace(o, strides=o.strides[:lead], index=k) for k, o in enumerate(scratch)),
        tuple(replace(o, strides=o.strides[:lead]) for o, v in outs if v in late),
        lead,
    )
    return levelled(one, first_space), levelled(two, second_space)


def _renumbered(op, number: dict):
    return replace(op, args=substitute(op.args, number), kwargs=substitute(op.kwargs, number))


def _rows_only(spec: TensorSpec, lead: int) -> TensorSpec:
    return replace(spec, shape=spec.shape[:lead], stride=spec.stride[:lead])


def _scratch(k: int, spec: TensorSpec, sizes: tuple, depth: int) -> Operand:
    """Memory for one value per row."""
    strides = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    count = math.prod(sizes)
    held = TensorSpec((count,), spec.dtype, (1,))
    return Operand(f"row{k}", f"row{k}", "scratch", k, k, held, (*strides, *[0] * depth))


def levelled(graph: Subgraph, space: Space) -> Rows:
    """Primitive operators with reductions over the last dimensions of a space, by how many must have run before."""
    lead = len(space.sizes) - space.depth
    reductions: dict = {}
    levels: list = []
    row_values: set = set()
    for value in range(len(graph.inputs) + len(graph.ops)):
        op = graph.op_of(value)
        if op is None:
            levels.append(0)
        elif op.name in REDUCTIONS:
            top = op.args[3].to if op.name == "sumexp" else None
            reductions[value] = Reduction(value, op.args[0].to, REDUCTIONS[op.name], top)
            levels.append(levels[op.args[0].to] + 1)
        else:
            levels.append(max((levels[v] for v in op.inputs), default=0))
        own = op is None or value in reductions or op.name == PICK
        from_row = own or all(v in row_values for v in op.inputs)
        if all(n == 1 for n in graph.tensor(value).shape[lead:]) and from_row:
            row_values.add(value)
    return Rows(graph, space, reductions, tuple(levels), frozenset(row_values))
