"""A patched model whose batch changes: right at every size, counted, and learning at the sizes its plan doesn't have.

What is learned here comes from a stand-in for the race and its child process (`adopt_winner`), apart from the last test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn

from fusescout import livecall
from fusescout.newshapes import Stopped
from fusescout.patching import patch
from fusescout.plan import Entry

BATCHES = (1, 2, 17, 64, 1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x)) * 0.5))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) * 0.35, -1) @ v
        return self.mlp(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))  # type: ignore[no-any-return]


@pytest.fixture(params=[Mlp, Block])
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_outputs(), torch.no_grad():
        yield request.param().eval()


def batch(size: int) -> Tensor:
    return torch.randn(size, 3, 16, generator=torch.Generator().manual_seed(size))


def adopted(entry: Entry, subgraph: Any, *_: Any) -> tuple[Entry, str]:
    new = {"id": f"{entry.family}-{subgraph.key[:8]}", "subgraph": subgraph.to_json()}
    return entry.model_copy(update=new), "a stand-in"


def test_batches_in_and_out_of_a_merged_plan_are_right_and_counted(model: nn.Module) -> None:
    plans = {size: plan_of(model, batch(size)) for size in (2, 64)}
    plan = plans[2].merged(plans[64])
    assert len(plan.entries) > len(plans[2].entries)
    expected = {size: model(batch(size)) for size in BATCHES}
    handle = patch(model, plan)
    for size in BATCHES:
        assert torch.equal(model(batch(size)), expected[size]), size
    assert handle.counters.captures == 4
    assert handle.counters.framework_calls == 3, "1, 17 and 1 again"
    assert [why for why in handle.counters.fallbacks.values()] == ["no chain of it is in the plan"] * 2
    for size in plans:
        assert set(handle.counters.replaced) & {e.id for e in plans[size].entries}
    assert handle.wait(0), "under the default policy there is nothing to wait for"
    handle.undo()


def test_dynamos_limit_of_eight_shapes_does_not_end_the_patch(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = range(2, 13)
    before = torch._dynamo.config.recompile_limit
    handle = patch(model, plan_of(model, batch(12)))
    for size in sizes:
        model(batch(size))
    assert handle.counters.captures == len(sizes)
    assert handle.counters.sites > 0, "the planned shape came last"
    assert torch._dynamo.config.recompile_limit == before
    monkeypatch.setattr(livecall, "MOST_CAPTURES", len(sizes))
    calls = handle.counters.framework_calls
    for size in (20, 21):
        handle.undo()
        expected = model(batch(size))
        model._compiled_call_impl = handle._ours
        assert torch.equal(model(batch(size)), expected)
    assert handle.counters.framework_calls == calls + 2
    assert f"{len(sizes)} captures" in handle.counters.fallbacks["shapes"]


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_new_shapes_are_learned_beside_the_calls_and_then_used(
    model: nn.Module, composition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if composition == "inductor" and isinstance(model, Block):
        pytest.skip("one model will do for a compiled rest")
    let = threading.Event()

    def slowly(*given: Any) -> tuple[Entry, str]:
        let.wait(60)
        return adopted(*given)

    monkeypatch.setattr("fusescout.newshapes.adopt_winner", slowly)
    plan = plan_of(model, batch(2))
    expected = {size: model(batch(size)) for size in BATCHES}
    handle = patch(model, plan, policy="adaptive", composition=composition)
    for size in BATCHES:
        torch.testing.assert_close(model(batch(size)), expected[size])
    sites = handle.counters.sites
    assert (handle.counters.framework_calls, handle.counters.adopted) == (4, {})
    assert not handle.wait(0)
    let.set()
    assert handle.wait(120)
    assert len(handle.counters.adopted) == 3 * len(plan.entries)
    assert handle.counters.sites == 4 * sites
    for size in BATCHES:
        torch.testing.assert_close(model(batch(size)), expected[size])
    assert (handle.counters.captures, handle.counters.framework_calls) == (4, 4), "nothing was captured anew"
    assert not handle.counters.fallbacks
    again = handle.plan
    handle.undo()
    with_all = patch(model, again)
    for size in BATCHES:
        torch.testing.assert_close(model(batch(size)), expected[size])
    assert not with_all.counters.fallbacks
    with_all.undo()


@pytest.mark.parametrize("fault", ["raises", "declines"])
def test_what_goes_wrong_in_the_background_is_told_and_breaks_no_call(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> str:
        if fault == "raises":
            raise RuntimeError("the disk is full")
        return "eager is the fastest"

    monkeypatch.setattr("fusescout.newshapes.adopt_nearest", wrong)
    torch._dynamo.reset()
    model = Mlp().eval()
    with fresh_outputs(), torch.no_grad():
        plan, expected = plan_of(model, batch(2)), model(batch(5))
        handle = patch(model, plan, policy="nearest")
        for _ in range(2):
            assert torch.equal(model(batch(5)), expected)
            assert handle.wait(60)
        handle.undo()
    said = " ".join(handle.counters.fallbacks.values())
    assert {"raises": "RuntimeError: the disk is full", "declines": "eager is the fastest"}[fault] in said
    assert handle.counters.framework_calls == 2


def test_undo_ends_what_is_being_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def endless(*given: Any) -> Any:
        lender = given[-1]
        started.set()
        lender._ended.wait(60)
        lender.take()

    monkeypatch.setattr("fusescout.newshapes.adopt_winner", endless)
    torch._dynamo.reset()
    model = Mlp().eval()
    with fresh_outputs(), torch.no_grad():
        handle = patch(model, plan_of(model, batch(2)), policy="adaptive")
        model(batch(5))
        model(batch(6))
        assert started.wait(60)
        handle.undo()
        assert handle.wait(60)
    assert handle.counters.adopted == {}
    assert "new shapes" not in handle.counters.fallbacks
    assert issubclass(Stopped, Exception)
