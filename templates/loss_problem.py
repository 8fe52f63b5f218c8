"""Reads a captured sub-graph as a linear whose scores only a cross entropy reads: the GEMM, and the loss of its rows.

Between the two there may be pointwise operators, casts, views that regroup rows, and what causal language models do:
leaving out the last positions, and moving the classes to dimension 1. All of it is written out of the way, so that the
GEMM's rows are the rows of the loss, in order.
"""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.templates import gemm_problem
from fusescout.templates.gemm_problem import GEMMS
from fusescout.templates.gemm_problem import REGROUPS
from fusescout.templates.gemm_problem import Refused
from fusescout.templates.layout import argument

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
LOG_SOFTMAXES = ("log_softmax", "_log_softmax")
COPIES = ("contiguous", "clone", "alias", "detach")
PERMUTES = ("transpose", "permute", "swapaxes")
NONE, MEAN = 0, 1
"""Reductions as ATen numbers them; the third is the sum."""


@dataclass(frozen=True)
class Loss:
    """What happens to the scores: `rows` x `classes` of them, `target` the input that holds each row's class."""

    rows: int
    classes: int
    target: int
    reduction: int
    ignore_index: int
    smoothing: float
    out: TensorSpec


def read(graph: Subgraph) -> tuple:
    """(GEMM problem whose only result are the scores, loss).

    Raises:
        Refused: it is something else, or a form of it that is not covered.
    """
    last = len(graph.inputs) + len(graph.ops) - 1
    op = graph.ops[-1]
    if op.name not in LOSSES or graph.outputs != (last,):
        raise Refused("it does not end in a cross entropy, or more than that leaves it")
    problem = gemm_problem.read(scores_of(graph))
    rows = problem.M * math.prod(problem.batch)
    target = _source(graph, op.args[1].to)
    if target >= len(graph.inputs) or graph.inputs[target].dtype != "int64":
        raise Refused("its classes are not numbers that come from outside")
    if not graph.inputs[target].is_contiguous or graph.inputs[target].numel != rows:
        raise Refused("its classes leave gaps in memory")
    if isinstance(argument(op, 2, "weight"), Ref):
        raise Refused("its classes have weights")
    smoothing = argument(op, 5, "label_smoothing", 0.0) if op.name == "cross_entropy_loss" else 0.0
    reduction, ignored = argument(op, 3, "reduction", MEAN), argument(op, 4, "ignore_index", -100)
    return problem, Loss(rows, problem.N, target, reduction, ignored, float(smoothing), op.out)


def scores_of(graph: Subgraph) -> Subgraph:
    """The GEMM and the pointwise operators behind it, for the rows that the loss reads, in order."""
    return _Scores(graph, graph.ops[-1]).subgraph()


def _source(graph: Subgraph, value: int) -> int:
    """What a value is only another view of."""
    while value >= len(graph.inputs) and graph.op_of(value).name in REGROUPS:
        value = graph.op_of(value).args[0].to
    return value


class _Scores:
    """The sub-graph up to the scores, without the views behind the GEMM."""

    def __init__(self, graph: Subgraph, loss: Op) -> None:
        self.graph, self.first = graph, len(graph.inputs)
        anchors = [self.first + k for k, op in enumerate(graph.ops) if op.name in GEMMS]
        if len(anchors) != 1:
            raise Refused(f"it holds {len(anchors)} matrix products, not 1")
        (self.anchor,) = anchors
        self.inputs, self.lead = list(graph.inputs), graph.tensor(self.anchor).shape[:-1]
        self.classes = graph.tensor(self.anchor).shape[-1]
        self.moved, self.softmax = False, None
        self.path = self._path(loss)

    def _path(self, loss: Op) -> list:
        """Values from the GEMM to what the loss reads."""
        main = {self.anchor}
        for k, op in enumerate(self.graph.ops[:-1]):
            if main & set(op.inputs):
                main.add(self.first + k)
        path = sorted(main)
        if not isinstance(loss.args[0], Ref) or loss.args[0].to != path[-1]:
            raise Refused("its scores are not a matrix product")
        if any(len(self.graph.users(v)) != 1 for v in path):
            raise Refused("its scores are read twice")
        if loss.name == "cross_entropy_loss":
            return path
        self.softmax = self.graph.op_of(path[-1])
        if self.softmax.name not in LOG_SOFTMAXES:
            raise Refused("its loss is not of a softmax's logarithm")
        return path[:-1]

    def subgraph(self) -> Subgraph:
        """The GEMM of the rows that count and the pointwise operators, all in the shape of its result."""
        for value in self.path[1:]:
            self._view(value)
        scores = self.graph.tensor(self.path[-1]).shape
        if len(scores) < 2 or scores[1] != self.classes or not (self.moved or len(scores) == 2):
            raise Refused("its classes are not the GEMM's columns")
        if self.softmax and argument(self.softmax, 1, "dim") % len(scores) != 1:
            raise Refused("its softmax is over something else than the classes")
        name: dict = {k: k for k in range(self.first)}
        ops: list = []
        for k, op in enumerate(self.graph.ops[:-1]):
            value = self.first + k
            if value > self.path[-1]:
                break  # nothing behind the scores makes them
            if value in self.path[1:] and self._is_view(op):
                name[value] = name[op.args[0].to]
                continue
            out = self._shaped(op.out) if value in self.path else op.out
            ops.append(Op(op.target, substitute(op.args, name), substitute(op.kwargs, name), out))
            name[value] = self.first + len(ops) - 1
        return Subgraph(tuple(self.inputs), tuple(ops), (name[self.path[-1]],))

    def _is_view(self, op: Op) -> bool:
        return op.name in (*REGROUPS, *COPIES, *PERMUTES, "slice", "narrow")

    def _shaped(self, spec: TensorSpec) -> TensorSpec:
        shape = (*self.lead, self.classes)
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return replace(spec, shape=shape, stride=strides)

    def _view(self, value: int) -> None:
        """Keep in mind what a view behind the GEMM does; refuse what changes the order of rows."""
        op = self.graph.op_of(value)
        before, after = self.graph.tensor(op.args[0].to).shape if self._is_view(op) else (), op.out.shape
        if op.name in REGROUPS and (self.moved or after[-1:] != (self.classes,)):
            raise Refused(f"{op.name} behind the GEMM regroups its columns")
        if op.name in ("slice", "narrow"):
            self._leave_out(op, before)
        if op.name in PERMUTES:
            order = _order(op, len(before))
            if self.moved or order != (0, len(order) - 1, *range(1, len(order) - 1)):
                raise Refused(f"{op.name} behind the GEMM reorders its rows")
            self.moved = True

    def _leave_out(self, op: Op, before: tuple) -> None:
        """Rows at the end of a dimension that the loss does not need: the GEMM need not compute them."""
        d = argument(op, 1, "dim", 0) % len(before)
        x = self.graph.op_of(self.anchor).args[int(self.graph.op_of(self.anchor).name == "addmm")].to
        if op.out.shape == before:
            return
        step = argument(op, 4, "step", 1) if op.name == "slice" else 1
        if argument(op, 2, "start", 0) not in (0, None) or step != 1:
            raise Refused(f"{op.name} behind the GEMM leaves out its first rows")
        if before != (*self.lead, self.classes) or d == len(before) - 1 or x >= self.first:
            raise Refused(f"{op.name} behind the GEMM takes some of its columns, or of rows that were regrouped")
        self.lead = (*self.lead[:d], op.out.shape[d], *self.lead[d + 1 :])
        self.inputs[x] = replace(self.inputs[x], shape=(*self.lead, self.inputs[x].shape[-1]))


def _order(op: Op, rank: int) -> tuple:
    if op.name == "permute":
        return tuple(d % rank for d in op.args[1])
    order = list(range(rank))
    a, b = op.args[1] % rank, op.args[2] % rank
    order[a], order[b] = b, a
    return tuple(order)
