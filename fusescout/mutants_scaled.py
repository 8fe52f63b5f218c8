"""Planted bugs of products of 8-bit floats: scales that are taken for others, steps along K that are left out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.contenders.base import Runner
from fusescout.flops import op_name
from fusescout.ir import Subgraph
from fusescout.scaled import SCALED

K_BLOCK = 128
"""Terms of a step along K; a shorter sum loses its last quarter."""
K_STEP = 16
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def scaled_mutants(graph: Subgraph, eager: Runner) -> dict[str, Runner]:
    """Bugs by name; none for chains without such a product."""
    if not any(op.name in SCALED for op in graph.ops):
        return {}
    edits: dict[str, Callable[..., Operands]] = {
        "last step along K left out": lambda a, b, sa, sb: (_without_last_step(a), b, sa, sb),
        "first scale taken for the second": lambda a, b, sa, sb: (a, b, sa, _first(sa, sb)),
        "one row's scale for all": lambda a, b, sa, sb: (a, b, _first(sa, sa), sb),
        "scales not applied": lambda a, b, sa, sb: (a, b, torch.ones_like(sa), torch.ones_like(sb)),
    }
    return {name: _with(eager, _Edited, edit) for name, edit in edits.items()} | {
        "low-precision sum": _with(eager, _LowSum)
    }


def _with(eager: Runner, mode: Any, *options: Any) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with mode(*options):
            return tuple(eager(inputs))

    return run


def _first(scale: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like) + scale.flatten()[0]


def _without_last_step(a: Tensor) -> Tensor:
    k = a.shape[-1]
    kept = a.view(torch.uint8).clone()
    kept[:, k - (K_BLOCK if k > K_BLOCK else k // 4) :] = 0
    return kept.view(a.dtype)


class _Edited(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes what scaled products read."""

    def __init__(self, edit: Callable[..., Operands]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.edit = edit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(str(func)) in SCALED:
            args, second = list(args), _second(func)
            listed = isinstance(args[2], (list, tuple))
            given = (*args[:2], *((s[0] if listed else s) for s in (args[2], args[second])))
            args[0], args[1], *scales = self.edit(*given)
            args[2], args[second] = ([s] for s in scales) if listed else scales
        return func(*args, **(kwargs or {}))


class _LowSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums rounded to bfloat16 every `K_STEP` terms. The bias is what the operator adds to a product of zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(str(func)) not in SCALED:
            return func(*args, **(kwargs or {}))
        a, b = args[:2]
        sa, sb = (s[0] if isinstance(s, (list, tuple)) else s for s in (args[2], args[_second(func)]))
        total = torch.zeros((), dtype=torch.float32, device=a.device)
        for k in range(0, a.shape[-1], K_STEP):
            part = a[:, k : k + K_STEP].float() @ b[k : k + K_STEP].float()
            total = (total + part).bfloat16().float()
        bias = func(torch.zeros_like(a), *args[1:], **(kwargs or {}))
        return (total * sa * sb + bias.float()).to(bias.dtype)


def _second(func: Any) -> int:
    """Where the second scale is among an operator's arguments."""
    return 5 if "v2" in str(func) else 3
