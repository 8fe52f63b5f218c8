"""A patched model whose batch changes: right at every size, counted, and learning at the sizes its plan doesn't have.

What is learned comes from a stand-in for the race and its child process (`adopt_winner`), apart from the last test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn

from fusescout import livecall
from fusescout.compose import compose
from fusescout.contenders import contender_named
from fusescout.errors import PolicyUnknown
from fusescout.ir import Subgraph
from fusescout.patching import Backend
from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.patching import patched
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.probe import describe_device

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


def batch(size: int) -> Tensor:
    return torch.randn(size, 3, 16, generator=torch.Generator().manual_seed(size))


def adopted(entry: Entry, subgraph: Subgraph, *_: Any) -> tuple[Entry, str]:
    new = {"id": f"{entry.family}-{subgraph.key[:8]}", "subgraph": subgraph.to_json()}
    return entry.model_copy(update=new), "a stand-in"


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_outputs(), torch.no_grad():
        yield Block().eval()


def test_batches_in_and_out_of_a_merged_plan_are_right_and_counted(model: nn.Module) -> None:
    plans = {size: plan_of(model, batch(size)) for size in (2, 64)}
    plan = plans[2].merged(plans[64])
    assert len(plan.entries) > len(plans[2].entries)
    expected = {size: model(batch(size)) for size in BATCHES}
    handle = patch(model, plan)
    for size in BATCHES:
        assert torch.equal(model(batch(size)), expected[size]), size
        if handle.counters.captures == 1:
            assert not handle._backend._operators, "kernels of shapes that never come are not built"
    assert handle.counters.captures == 4
    assert handle.counters.framework_calls == 3, "1, 17 and 1 again"
    assert list(handle.counters.fallbacks.values()) == ["no chain of it is in the plan"] * 2
    for size in plans:
        assert set(handle.counters.replaced) & {e.id for e in plans[size].entries}
    assert handle.wait(0), "under the default policy there is nothing to wait for"
    handle.undo()


def test_dynamos_limit_does_not_end_the_patch_and_the_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecall, "MOST_CAPTURES", 4)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Tanh(), nn.Softplus()).eval()
    with torch._dynamo.config.patch(recompile_limit=2), fresh_outputs(), torch.no_grad():
        plan, expected = plan_of(model, batch(5)), {size: model(batch(size)) for size in range(2, 8)}
        handle = patch(model, plan)
        for size in (2, 3, 4, 5, 6, 7, 5):
            assert torch.equal(model(batch(size)), expected[size])
            assert torch._dynamo.config.recompile_limit == 2
        handle.undo()
    assert handle.counters.captures == 4
    assert handle.counters.replaced, "the planned shape came after two others"
    assert handle.counters.framework_calls == 5, "2, 3 and 4 have no entry, and for 6 and 7 there was no room"
    assert "4 captures" in handle.counters.fallbacks["shapes"]


@pytest.mark.parametrize(("composition", "sizes"), [("eager", BATCHES), ("inductor", (1, 2))])
def test_new_shapes_are_learned_beside_the_calls_and_then_used(
    composition: Composition, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    let, model = threading.Event(), Mlp().eval()

    def slowly(*given: Any) -> tuple[Entry, str]:
        let.wait(60)
        return adopted(*given)

    compilers = set()

    def spying(*given: Any) -> Any:
        if given[-1] != "eager":
            compilers.add(threading.current_thread())  # it patches `nn.Module.__call__` for all threads
        return compose(*given)

    monkeypatch.setattr("fusescout.patching.compose", spying)
    monkeypatch.setattr("fusescout.newshapes.adopt_winner", slowly)
    with fresh_outputs(), torch.no_grad():
        plan, expected = plan_of(model, batch(2)), {size: model(batch(size)) for size in sizes}
        handle, new = patch(model, plan, policy="adaptive", composition=composition), len(set(sizes)) - 1

        def check() -> None:
            for size in sizes:
                torch.testing.assert_close(model(batch(size)), expected[size])

        check()
        sites = handle.counters.sites
        assert (handle.counters.framework_calls, handle.counters.adopted) == (len(sizes) - 1, {})
        assert not handle.wait(0)
        let.set()
        assert handle.wait(120)
        assert len(handle.counters.adopted) == new * len(plan.entries)
        check()
        assert handle.counters.sites == (new + 1) * sites
        assert (handle.counters.captures, handle.counters.framework_calls) == (new + 1, len(sizes) - 1)
        assert not handle.counters.fallbacks
        assert compilers <= {threading.main_thread()}
        handle.undo()
        with patched(model, handle.plan) as later:
            check()
        assert (later.counters.sites, later.counters.fallbacks) == (handle.counters.sites, {}), "a plan may be kept"


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


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyUnknown, match="fallback, nearest, adaptive"):
        patch(Mlp(), plan_of(Mlp().eval(), batch(2)), policy="guess")  # type: ignore[arg-type]


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


def test_the_nearest_shapes_kernel_is_built_and_verified_in_a_child(tmp_path: Path) -> None:
    """The real thing: a TileLang kernel of batch 2 at two sizes, at one of which its schedule isn't offered."""
    pytest.importorskip("tilelang")
    torch._dynamo.reset()
    model, device = nn.Sequential(nn.Tanh(), nn.Softplus()).eval(), describe_device("cpu")
    with torch.no_grad():
        plan = plan_of(model, batch(2))
        (entry,) = plan.entries
        offered = contender_named("tilelang").variants(Subgraph.from_json(entry.subgraph), device, "max")
        entry = entry.model_copy(update={"contender": "tilelang", "variant": dict(offered[0])})
        expected = {size: model(batch(size)) for size in (5, 64)}
        handle = Patched(model, Backend(plan.model_copy(update={"entries": [entry]}), device, tmp_path, "nearest"))
        for size in expected:
            assert torch.equal(model(batch(size)), expected[size])
        assert handle.wait(120)
        assert handle.counters.fallbacks == {}
        assert list(handle.counters.adopted.values()) == [
            f"the {what} of {entry.id}, verified at this shape, not timed" for what in ("schedule", "template")
        ]
        for size in expected:
            torch.testing.assert_close(model(batch(size)), expected[size])
        assert handle.counters.framework_calls == 2
        handle.undo()
