"""A crash in one way to run the model, or in an optional stage, costs that way or stage; the analysis goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_patching import make_plan
from torch import nn

import fusescout
from fusescout import analysis
from fusescout import endtoend
from fusescout import graphtrees
from fusescout import layout
from fusescout import modelcheck
from fusescout import races
from fusescout import ways
from fusescout.config import Config
from fusescout.patching import Backend
from fusescout.plan import Plan
from fusescout.rivals import Rivals
from fusescout.session import EndToEnd
from fusescout.ways import Way
from fusescout.workerpool import Spare
from fusescout.workload import Workload
from fusescout.workload import build

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
PATCHED = ("patched, rest eager", "patched, rest cudagraph")


@pytest.fixture
def workload() -> Workload:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return build(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval(), (X,))


def flaky(call: Callable[..., Any], at: int, each_s: float = 0.0) -> Callable[..., Any]:
    """Raises in call number `at`, if it is not 0. `clocked` believes that it takes `each_s`."""
    calls = 0

    def step(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("it broke")
        return call(*given)

    step.each_s = each_s  # type: ignore[attr-defined]
    return step


def clocked(step: Callable[[], Any], device: str, count: int = 1) -> float:
    for _ in range(count):
        step()
    return getattr(step, "each_s", 2e-3)


class Checked(nn.Module):
    """The model as a way runs it when its outputs are checked."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__()
        self.model, self.call = model, flaky(model, at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def compared(workload: Workload, monkeypatch: pytest.MonkeyPatch, **breaks: int) -> tuple[EndToEnd, Plan]:
    """Compare five ways, of which two are patched; `breaks` says in which call of the model or of a step one raises."""
    model, config = workload.model, Config(rounds=4)
    plan = make_plan(model, X)
    assert plan.entries

    def way(name: str, key: str, each_s: float, **facts: Any) -> Way:
        checked = Checked(model, breaks.get(f"{key}_model", 0))
        step = flaky(workload.step, breaks.get(f"{key}_step", 0), each_s)
        return Way(name, checked, step, 2.0, **facts)

    def tried(self: Any, plan: Plan) -> Way:
        backend = Backend(plan.composed("eager"))
        backend.counters.replaced["one"] = 1
        name, each_s = (
            f"patched, rest {plan.composition}",
            {"eager": 3e-4, "cudagraph": 1e-4, "inductor": 2e-4}[plan.composition],
        )
        return way(name, plan.composition, each_s, backend=backend, composition=plan.composition)

    monkeypatch.setattr(endtoend._Bench, "_try", tried)
    monkeypatch.setattr(endtoend, "compositions", lambda *_: ("eager", "cudagraph", "inductor"))
    monkeypatch.setattr(endtoend, "COPIED_SHARE", 1e6)
    monkeypatch.setattr(endtoend, "SAMPLE_S", 0.0)
    monkeypatch.setattr(endtoend, "seconds", clocked)
    built = Rivals((way("compile", "compile", 1e-3), way("other", "other", 1e-3)), ())
    return endtoend.compare(workload, plan, config, lambda *_: None, built=built)


@pytest.mark.parametrize(
    ("breaks", "lost"),
    [
        ({"compile_model": 1}, "compile"),
        ({"compile_step": 4}, "compile"),
        ({"cudagraph_step": 1}, PATCHED[1]),
        ({"cudagraph_step": 6}, PATCHED[1]),
        ({"cudagraph_model": 1}, PATCHED[1]),
        ({"eager_step": 2}, PATCHED[0]),
    ],
    ids=[
        "its check",
        "a sample of it",
        "whether it replays",
        "patched",
        "last check",
        "rest eager",
    ],
)
def test_only_the_way_that_raises_is_lost(
    breaks: dict[str, int], lost: str, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    mended: list[str] = []
    monkeypatch.setattr(ways, "mend", mended.append)
    verdict, _ = compared(workload, monkeypatch, **breaks)
    found = {r.name: r for r in verdict.rivals}
    assert found[lost].reason == "RuntimeError: it broke"
    assert found[lost].time is None
    timed = {"compile", "other", *PATCHED} - {lost}
    assert {r.name for r in verdict.rivals if r.time is not None} >= timed
    assert mended == ["cpu"]
    assert verdict.patched is not None and verdict.verified
    replayed = found["patched, rest inductor"].reason == endtoend.REPLAYED
    assert replayed is ("cudagraph_step" not in breaks or breaks["cudagraph_step"] > 3)
    assert verdict.composition == ("cudagraph" if lost != PATCHED[1] else "eager" if replayed else "inductor")


def test_no_patched_way_may_be_left(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {f"{key}_model": 1 for key in ("eager", "cudagraph", "inductor")}
    verdict, plan = compared(workload, monkeypatch, **given)
    assert plan.is_empty
    assert "No patched form of the model passed its check" in verdict.verdict


def test_eager_itself_ends_it(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Way("eager again", workload.model, flaky(workload.step, 2), 0.0)
    monkeypatch.setattr(endtoend._Bench, "_try", lambda *_: "it is not tried")
    monkeypatch.setattr(endtoend, "measure", lambda w, *a, real=endtoend.measure: real([w[0], broken], *a))
    with pytest.raises(RuntimeError, match="it broke"):
        endtoend.compare(
            workload, make_plan(workload.model, X), Config(rounds=4), lambda *_: None, built=Rivals((), ())
        )


def test_without_more_precision_the_model_stays_and_the_rivals_are_timed(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(modelcheck, "convert", lacking)
    verdict, plan = compared(workload, monkeypatch)
    found = {r.name: r for r in verdict.rivals}
    assert plan.is_empty
    assert found["compile"].time is not None and found["compile"].reason.startswith("Not checked: the model can't be")
    assert "float64: RuntimeError" in found[PATCHED[0]].reason


def test_an_entry_that_breaks_the_model_is_dropped_and_why_is_told(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, plan: Plan) -> str:
        return "Output 0 has an error of 2 where 1 is allowed."

    plan = make_plan(workload.model, X)
    monkeypatch.setattr(endtoend._Bench, "_try", wrong)
    verdict, kept = endtoend.compare(
        workload, plan, Config(rounds=4, compose="eager"), lambda *_: None, built=Rivals((), ())
    )
    assert not verdict.left_to
    (entry,) = plan.entries
    assert (verdict.dropped, kept.is_empty, verdict.sites_patched) == ([entry.id], True, 0)
    (lost,) = (r for r in verdict.rivals if r.name == PATCHED[0])
    assert lost.reason == f"Without {entry.id} nothing is left of it: Output 0 has an error of 2 where 1 is allowed."
    assert "No patched form of the model passed its check" in verdict.verdict


class Manager:
    """As far as torch's `CUDAGraphTreeManager` goes here."""

    def __init__(self, node: Any) -> None:
        from torch._inductor.cudagraph_trees import ExecutionState

        self.path_state, self._node = ExecutionState.WARMUP, node

    @property
    def current_node(self) -> Any:
        return self._node

    @current_node.setter
    def current_node(self, node: Any) -> None:
        from torch._inductor.cudagraph_trees import ExecutionState

        self._node = node
        if node is None:
            self.path_state = ExecutionState.NONE


def test_a_half_run_node_is_taken_off_the_path() -> None:
    from torch._inductor import cudagraph_trees as trees

    def warmed(parent: Any, outputs: int, expected: int = 2) -> Any:
        made: Any = trees.CUDAWarmupNode(None, parent, None, None, 0, [None] * expected, None, False, None)  # type: ignore[arg-type]
        made.tensor_weakrefs.extend([None] * outputs)
        return made

    recorded: Any = SimpleNamespace(parent=None, tensor_weakrefs=[None], stack_traces=[None])
    state = trees.ExecutionState
    ran = warmed(None, 2)
    for node, left, then in (
        (None, None, state.WARMUP),
        (ran, ran, state.WARMUP),
        (warmed(None, 0, 0), ..., state.WARMUP),
        (warmed(None, 0), None, state.NONE),
        (warmed(warmed(None, 0), 0), None, state.NONE),
        (warmed(ran, 0), ran, state.WARMUP),
        (warmed(recorded, 0), recorded, state.RECORDING),
    ):
        manager = Manager(node)
        graphtrees.drop_unfinished(manager, trees)
        assert manager.current_node is (node if left is ... else left)
        assert manager.path_state is then
    graphtrees.drop_unfinished(object(), trees)
    graphtrees.mend("cpu")
    graphtrees.mend("cuda") if torch.cuda.is_available() else None


def test_optional_stages_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it broke")

    for module, name in (
        (analysis, "ceilings"), (analysis, "precompute"), (layout, "_compare"), (races, "_save_inputs"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, broken)
    everything = dataclasses.replace(layout.WAYS["channels_last"], worth=0.0)
    monkeypatch.setitem(layout.WAYS, "channels_last", everything)
    monkeypatch.setattr(races, "COMPILERS", ())
    monkeypatch.setattr(Spare, "start", lambda self: None)
    monkeypatch.setattr(analysis.rivals, "build", lambda *_: Rivals((), ()))
    monkeypatch.setattr(endtoend.rivals, "build", lambda *_: Rivals((), ()))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU(), nn.LayerNorm(62)).eval()
    session = fusescout.analyze(
        model, (torch.randn(2, 4, 64, 64),), device="cpu", rounds=2, runs=1, jobs=1, effort="quick", cache_dir=tmp_path,
    ).session  # fmt: skip
    said = " ".join(session.warnings)
    for what in ("ceilings could not be measured", "could not be computed once", "channels-last could not be tried"):
        assert f"{what}: RuntimeError: it broke." in said
    assert session.candidates
    assert {c.reason for r in session.candidates for c in r.contenders} == {"RuntimeError: it broke"}
    assert "Keep the framework code" in session.verdict
