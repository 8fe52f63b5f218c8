"""In-place operators become out-of-place ones exactly where nobody else can see the memory that was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusescout.capture.aten import to_aten
from fusescout.capture.recompute import run_eagerly


def alone(x: Tensor) -> Tensor:
    return (x * 2).relu_().add_(1)


def read_before(x: Tensor) -> Tensor:
    y = x * 2
    z = y.sigmoid()
    return y.relu_() + z


def viewed_after(x: Tensor) -> Tensor:
    y = (x * 2).relu_()
    return y.view(-1) + y.t().reshape(-1)


def viewed_before(x: Tensor) -> Tensor:
    y = x * 2
    v = y.view(-1)
    y.relu_()
    return v


def another_name(x: Tensor) -> Tensor:
    y = x * 2
    v = torch.dropout(y, 0.5, False)  # a new tensor by its schema, `y` itself by what it does
    y.relu_()
    return v


def into_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3].mul_(2)
    return y


def into_an_argument(x: Tensor) -> Tensor:
    return x.relu_() * 1


def of_another_dtype(x: Tensor) -> Tensor:
    return x.bfloat16().mul(2).add_(x)


def broadcast(x: Tensor) -> Tensor:
    return (x[0] * 2).expand(4, 4).mul(1.0).add_(x[0])


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        (alone, 0), (read_before, 0), (viewed_after, 0), (broadcast, 0), (another_name, 0),
        (viewed_before, 1), (into_a_view, 1), (into_an_argument, 1), (of_another_dtype, 1),
    ],
)  # fmt: skip
def test_what_is_private_becomes_functional(function: Callable[[Tensor], Tensor], stays: int) -> None:
    kept: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        kept.append(to_aten(gm, inputs))
        return run_eagerly(kept[0])

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = x.clone(), x.clone()
    assert torch.equal(torch.compile(function, backend=backend)(ours), function(theirs))
    assert torch.equal(ours, theirs)
    targets = [str(n.target) for n in kept[0].graph.nodes if n.op == "call_function"]
    assert sum(t.split(".")[1].endswith("_") for t in targets) == stays, targets
