"""Planted bugs of cross entropies: faults that a kernel over tiles of classes can have, put into eager's own operators.

Each is wrong for some rows or by some classes only, so that the loss stays near its true value.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.contenders.base import Runner
from fusescout.ir import Subgraph
from fusescout.regions.rows import LOSSES

TILE = 128
"""Classes of a lost tile, or half of all where there are not so many."""
MISSING_TILE = "missing tile of classes"
Change = Callable[..., Any]
"""Takes the operator and its arguments, gives the wrong result."""


def loss_mutants(graph: Subgraph, eager: Runner) -> dict[str, Runner]:
    """The bugs by name, for a sub-graph with a cross entropy in it; none for others."""
    if not any(op.name in LOSSES for op in graph.ops):
        return {}
    return {name: _planted(eager, operator, change) for name, (operator, change) in _BUGS.items()}


def _planted(eager: Runner, operator: str, change: Change) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode: Any = _Changed
        with mode(operator, change):
            return tuple(eager(inputs))

    return run


class _Changed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs `change` where an operator of one name, whatever its rank, is called."""

    def __init__(self, operator: str, change: Change) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator, self.change = operator, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.replace("2d", "") == self.operator:
            return self.change(func, *args)
        return func(*args, **(kwargs or {}))


def _next_class(func: Any, scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    """The score of the class beside the row's own."""
    moved = torch.where(target == ignored, target, (target + 1) % scores.shape[min(1, scores.dim() - 1)])
    return func(scores, moved, weight, reduction, ignored)


def _ignored_counted(func: Any, scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    """Rows that are to be ignored count as those of the first class."""
    return func(scores, torch.where(target == ignored, torch.zeros_like(target), target), weight, reduction, -1)


def _ignored_divided_by(func: Any, scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    """The mean divides by all rows, also by those that are ignored."""
    loss, total = func(scores, target, weight, reduction, ignored)
    return (loss * total / target.numel() if reduction == 1 else loss), total


def _lost_tile(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """A softmax's logarithm whose sum of exponentials lacks some classes."""
    classes = x.shape[dim]
    lost = min(TILE, classes // 2)
    rest = x.double().index_fill(dim, torch.arange(classes - lost, classes, device=x.device), float("-inf"))
    return (x.double() - rest.logsumexp(dim, keepdim=True)).to(x.dtype)


_BUGS: dict[str, tuple[str, Change]] = {
    "score of the next class": ("nll_loss_forward", _next_class),
    "ignored rows counted": ("nll_loss_forward", _ignored_counted),
    "mean over ignored rows": ("nll_loss_forward", _ignored_divided_by),
    MISSING_TILE: ("_log_softmax", _lost_tile),
}
