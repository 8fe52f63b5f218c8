"""A chain at the bar is raced, or left, by every analysis of its model alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from graphs import Builder
from graphs import spec

from fusescout import races
from fusescout.candidates import Ranking
from fusescout.candidates import rank
from fusescout.config import Config
from fusescout.device import Device
from fusescout.ir import Graph
from fusescout.recall import Recall
from fusescout.session import ContenderResult
from fusescout.session import Interval
from fusescout.tune import RaceResult

DEVICE = Device("cuda", "test", "sm_90a", 132, copy_bytes_per_s=4e12, flops_per_s={"float32": 1e14}, launch_us=3.0)


def chains(*sizes: int) -> Graph:
    b = Builder()
    ends = []
    for size in sizes:
        x = b.op("aten.mul.Tensor", spec(size, 1024), b.input(spec(size, 1024)), 0.5)
        ends.append(b.op("tanh", spec(size, 1024), x))
    return b.graph(*ends)


def analysed(graph: Graph, folder: Path | None, shares: dict[int, float], top: int = 12) -> Ranking:
    """One analysis in which the chain over so many rows takes this share of the step of one second."""
    rows = {n.name: n.out.shape[0] for n in graph.nodes if n.is_op}
    recall = Recall.of([graph], DEVICE, top, folder)
    ranking = rank([graph], lambda _g, n: shares[rows[n]] * 5e5, 1e6, DEVICE, lambda _f, _s: None, top, recall.weight)
    recall.keep((c.key for c in ranking.candidates), ranking.left)
    return ranking


def test_a_chain_that_was_raced_stays_a_candidate(tmp_path: Path) -> None:
    graph = chains(64)
    assert analysed(graph, tmp_path, {64: 0.006}).candidates
    assert analysed(graph, tmp_path, {64: 0.004}).candidates
    assert not analysed(graph, tmp_path, {64: 0.002}).candidates
    assert not analysed(graph, None, {64: 0.004}).candidates


def test_a_chain_that_was_left_must_gain_more(tmp_path: Path) -> None:
    graph = chains(64)
    assert not analysed(graph, tmp_path, {64: 0.004}).candidates
    again = analysed(graph, tmp_path, {64: 0.007})
    assert not again.candidates
    assert "1.0% is needed to be worth a race, since an earlier analysis left it" in again.rejections[0].reason
    assert analysed(graph, tmp_path, {64: 0.02}).candidates
    assert analysed(graph, tmp_path, {64: 0.004}).candidates, "it was raced since"


def test_the_last_place_is_not_lost_to_noise_and_the_best_come_first(tmp_path: Path) -> None:
    graph = chains(64, 128, 256)
    first = analysed(graph, tmp_path, {64: 0.05, 128: 0.03, 256: 0.028}, top=2)
    second = analysed(graph, tmp_path, {64: 0.03, 128: 0.028, 256: 0.04}, top=2)
    assert {c.key for c in first.candidates} == {c.key for c in second.candidates}
    assert [c.gain_us for c in second.candidates] == sorted((c.gain_us for c in second.candidates), reverse=True)
    assert len(analysed(graph, tmp_path, {64: 0.03, 128: 0.028, 256: 0.006}, top=3).candidates) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"raced": 1, "left": []}', "[" * 100_000])
def test_a_damaged_memory_is_none(tmp_path: Path, text: str) -> None:
    graph = chains(64)
    analysed(graph, tmp_path, {64: 0.006})
    (file,) = (tmp_path / "rankings").iterdir()
    file.write_text(text)
    assert Recall.of([graph], DEVICE, 12, tmp_path).raced == frozenset()
    assert analysed(graph, tmp_path, {64: 0.006}).candidates


@pytest.mark.parametrize(
    ("noise", "eager_us", "believed"), [(1.02, 3000.0, True), (1.2, 3000.0, False), (1.02, 3e6, False)]
)
def test_a_race_that_a_disturbed_machine_spoiled_is_run_again(
    monkeypatch: pytest.MonkeyPatch, noise: float, eager_us: float, believed: bool
) -> None:
    (candidate,) = analysed(chains(64), None, {64: 0.006}).candidates
    stored = RaceResult((), {"eager": [eager_us] * 3}, Interval(mid=noise, low=noise, high=noise, samples=3))
    forgotten: list[Any] = []
    monkeypatch.setattr(races, "stored_race", lambda *_: stored)
    monkeypatch.setattr(races, "forget_race", lambda subgraph, *_: forgotten.append(subgraph.key))
    found = races._known(candidate, DEVICE, Config())
    assert (found is stored) == believed
    assert forgotten == ([] if believed else [candidate.key])


def test_a_race_that_a_full_disk_spoiled_ends_the_run_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    (candidate,) = analysed(chains(64), None, {64: 0.006}).candidates
    reason = "The C++ compiler refuses the kernel:\nfatal error: error writing to k.s: No space left on device"
    failed = ContenderResult(name="tilelang", status="failed", reason=reason)
    stored = RaceResult((failed,), {"eager": [3000.0] * 3}, Interval(mid=1.0, low=1.0, high=1.0, samples=3))
    forgotten: list[Any] = []
    monkeypatch.setattr(races, "stored_race", lambda *_: stored)
    monkeypatch.setattr(races, "forget_race", lambda subgraph, *_: forgotten.append(subgraph.key))
    assert races._known(candidate, DEVICE, Config()) is None
    assert forgotten == [candidate.key]
    error = races._no_space(stored)
    assert error is not None
    assert error.exit_code == 3
    assert error.why == "fatal error: error writing to k.s: No space left on device"
