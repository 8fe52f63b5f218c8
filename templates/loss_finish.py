"""What becomes of a linear's cross entropy behind the GEMM: the tiles of each row put together, then the rows.

The GEMM leaves per row and tile of classes the largest score and the sum of exponentials less it, and per row the score
of its class. That is a chain of reductions like any other, written here in primitive operators and run by the row
template.
"""

import math
from dataclasses import dataclass

from fusescout.templates.loss_problem import MEAN
from fusescout.templates.loss_problem import NONE
from fusescout.templates.loss_problem import Loss
from fusescout.templates.rows import stages
from fusescout.templates.space import Operand
from fusescout.templates.space import Space

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.template import Param

TOP, TOTAL, HIT, SUM, CLASS = "top", "total", "hit", "sum", "classes"


@dataclass(frozen=True)
class Finish:
    """Stages of the row template, and the parameters they share with the GEMM."""

    stages: tuple
    operands: tuple
    params: tuple


def finish(loss: Loss, tiles: int) -> Finish:
    """The chain for `tiles` tiles of classes."""
    chain = _Chain(loss, tiles)
    chain.write()
    graph = Subgraph(tuple(chain.inputs.values()), tuple(chain.ops), (len(chain.inputs) + len(chain.ops) - 1,))
    inputs = tuple(
        Operand(name, name, "input" if name == CLASS else "scratch", k, k, _memory(spec), _strides(spec))
        for k, (name, spec) in enumerate(chain.inputs.items())
    )
    count = loss.rows if loss.reduction == NONE else 1
    held = TensorSpec((count,), loss.out.dtype, (1,))
    output = Operand("out", "out", "output", 0, 0, held, (int(loss.reduction == NONE), 0))
    space = Space((loss.rows, tiles), inputs, (output,), depth=1)
    found = stages(graph, space)
    operands = tuple({o.buffer: o for stage in found for o in stage.space.operands}.values())
    index = {CLASS: loss.target, "out": 0}
    params = tuple(
        Param(o.buffer, o.role, index.get(o.buffer, k), o.spec.shape, o.spec.stride, o.dtype)
        for k, o in enumerate(operands)
    )
    return Finish(found, operands, params)


def _memory(spec: TensorSpec) -> TensorSpec:
    """The tensor of an input over (rows, tiles): rows lie side by side, as the GEMM writes them."""
    rows, tiles = spec.shape
    return TensorSpec((tiles, rows), spec.dtype, (rows, 1)) if tiles > 1 else TensorSpec((rows,), spec.dtype, (1,))


def _strides(spec: TensorSpec) -> tuple:
    rows, tiles = spec.shape
    return (1, rows) if tiles > 1 else (1, 0)


class _Chain:
    """Primitive operators over (rows, tiles)."""

    def __init__(self, loss: Loss, tiles: int) -> None:
        self.loss, self.tiles = loss, tiles
        smoothed = {SUM: "float32"} if loss.smoothing else {}
        wide = {TOP: "float32", TOTAL: "float32", **smoothed}
        self.inputs = {name: self._spec((loss.rows, tiles), dtype) for name, dtype in wide.items()}
        self.inputs |= {HIT: self._spec((loss.rows, 1), "float32"), CLASS: self._spec((loss.rows, 1), "int64")}
        self.place = {name: Ref(k) for k, name in enumerate(self.inputs)}
        self.ops: list = []

    def _spec(self, shape: tuple, dtype: str) -> TensorSpec:
        return TensorSpec(shape, dtype, (shape[1], 1))

    def op(self, name: str, *args: object, dtype: str = "float32") -> Ref:
        shapes = [self._of(a).shape for a in args if isinstance(a, Ref)]
        shape = tuple(map(max, zip(*shapes, strict=True)))
        return self._add(Op(f"aten.{name}.Tensor", args, (), self._spec(shape, dtype)))

    def reduce(self, name: str, x: Ref, axis: int) -> Ref:
        shape = tuple(1 if d == axis else n for d, n in enumerate(self._of(x).shape))
        return self._add(Op(f"aten.{name}.default", (x, (axis,), True), (), self._spec(shape, "float32")))

    def _of(self, ref: Ref) -> TensorSpec:
        specs = list(self.inputs.values())
        return specs[ref.to] if ref.to < len(specs) else self.ops[ref.to - len(specs)].out

    def _add(self, op: Op) -> Ref:
        self.ops.append(op)
        return Ref(len(self.inputs) + len(self.ops) - 1)

    def write(self) -> None:
        """Loss of each row, 0 where it is ignored and NaN where there is no such class; then their sum or mean."""
        loss, at = self.loss, self.place
        top = self.reduce("amax", at[TOP], 1)
        weight = self.op("exp", self.op("sub", at[TOP], top))
        logarithm = self.op("log", self.reduce("sum", self.op("mul", at[TOTAL], weight), 1))
        known = self.op("logical_and", *self._bounds(), dtype="bool")
        hit = self.op("where", known, at[HIT], math.nan)
        each = self.op("sub", logarithm, self.op("sub", hit, top))
        if loss.smoothing:
            mean = self.op("div", self.reduce("sum", at[SUM], 1), loss.classes)
            even = self.op("sub", logarithm, self.op("sub", mean, top))
            each = self.op("mul", each, 1 - loss.smoothing)
            each = self.op("add", each, self.op("mul", even, loss.smoothing))
        counted = self.op("ne", at[CLASS], loss.ignore_index, dtype="bool")
        each = self.op("where", counted, each, 0.0, dtype=loss.out.dtype if loss.reduction == NONE else "float32")
        if loss.reduction == NONE:
            return
        total = self.reduce("sum", each, 0)
        if loss.reduction == MEAN:
            number = self.reduce("sum", self.op("_to_copy", counted), 0)
            self.op("div", total, number, dtype=loss.out.dtype)
        else:
            self.op("positive", total, dtype=loss.out.dtype)

    def _bounds(self) -> tuple:
        place = self.place[CLASS]
        return self.op("ge", place, 0, dtype="bool"), self.op("lt", place, self.loss.classes, dtype="bool")
