"""A linear with its cross entropy over some rows at a time: the scores of one chunk are in memory, not those of all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import dense
from fusescout.contenders.framework.surgery import ints
from fusescout.contenders.framework.surgery import splice
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute
from fusescout.nodekinds import REGROUPS
from fusescout.regions.losses import PRODUCTS
from fusescout.regions.rows import LOSSES

CHUNKS = 8
NONE, MEAN = 0, 1
LAST_MOVED = frozenset({"transpose", "permute"})
WITHOUT_WORK = REGROUPS | LAST_MOVED | {"contiguous", "clone"}


def chunked_loss(graph: Subgraph) -> Step | None:
    """linear, pointwise operators on its scores, cross entropy of class numbers: the same `CHUNKS` times in turn."""
    loss, scores = graph.ops[-1], graph.ops[-1].inputs[:1]
    path = _path(graph, scores[0]) if loss.name in LOSSES and scores else []
    if not path or graph.outputs != (len(graph.inputs) + len(graph.ops) - 1,) or not _is_plain(graph, loss, path):
        return None
    product, target = graph.op_of(path[0]), graph.tensor(loss.inputs[1])
    assert product is not None
    if target.numel < 2 * CHUNKS or target.dtype != "int64":
        return None
    writer = _Writer(graph, path, loss, target.numel)
    writer.write(product)
    return "cross_entropy in chunks", splice(graph, {*path, graph.outputs[0]}, graph.outputs[0], writer.ops)


def _path(graph: Subgraph, value: int) -> list[int]:
    """Values from the product to `value`, if each is made of the one before it and nobody else reads it."""
    path: list[int] = []
    while (op := graph.op_of(value)) is not None and len(graph.users(value)) == 1 and value not in graph.outputs:
        path.insert(0, value)
        if op.name in PRODUCTS:
            return path
        shape = graph.tensor(value).shape
        same = [i for i in op.inputs if graph.tensor(i).shape == shape]
        value = op.inputs[0] if op.name in (*WITHOUT_WORK, "slice") or not same else same[0]
    return []


def _is_plain(graph: Subgraph, loss: Op, path: list[int]) -> bool:
    """Whether a row's loss needs nothing of other rows: no operand has a value for each row, no class a weight."""
    product = graph.op_of(path[0])
    assert product is not None
    classes = graph.tensor(path[0]).shape[-1]
    weight, *biases = [graph.tensor(i) for i in _factors(product)[1:]]
    if len(weight.shape) != 2 or any(b.numel not in (1, classes) for b in biases):
        return False
    regrouped = moved = False
    for before, value in pairwise(path):
        op, shape = graph.op_of(value), graph.tensor(before).shape
        assert op is not None
        others = [graph.tensor(i) for i in op.inputs if i != before]
        if any(s.numel not in (1, classes) or math.prod(s.shape[:-1]) != 1 for s in others):
            return False
        if op.name in REGROUPS:
            regrouped = True
            if moved or graph.tensor(value).shape[-1] != classes:
                return False
        elif op.name == "slice" and (regrouped or moved or graph.tensor(value).shape[-1] != classes):
            return False
        elif op.name in LAST_MOVED:
            if moved or not _moves_last(op, len(shape)):
                return False
            moved = True
    scores = graph.tensor(path[-1]).shape
    weighted = len(loss.args) > 2 and loss.args[2] is not None
    return not weighted and not loss.kwargs and scores[1:2] == (classes,) and (moved or len(scores) == 2)


def _factors(product: Op) -> list[int]:
    """Values of input, weight and, if there is one, bias."""
    found = [int(a.to) for a in product.args if isinstance(a, Ref)]
    return [*found[1:], found[0]] if product.name == "addmm" else found


def _moves_last(op: Op, rank: int) -> bool:
    """Whether it brings the last dimension to place 1 and leaves the others in order."""
    if op.name == "permute":
        return [d % rank for d in ints(op.args[1])] == [0, rank - 1, *range(1, rank - 1)]
    return rank == 3 and {d % rank for d in ints(op.args[1:])} == {1, 2}


@dataclass
class _Writer:
    """Collects the operators; `Ref(-k)` is the k-th of them."""

    graph: Subgraph
    path: list[int]
    loss: Op
    rows: int
    ops: list[Op] = field(default_factory=list)

    def add(self, target: str, args: tuple[Any, ...], out: TensorSpec, **kwargs: Any) -> Ref:
        self.ops.append(Op(target, args, tuple(kwargs.items()), out))
        return Ref(-len(self.ops))

    def write(self, product: Op) -> None:
        at = 1 if product.name == "addmm" else 0
        x, rows = self._rows(product, at), self.rows
        classes = self.add("aten.view.default", (self.loss.args[1], (rows,)), dense((rows,), "int64"))
        width, step = self.graph.tensor(product.inputs[at]).shape[-1], -(-rows // CHUNKS)
        parts = []
        for start in range(0, rows, step):
            end = min(start + step, rows)
            cut = self.add("aten.slice.Tensor", (x, 0, start, end), dense((end - start, width), self._dtype(product)))
            label = self.add("aten.slice.Tensor", (classes, 0, start, end), dense((end - start,), "int64"))
            parts.append(self._chunk(product, at, cut, label, end - start))
        out = self.graph.output_specs[0]
        each = self.add("aten.cat.default", (tuple(parts), 0), dense((rows,), out.dtype))
        self._reduce(each, classes, out)

    def _dtype(self, product: Op) -> str:
        return product.out.dtype if isinstance(product.out, TensorSpec) else ""

    def _rows(self, product: Op, at: int) -> Ref:
        """The product's input, less what is left out of its scores, as a matrix."""
        x = Ref(product.inputs[at])
        spec = self.graph.tensor(int(x.to))
        for value in self.path:
            op = self.graph.op_of(value)
            if op is not None and op.name == "slice":
                kept = self.graph.tensor(value).shape[: len(spec.shape) - 1]
                spec = dense((*kept, spec.shape[-1]), spec.dtype)
                x = self.add(op.target, (x, *op.args[1:]), spec)
        shape = (math.prod(spec.shape[:-1]), spec.shape[-1])
        return self.add("aten.reshape.default", (x, shape), dense(shape, spec.dtype))

    def _chunk(self, product: Op, at: int, cut: Ref, label: Ref, count: int) -> Ref:
        """Losses of one chunk's rows."""
        shape = (count, self.graph.tensor(self.path[0]).shape[-1])
        args = (*product.args[:at], cut, *product.args[at + 1 :])
        value = self.add(product.target, args, dense(shape, self._dtype(product)))
        for before, index in pairwise(self.path):
            op = self.graph.op_of(index)
            assert op is not None
            if op.name in WITHOUT_WORK or op.name == "slice":
                continue
            args = substitute(op.args, {i: i for i in op.inputs} | {before: value.to})
            if "softmax" in op.name:
                args = (args[0], 1, *args[2:])
            value = self.add(op.target, args, dense(shape, self.graph.tensor(index).dtype), **dict(op.kwargs))
        args = (value, label, None, NONE, *self.loss.args[4:])
        return self.add(self.loss.target, args, dense((count,), self.graph.output_specs[0].dtype))

    def _reduce(self, each: Ref, classes: Ref, out: TensorSpec) -> None:
        reduction = self.loss.args[3] if len(self.loss.args) > 3 else MEAN
        if reduction == NONE:
            self.add("aten.view.default", (each, out.shape), out)
            return
        wide = dense((), "float64")  # of one number per row: as exact as a single sum over all of them
        total = self.add("aten.sum.default", (each,), wide, dtype=Const("dtype", "float64"))
        if reduction == MEAN:
            ignored = self.loss.args[4] if len(self.loss.args) > 4 else -100
            counted = self.add("aten.ne.Scalar", (classes, ignored), dense((self.rows,), "bool"))
            number = self.add("aten.sum.default", (counted,), dense((), "int64"))
            total = self.add("aten.div.Tensor", (total, number), wide)
        self.add("aten.to.dtype", (total, Const("dtype", out.dtype)), replace(out, requires_grad=False))
