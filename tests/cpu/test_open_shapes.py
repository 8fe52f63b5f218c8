"""`torch.compile(model, backend="fusescout")` with a changing batch: right everywhere, planned kernels used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn

import fusescout
from fusescout.config import Config
from fusescout.endtoend import compositions
from fusescout.errors import CompositionUnavailable
from fusescout.integrations import by_shape
from fusescout.integrations import dynamo
from fusescout.patching import Counters
from fusescout.patching import patch
from fusescout.plan import Plan
from fusescout.workload import build

BATCHES = (1, 2, 17, 64, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.relu(self.fc(x)))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    dynamo._backends.clear()
    torch.manual_seed(0)
    with fresh_outputs():
        yield Net().eval()


def batch(size: int) -> Tensor:
    return torch.randn(size, 3, 16, generator=torch.Generator().manual_seed(size))


def counters() -> Counters:
    (backend,) = dynamo._backends.values()
    return backend.counters


def planned_for(model: nn.Module, *sizes: int) -> Plan:
    plans = [plan_of(model, batch(n)) for n in sizes]
    return plans[0].model_copy(update={"entries": [e for p in plans for e in p.entries]})


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_changing_batches_are_right_and_each_planned_one_uses_its_kernels(model: nn.Module, composition: str) -> None:
    plan = planned_for(model, 2, 64)
    compiled = torch.compile(model, backend="fusescout", options={"plan": plan, "composition": composition})
    with torch.no_grad():
        for size in BATCHES:
            torch.testing.assert_close(compiled(batch(size)), model(batch(size)))
        captures = counters().captures
        for size in BATCHES:
            torch.testing.assert_close(compiled(batch(size)), model(batch(size)))
    assert counters().captures == captures == 4, "each shape is carried out once"
    replaced = set(counters().replaced)
    assert replaced & {e.id for e in plan_of(model, batch(2)).entries}
    assert replaced & {e.id for e in plan_of(model, batch(64)).entries}
    assert len([why for why in counters().fallbacks.values() if "no chain of it is in the plan" in why]) == 2


def test_more_shapes_than_are_kept_run_eagerly_and_are_counted(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_shape, "MOST_SHAPES", 2)
    compiled = torch.compile(model, backend="fusescout", options={"plan": planned_for(model, 2)})
    with torch.no_grad():
        for size in (*BATCHES, 5, 6):
            assert torch.equal(compiled(batch(size)), model(batch(size)))
    assert "more than 2 shapes" in counters().fallbacks["shapes"]
    assert counters().captures == 3, "one with fixed sizes, then two of those that were left open"


def test_gradients_are_eagers_at_every_batch(model: nn.Module) -> None:
    model.train()
    plan = plan_of(model, batch(2), mode="training")
    compiled = torch.compile(model, backend="fusescout", options={"plan": plan})
    for size in BATCHES:
        got = torch.autograd.grad(compiled(batch(size)).square().sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(batch(size)).square().sum(), list(model.parameters()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert counters().sites > 0


def test_a_patched_model_follows_the_batch_too(model: nn.Module) -> None:
    plan = planned_for(model, 2, 64)
    with torch.no_grad():
        expected = {size: model(batch(size)) for size in BATCHES}
        with patch(model, plan) as handle:
            for size in BATCHES:
                assert torch.equal(model(batch(size)), expected[size])
    assert handle.counters.captures == 4
    assert handle.counters.sites >= 2
    assert len(handle.counters.fallbacks) == 2


def test_cuda_graphs_are_refused_on_the_cpu(model: nn.Module) -> None:
    with pytest.raises(CompositionUnavailable, match="cudagraph"):
        patch(model, plan_of(model, batch(2)), composition="cudagraph")


def test_a_way_that_is_asked_for_and_cannot_be_is_told_before_anything_is_measured(model: nn.Module) -> None:
    heard: list[str] = []
    with pytest.raises(CompositionUnavailable, match="need a GPU") as told:
        fusescout.analyze(model, (batch(2),), compose="cudagraph", on_event=lambda stage, *_: heard.append(stage))
    assert heard == []
    assert told.value.exit_code == 2


def test_with_chooses_the_ways_that_are_measured(model: nn.Module) -> None:
    workload = build(model, (batch(2),))
    assert compositions(Config(), workload) == ("eager", "inductor")
    assert compositions(Config(compose="inductor"), workload) == ("inductor",)
    on_gpu = replace(workload, device="cuda:0")
    assert compositions(Config(), on_gpu) == ("eager", "cudagraph", "replay", "inductor")
    assert compositions(Config(), replace(on_gpu, mode="training")) == ("eager", "inductor")
    assert compositions(Config(compose="cudagraph"), on_gpu) == ("cudagraph",)
