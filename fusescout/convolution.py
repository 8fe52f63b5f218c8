"""Reads a convolution operator, however it is spelled, as operands and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusescout.ir import Arg
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph

DIMENSIONS = {
    "conv1d": 1,
    "conv2d": 2,
    "conv3d": 3,
    "conv_transpose1d": 1,
    "conv_transpose2d": 2,
    "conv_transpose3d": 3,
}
"""Spatial dimensions by operator."""
CONVOLUTIONS = frozenset({*DIMENSIONS, "convolution"})
BIAS = 2
"""Which argument of every convolution operator the bias is."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution. `x`, `weight` and `bias` are value indices; settings have one number a spatial dimension."""

    x: int
    weight: int
    bias: int | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def rank(self) -> int:
        return len(self.stride)

    def is_pointwise(self, graph: Subgraph) -> bool:
        """Whether each output pixel depends on one input pixel alone: a matrix product over the channels."""
        ones = all(n == 1 for n in graph.tensor(self.weight).shape[2:])
        plain = not any(self.padding) and all(s == 1 for s in self.stride) and self.groups == 1
        return ones and plain and not self.transposed


def read(graph: Subgraph, op: Op) -> Convolution | None:
    """The convolution that `op` is; None if it is none, has no batch dimension or pads unevenly."""
    if op.name not in CONVOLUTIONS or not all(isinstance(a, Ref) for a in op.args[:2]):
        return None
    named = dict(op.kwargs)
    general = op.name == "convolution"
    transposed = (len(op.args) > 6 and op.args[6] is True) if general else "transpose" in op.name
    names = ["input", "weight", "bias", "stride", "padding"]
    if general:
        names += ["dilation", "transposed", "output_padding", "groups"]
    elif transposed:
        names += ["output_padding", "groups", "dilation"]
    else:
        names += ["dilation", "groups"]
    given = dict(zip(names, op.args, strict=False)) | named
    x, weight = op.inputs[0], int(op.args[1].to)  # type: ignore[union-attr]
    kernel = graph.tensor(weight).shape[2:]
    rank = len(kernel)
    if len(graph.tensor(x).shape) != rank + 2:
        return None
    bias = given.get("bias")
    dilation = _each(given.get("dilation"), rank, 1)
    padding = _padding(given.get("padding"), kernel, dilation)
    groups = given.get("groups", 1)
    if padding is None or not isinstance(groups, int):
        return None
    return Convolution(
        x=x,
        weight=weight,
        bias=int(bias.to) if isinstance(bias, Ref) else None,
        stride=_each(given.get("stride"), rank, 1),
        padding=padding,
        dilation=dilation,
        output_padding=_each(given.get("output_padding"), rank, 0),
        groups=groups,
        transposed=transposed,
    )


def _each(value: Arg, rank: int, default: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    if not isinstance(value, tuple) or not value:
        return (default,) * rank
    numbers = tuple(v for v in value if isinstance(v, int))
    return numbers * rank if len(numbers) == 1 else numbers


def _padding(value: Arg, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...] | None:
    if value == "valid":
        return (0,) * len(kernel)
    if value == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)
    return _each(value, len(kernel), 0)
