"""A small model, patched at every region inside a `with` block, to be compared with itself unpatched."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn

from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.plan import Composition

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act, self.n, self.drop = nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        h = self.drop(self.n(x + self.act(self.lin(x)) * 0.5))
        return (h if mask is None else h * mask) * scale


@contextmanager
def all_patched(
    model: nn.Module, mode: str = "inference", x: Tensor = X, composition: Composition = "eager"
) -> Iterator[Patched]:
    torch._dynamo.reset()
    model.train(mode == "training")
    plan = plan_of(model, x, mode=mode)
    with fresh_outputs():
        handle = patch(model, plan, composition=composition)
        yield handle
        handle.undo()


def plain(model: nn.Module, call: Callable[[], Any]) -> Any:
    held, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return call()
    finally:
        model._compiled_call_impl = held


def agree(model: nn.Module, x: Tensor = X, **kwargs: Any) -> None:
    with torch.no_grad():
        got, expected = model(x, **kwargs), plain(model, lambda: model(x, **kwargs))
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((model(x) * X).sum(), [x, *model.parameters()]))


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
