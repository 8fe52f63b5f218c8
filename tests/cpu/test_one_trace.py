"""One Dynamo trace for several patched forms of a model, which must be the same as each would be by itself."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_patching import make_plan
from torch import nn

from fusescout import endtoend
from fusescout import onetrace
from fusescout.config import Config
from fusescout.modelcheck import ModelJudge
from fusescout.onetrace import OneTrace
from fusescout.patching import Backend
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.rivals import Rivals
from fusescout.session import Rival
from fusescout.ways import Way
from fusescout.ways import compiling
from fusescout.workload import build

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Broken(nn.Module):
    """Two graphs; the first holds nothing that a plan for norms replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.norm(x + self.second(x))


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Broken().eval()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Inductor is told of each graph's inputs: which keep their address, so that a CUDA graph copies them not."""
    from torch._inductor import compile_fx

    seen: list[Any] = []
    real = compile_fx._compile_fx_inner

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        seen.append((list(options.get("static_input_idxs", ())), len(inputs)))
        return real(module, inputs, **options)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", inner)
    return seen


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_each_way_is_what_it_would_be_alone(model: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(model, X, mode).model_copy(update={"computed_once": True})
    assert plan.entries
    ways: tuple[Composition, ...] = ("eager", "inductor")
    traced = []
    monkeypatch.setattr(onetrace, "to_aten", lambda *a, real=onetrace.to_aten: traced.append(a) or real(*a))
    seen = recorded(monkeypatch)
    anew = torch._functorch.config.patch(enable_autograd_cache=False)
    with anew, compiling(build(model, (X,), mode=mode)), torch.set_grad_enabled(mode == "training"):
        expected = model(X)
        trace, alone, shared = OneTrace(model), {}, {}
        assert torch.equal(trace.carried_out(model, None)(X), expected)
        for way in ways:
            backend = Backend(plan.composed(way))
            patched = torch.compile(model, backend=backend, dynamic=False)
            alone[way] = patched(X), backend.counters, list(seen)
            assert torch.equal(patched(X), alone[way][0])
            seen.clear()
            other = Backend(plan.composed(way))
            patched = trace.carried_out(model, other)
            shared[way] = patched(X), other.counters, list(seen)
            assert torch.equal(patched(X), shared[way][0])
            seen.clear()
        again = trace.carried_out(model, Backend(plan))(X)
        if mode == "training":
            gradients = [
                torch.autograd.grad(out.sum(), list(model.parameters())) for out in (expected, shared["inductor"][0])
            ]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(traced) == 2, "each of the two graphs once"
    assert torch.equal(again, alone["eager"][0])
    for way in ways:
        assert torch.equal(shared[way][0], alone[way][0])
        assert vars(shared[way][1]) == vars(alone[way][1])
        assert shared[way][2] == alone[way][2]
    assert any(kept for kept, _ in alone["inductor"][2])


def test_a_graph_that_cannot_be_brought_to_aten_runs_in_every_way(model: nn.Module) -> None:
    class Hooked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.relu() * 2
            y.requires_grad_()
            return y + 1

    hooked = Hooked().eval()
    plan = make_plan(model, X)
    with compiling(build(model, (X,))), torch.no_grad():
        trace = OneTrace(hooked)
        for way in ("eager", "inductor"):
            backend = Backend(plan.composed(way))
            assert torch.equal(trace.carried_out(hooked, backend)(X), hooked(X))
            assert not backend.counters.changed


def test_the_garbage_collector_is_left_as_it_was(model: nn.Module) -> None:
    workload = build(model, (X,))
    assert not gc.get_freeze_count()
    with compiling(workload):
        with compiling(workload):
            assert gc.get_freeze_count()
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


def bench_of(model: nn.Module, x: torch.Tensor) -> endtoend._Bench:
    workload = build(model, (x,))
    return endtoend._Bench(workload, Config(), ModelJudge(workload), lambda *_: None)


@pytest.mark.parametrize(
    ("rows", "fallback", "built"), [(4, "", False), (4, "cudagraph failed", True), (200_000, "", True)]
)
def test_what_a_cuda_graph_replays_is_not_built_again(
    rows: int, fallback: str, built: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a part of it is not replayed, or a graph's copies of large inputs may cost more than the launches."""
    bench = bench_of(model, torch.zeros(rows, 16))
    plan = make_plan(model, X)
    backend = Backend(plan)
    backend.counters.fallbacks |= {"graph 0": fallback} if fallback else {}
    bench.ways.append(Way("patched, rest cudagraph", model, lambda: None, 1.0, backend, "cudagraph"))
    tried: list[Plan] = []
    monkeypatch.setattr(bench, "_try", lambda p: tried.append(p) or "it was tried")
    monkeypatch.setattr(bench, "_culprit", lambda _: None)
    monkeypatch.setattr(endtoend, "seconds", lambda *_: 1e-4)
    bench.add_patched(plan, "inductor")
    assert bool(tried) is built
    assert [r.reason for r in bench.failed] == (["it was tried"] if built else [endtoend.REPLAYED])


def test_rivals_that_are_built_already_are_not_built_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = build(model, (X,))
    monkeypatch.setattr(endtoend.rivals, "build", lambda *_: pytest.fail("built again"))
    built = Rivals((Way("compile", model, workload.step, 3.0),), (Rival(name="other", reason="it can't"),))
    verdict, _ = endtoend.compare(
        workload, make_plan(model, X).emptied(), Config(rounds=2), lambda *_: None, built=built
    )
    assert {r.name: r.compile_s for r in verdict.rivals} == {"compile": 3.0, "other": 0.0}
