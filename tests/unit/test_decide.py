"""The acceptance rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder
from graphs import spec

from fusescout.candidates import Candidate
from fusescout.decide import Decision
from fusescout.decide import decide
from fusescout.decide import select
from fusescout.session import ContenderResult
from fusescout.session import Site


def candidate(name: str = "a", sites: tuple[tuple[str, ...], ...] = (("n1", "n2"),)) -> Candidate:
    b = Builder()
    y = b.op("relu", spec(4, 4), b.input(spec(4, 4)))
    graph = b.graph(y)
    return Candidate(
        name, "pointwise", graph.subgraph([y])[0], tuple(Site(graph=0, nodes=list(s)) for s in sites), ("n0",),
        100.0, 10.0, 90.0, 0.5, 1, 0.0, 0.0,
    )  # fmt: skip


def samples(median: float, seed: int, spread: float = 0.01) -> list[float]:
    return list(median * (1 + spread * np.random.default_rng(seed).standard_normal(40)))


def run(times: dict[str, float], threshold: float = 1.05, spread: float = 0.01, **status: str) -> Decision:
    results = [ContenderResult(name=n, status=status.get(n, "ok"), compile_s=2.0) for n in times]
    measured = {n: samples(t, k, spread) for k, (n, t) in enumerate(times.items())}
    return decide(candidate(), results, measured, threshold)


def test_a_kernel_that_beats_all_others_wins() -> None:
    decision = run({"eager": 100, "framework": 90, "inductor": 80, "tilelang": 60})
    assert (decision.winner, decision.accepted) == ("tilelang", True)
    assert decision.speedup is not None
    assert decision.speedup.mid == pytest.approx(80 / 60, rel=0.02), "over the best other, not over eager"
    assert decision.pays_back_calls == pytest.approx(2e6 / 40, rel=0.05)
    assert "as fast as inductor, the best other way" in decision.reason


def test_a_winner_that_something_costlier_beats_is_not_called_the_best() -> None:
    decision = run({"eager": 100, "framework": 80, "inductor": 78.4, "tilelang": 90})
    assert (decision.winner, decision.accepted) == ("framework", True)
    assert "as fast as eager, the best cheaper way" in decision.reason
    assert "inductor is 1.02 times as fast again" in decision.reason


def test_a_kernel_as_fast_as_inductor_is_not_worth_owning() -> None:
    decision = run({"eager": 100, "inductor": 80, "tilelang": 79})
    assert decision.winner == "inductor"
    assert "tilelang is 1.0" in decision.reason


def test_eager_stays_when_nothing_is_clearly_faster() -> None:
    decision = run({"eager": 100, "inductor": 99, "tilelang": 98})
    assert (decision.winner, decision.accepted) == ("eager", False)
    assert "1.05" in decision.reason


def test_noise_that_reaches_below_the_threshold_is_no_win() -> None:
    assert not run({"eager": 100, "tilelang": 93}, spread=0.2).accepted


def test_what_did_not_verify_can_not_win() -> None:
    decision = run({"eager": 100, "tilelang": 10}, tilelang="wrong")
    assert not decision.accepted


def test_no_baseline_no_verdict() -> None:
    assert not run({"eager": 100, "tilelang": 10}, eager="failed").accepted


def test_the_threshold_is_the_users() -> None:
    assert run({"eager": 100, "tilelang": 90}, threshold=1.05).accepted
    assert not run({"eager": 100, "tilelang": 90}, threshold=1.5).accepted


def test_no_node_is_claimed_twice_and_the_larger_gain_goes_first() -> None:
    small = candidate("small", (("n1", "n2"), ("n5",)))
    large = candidate("large", (("n2", "n3"),))
    decisions = {
        "small": Decision("tilelang", True, "", None, None, 10.0, 1.0),
        "large": Decision("tilelang", True, "", None, None, 50.0, 1.0),
    }
    assert [(c.id, n) for c, n in select([small, large], decisions)] == [("large", 1), ("small", 1)]


def test_under_inductor_a_chain_it_won_is_left_to_it_and_frees_its_operators() -> None:
    norm, residual = candidate("norm", (("add", "norm"),)), candidate("residual", (("linear", "add"),))
    decisions = {
        "norm": Decision("inductor", True, "", None, None, 50.0, 1.0, saved_over_inductor_us=40.0),
        "residual": Decision("tilelang", True, "", None, None, 20.0, 1.0, saved_over_inductor_us=15.0),
    }
    assert [c.id for c, _ in select([norm, residual], decisions)] == ["norm"]
    assert [c.id for c, _ in select([norm, residual], decisions, compiled=True)] == ["residual"]


def test_a_longer_chain_goes_first_where_it_saves_more_at_a_site() -> None:
    short = candidate("short", tuple((f"a{k}", f"b{k}") for k in range(12)))
    long = candidate("long", (("a1", "b1", "c1"),))
    decisions = {
        "short": Decision("tilelang", True, "", None, None, 120.0, 1.0),
        "long": Decision("tilelang", True, "", None, None, 50.0, 1.0),
    }
    assert [(c.id, n) for c, n in select([short, long], decisions)] == [("long", 1), ("short", 11)]
    decisions["long"] = Decision("tilelang", True, "", None, None, 9.0, 1.0)
    assert [(c.id, n) for c, n in select([short, long], decisions)] == [("short", 12)]


def test_what_a_short_chain_leaves_over_is_paid_for_where_inductor_would_have_run_it_along() -> None:
    short, long = candidate("short", (("conv", "norm"),)), candidate("long", (("conv", "norm", "add", "relu"),))
    result = sum(s.nbytes for s in short.subgraph.output_specs)
    short, long = replace(short, bytes=3.0 * result), replace(long, bytes=4.0 * result)
    decisions = {
        "short": Decision("tilelang", True, "", None, None, 90.0, 1.0, saved_over_inductor_us=98.0),
        "long": Decision("tilelang", True, "", None, None, 80.0, 1.0, saved_over_inductor_us=82.0),
    }
    bandwidth = 3 * result / 73e-6  # the add reads both and writes one: 73 µs
    chosen = [select([short, long], decisions, compiled=c, copy_bytes_per_s=bandwidth) for c in (True, False)]
    assert [[c.id for c, _ in way] for way in chosen] == [["long"], ["short"]]


def test_what_inductor_runs_faster_than_the_winner_is_left_to_it() -> None:
    decision = run({"eager": 100, "framework": 82, "inductor": 80})
    assert (decision.winner, decision.accepted) == ("framework", True)
    assert decision.saved_over_inductor_us < 0
    assert not select([candidate()], {"a": decision}, compiled=True)
    assert select([candidate()], {"a": decision})


def test_savings_under_inductor_count_from_inductors_own_time() -> None:
    decision = run({"eager": 250, "framework": 78, "inductor": 153, "tilelang": 71})
    assert decision.winner == "tilelang"
    assert decision.saved_over_inductor_us == pytest.approx(153 - 71, rel=0.05)
