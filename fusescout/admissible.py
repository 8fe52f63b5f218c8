"""Evaluations that the framework itself may make of the same operators, where eager happens to make a more exact one.

"TF32": eager with the float32 operands of convolutions or matrix products cut to TF32, where the user's settings allow
it on a GPU that has it. By default they do for convolutions, and cuDNN chooses by shape and memory format: eager's
algorithm may be true float32 (8 channels, NCHW) and the channels-last one of `torch.compile` not. The cut takes the low
13 bits away, as the tensor cores read the upper 19.

"unrounded": a sub-graph in 16 bits with everything between its contractions in float32 (`reference.UNROUNDED`). Eager
rounds after every operator, and may so land exactly on a kink, as of hardswish at -3, where its error is then 0. Where
an operator jumps (`floor`, a comparison) it is none: on the other side of a jump any error would be excused.

They are measures of last resort: `verify` and `modelcheck` run them only where a result fails by eager's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.flops import op_class
from fusescout.flops import op_name
from fusescout.ir import Op
from fusescout.ir import Out
from fusescout.ir import Subgraph
from fusescout.numerics import tf32_kinds
from fusescout.reference import HALVES
from fusescout.reference import UNROUNDED
from fusescout.reference import build

TF32 = "TF32"
_LOW_BITS = 13
"""Bits of a float32's significand that TF32 doesn't have."""
_SUMS = frozenset({"addmm", "baddbmm", "addbmm", "_addmm_activation"})
"""Products whose first argument is added."""
_JUMPS = frozenset(
    {"floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "signbit", "heaviside", "threshold", "hardshrink"}
    | {"floor_divide", "remainder", "fmod", "gt", "ge", "lt", "le", "eq", "ne", "argmax", "argmin", "topk", "sort"}
)
"""Operators whose results are no continuous function of 16-bit operands."""
_VECTORS = frozenset({"mv", "addmv", "dot", "vdot", "inner", "outer", "addr"})
"""Products that no tensor core computes."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A way to compute a sub-graph: `run` inside of `mode()`, and its backward pass there too."""

    name: str
    run: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self.mode():
            return self.run(inputs)


def evaluations(graph: Subgraph, device: str) -> tuple[Evaluation, ...]:
    """What the framework may make of a sub-graph on a device beside eager, under the settings of this process."""
    found = []
    kinds = tf32_kinds(device)
    if any(op_class(op.target) in kinds and "float32" in _dtypes(op.out) for op in graph.ops):
        found.append(Evaluation(TF32, build(graph), lambda: CutToTF32(kinds, device)))
    halves = any(HALVES & _dtypes(out) for out in (*graph.inputs, *(op.out for op in graph.ops)))
    if halves and not any(map(_jumps, graph.ops)):
        with suppress(ValueError):  # what reinterprets the bits of 16-bit values has no such form
            found.append(Evaluation(UNROUNDED, build(graph, UNROUNDED)))
    return tuple(found)


class CutToTF32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, contractions of these kinds on that device read their float32 operands as TF32, backwards as well.

    Attributes:
        cut: how many tensors were cut.
    """

    def __init__(self, kinds: frozenset[str], device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds, self.device, self.cut = kinds, torch.device(device).type, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if factors := self._factors(op_name(str(func)), op_class(str(func))):
            args = [self._cut(a) if k in factors else a for k, a in enumerate(args)]
        return func(*args, **(kwargs or {}))

    def _factors(self, name: str, kind: str) -> tuple[int, ...]:
        """Which arguments of an operator are multiplied and so cut."""
        if name == "convolution_backward":
            return (0, 1, 2) if "conv" in self.kinds else ()
        if kind not in self.kinds or name in _VECTORS:
            return ()
        return (1, 2) if name in _SUMS else (0, 1, 2) if kind == "attention" else (0, 1)

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.device.type != self.device:
            return value
        self.cut += 1
        return cut(value)


def cut(value: Tensor) -> Tensor:
    """A float32 tensor's values in TF32, those below it in size left out."""
    return (value.view(torch.int32) & -(1 << _LOW_BITS)).view(torch.float32)


def _jumps(op: Op) -> bool:
    rounds = op.name in ("div", "div_") and dict(op.kwargs).get("rounding_mode") is not None
    return rounds or op.name.removesuffix("_") in _JUMPS


def _dtypes(out: Out) -> set[str]:
    specs = out if isinstance(out, tuple) else (out,)
    return {s.dtype for s in specs if s is not None}
