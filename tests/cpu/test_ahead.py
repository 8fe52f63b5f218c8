"""What is made ahead of the races: Inductor's code of the chains, and the model's rivals."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fusescout
import fusescout.numerics
from fusescout import analysis
from fusescout import endtoend
from fusescout import prefetch
from fusescout import races
from fusescout import rivals
from fusescout.candidates import Candidate
from fusescout.config import Config
from fusescout.contenders.inductor import Inductor
from fusescout.device import Device
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.prefetch import times_padding
from fusescout.probe import describe_device
from fusescout.worker import Refused
from fusescout.worker import Session
from fusescout.workerpool import Spare

VARIANT = {"mode": "default"}


def product(m: int, n: int, k: int) -> Subgraph:
    x, w, out = (TensorSpec(s, "bfloat16", (s[1], 1)) for s in ((m, k), (n, k), (m, n)))
    linear = Op("aten.linear.default", (Ref(0), Ref(1)), (), out)
    return Subgraph((x, w), (linear, Op("aten.relu.default", (Ref(2),), (), out)), (3,))


def pointwise() -> Subgraph:
    spec = TensorSpec((64, 7), "float32", (7, 1))
    return Subgraph(
        (spec,), (Op("aten.relu.default", (Ref(0),), (), spec), Op("aten.neg.default", (Ref(1),), (), spec)), (2,)
    )


def test_a_chain_compiled_ahead_is_found_by_its_race_and_costs_what_it_did(tmp_path: Path) -> None:
    device, contender = describe_device("cpu"), Inductor(cold=True, cache_dir=tmp_path)
    session = Session()
    opening: dict[str, Any] = {"inputs": None, "seed": 0, "templates": [], "numerics": fusescout.numerics.current()}
    session.open(
        pointwise().to_json(), dataclasses.asdict(device), cache_dir=str(tmp_path), compile_only=True, **opening
    )
    priority = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.setpriority", lambda *given: priority.append(given[-1]))
        ahead_s = session.compile("inductor", VARIANT)["compile_s"]
        with pytest.raises(Refused):
            session.compile("eager", {})
    assert priority == [10, 10]
    counters.clear()
    built = contender.build(pointwise(), VARIANT, device)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert built.compile_s >= ahead_s > 0
    x = torch.randn(64, 7)
    assert torch.equal(built.run([x])[0], -x.relu())


def test_chains_that_inductor_would_time_are_left_to_the_races() -> None:
    assert times_padding(product(64, 50257, 64))
    assert times_padding(product(64, 64, 68))
    assert not times_padding(product(64, 64, 64))
    assert not times_padding(pointwise())


def test_children_compile_every_chain_and_end_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Child] = []

    class Child:
        def __init__(self, environment: Any) -> None:
            self.asked: list[str] = []
            self.gone = False
            made.append(self)

        def call(self, request: str, _deadline_s: float, **_: Any) -> None:
            self.asked.append(request)

        def kill(self) -> None:
            self.gone = True

        close = kill

    monkeypatch.setattr(prefetch, "Worker", Child)
    chains, gpu = (
        [product(64, 64, 8 * k) for k in range(1, 8)] + [product(64, 50257, 64)],
        Device("cuda", "x", "sm_90", 1),
    )
    with prefetch.chains_ahead(chains, gpu, Config(jobs=8, cache_dir=tmp_path)):
        until = time.monotonic() + 5
        while sum(len(c.asked) for c in made) < 14 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(made) == 2
    assert sorted(r for c in made for r in c.asked) == ["compile"] * 7 + ["open"] * 7
    assert all(c.gone for c in made)
    with prefetch.chains_ahead(chains, describe_device("cpu"), Config(jobs=8, cache_dir=tmp_path)):
        assert len(made) == 2


def test_the_rivals_are_built_before_the_races_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And their seconds count for the whole model, though they lie inside of the races'."""
    order: list[str] = []

    def build(*given: Any) -> rivals.Rivals:
        order.append("rivals")
        time.sleep(0.3)
        return real(*given)

    def race_all(candidates: tuple[Candidate, ...], *given: Any) -> dict[str, Any]:
        order.append("races")
        return races.race_all((), *given)

    real = rivals.build
    monkeypatch.setattr(rivals, "have_room", lambda _: True)
    monkeypatch.setattr(rivals, "build", build)
    monkeypatch.setattr(analysis, "race_all", race_all)
    monkeypatch.setattr(analysis, "rank", lambda *a, real=analysis.rank: dataclasses.replace(real(*a), candidates=()))
    monkeypatch.setattr(races, "COMPILERS", ())
    monkeypatch.setattr(Spare, "start", lambda self: None)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    outcome = fusescout.analyze(model, (x,), device="cpu", rounds=2, runs=1, effort="quick", cache_dir=tmp_path)
    assert order == ["races", "rivals"]
    assert [r.name for r in outcome.session.end_to_end.rivals][:1] == ["compile"]
    assert outcome.session.stages_s["end to end"] > 0.3 > outcome.session.stages_s["race"]
    assert endtoend.NOTHING_REPLACED not in outcome.session.verdict
