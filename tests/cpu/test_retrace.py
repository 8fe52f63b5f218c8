"""Retraced graphs compute and train as the model does, or are declined with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusescout.templates.attention_problem import read
from gradients import gradients
from gradients import same
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusescout.capture import capture
from fusescout.capture.aten import to_aten
from fusescout.capture.recompute import run_eagerly
from fusescout.errors import NotCapturable
from fusescout.precompute import precompute
from fusescout.regions import find_regions
from fusescout.workload import Workload


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.drop(torch.relu(self.fc(y))), x, use_reentrant=False).sum(-1)


class CheckpointedNorm(nn.Module):
    """A checkpointed region that writes buffers, behind an autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
        return checkpoint(lambda z: self.drop(torch.relu(self.norm(z))), self.fc(x) + y.float(), use_reentrant=False)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.fc(x) + self.fc(x))
            y = torch.einsum("bi,bj->ij", y, y)
            with torch.autocast("cpu", enabled=False):
                z = self.fc(x)
            z = torch.softmax(z @ y, -1)
        return self.fc(z.float())


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w = self.fc(x).mean()
        y = self.fc(x) * w
        y[:, 1:3].mul_(2)
        a, b = y.chunk(2, -1)
        return torch.cat([b, F.dropout(a, 0.5)], -1)


@pytest.mark.parametrize("around", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedNorm, Autocast, NoGrad])
def test_retraced_module_trains_as_eager_does(kind: type[nn.Module], around: torch.dtype | None) -> None:
    model, x = kind(), torch.randn(6, 8)
    kept: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        try:
            kept.append(to_aten(gm, inputs))
        except NotCapturable as error:
            assert kind in (Checkpointed, CheckpointedNorm) and around is not None and "autocast" in error.reason
            return run_eagerly(gm)
        return run_eagerly(kept[-1])

    compiled = torch.compile(model, backend=backend, dynamic=False)

    def run(call: Any) -> Any:
        with torch.autocast("cpu", around or torch.bfloat16, enabled=around is not None):
            return call(x)

    eager, ours = gradients(model, lambda: run(model)), gradients(model, lambda: run(compiled))
    assert torch.equal(eager[0], ours[0])
    assert all(same(a, b) for a, b in zip(eager[1], ours[1], strict=True))
    assert len(kept) == (0 if kind in (Checkpointed, CheckpointedNorm) and around else 1)
    for node in kept[0].graph.nodes if kept else ():
        value = node.meta["val"]
        if kind is Autocast and "linear" in str(node.target):
            dtypes = {a.meta["val"].dtype for a in node.all_input_nodes}
            assert dtypes == {value.dtype}  # every cast is a node of its own


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: Straight.apply(x), "autograd_function_apply"),
        (lambda x: torch.vmap(lambda r: (r * r).sum())(x), "torch.func"),
        (lambda x: x.register_hook(lambda g: g * 3) and x * 2, "autograd"),
    ],
)
def test_what_retracing_would_change_is_declined(function: Any, reason: str) -> None:
    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        try:
            to_aten(gm, inputs)
        except NotCapturable as error:
            reasons.append(error.reason)
        return gm.forward

    torch.compile(lambda x: function(x * 1), backend=backend)(torch.randn(3, 3, requires_grad=True))
    assert len(reasons) == 1 and reason in reasons[0]


def test_dynamic_shapes_are_declined() -> None:
    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with pytest.raises(NotCapturable, match="dynamic size"):
            to_aten(gm, inputs)
        reasons.append("declined")
        return gm.forward

    torch.compile(torch.relu, backend=backend, dynamic=True)(torch.randn(3, 3))
    assert reasons


class Einsums(nn.Module):
    """Attention, and a product of its result with two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / 4, -1)
        seen = torch.einsum("bhij,bjhd->bihd", scores, v)
        return torch.einsum("bh,hde,bihe->bihd", self.scale, self.weight, seen)


def test_an_einsum_is_the_products_that_torch_makes_of_it() -> None:
    torch._dynamo.reset()
    model, inputs = Einsums().eval(), tuple(torch.randn(3, 6, 4, 16) for _ in range(3))
    with torch.no_grad():
        (graph,) = precompute(capture(Workload(model, inputs)))[0].graphs
        assert torch.equal(graph.module(*graph.inputs)[0], model(*inputs))
    operators = [n.op for n in graph.graph.nodes]
    assert "einsum" not in operators
    assert operators.count("bmm") == 3, "that of the parameters is made once"
    found = [graph.graph.subgraph(r.nodes)[0] for r in find_regions(graph.graph) if r.family == "attention"]
    problem = read(max(found, key=lambda g: len(g.ops)))
    assert (problem.batch, problem.rows, problem.keys, problem.width) == ((3, 4), 6, 6, 16)
    assert problem.k.strides == (64, 1), "heads are read where they lie"
