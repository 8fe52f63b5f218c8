"""The verdict on samples of every way, and the plan that comes with it."""

from typing import Any

import pytest
import torch
from test_patching import make_plan
from torch import nn

from fusescout.conclusion import conclude
from fusescout.conclusion import leave
from fusescout.config import Config
from fusescout.counters import Counters
from fusescout.patching import patch
from fusescout.session import ErrorStats
from fusescout.ways import GRAPHED_EAGER
from fusescout.ways import Way

MODEL, X = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Softmax(-1)).eval(), torch.randn(4, 16)
EXACT = ErrorStats(worst=0.5, contender_max=1e-6, eager_max=1e-6, cases=1, deterministic=True)


class Backend:
    def __init__(self, plan: Any) -> None:
        self.plan, self.counters = plan, Counters()


def concluded(check: Any = lambda way: EXACT, config: Config | None = None, **each_us: float) -> Any:
    """From the time of each way; "patched" is one that a plan was carried out in."""
    plan = make_plan(MODEL, X)
    names = {"compiled": "compile", "graphed": "compile + CUDA graphs", "replayed": GRAPHED_EAGER,
             "tuned": "compile max-autotune"}  # fmt: skip
    times = {"eager": 100.0, "eager again": 100.0} | {names.get(k, k): v for k, v in each_us.items()}
    ways = [
        Way(n, MODEL, lambda: None, 0.0, Backend(plan) if n == "patched" else None, "eager" if n == "patched" else None)
        for n in times
    ]
    drift = {n: [(k - 4) * (1 if "eager" in n else (-1) ** k) / 1000 for k in range(9)] for n in times}
    samples = {n: [t * (1 + d) for d in drift[n]] for n, t in times.items()}
    given = plan if "patched" in each_us else plan.emptied()
    config = config or Config()
    return leave(*conclude(given, ways, [], samples, [], config, EXACT), ways, samples, config, check)


@pytest.mark.parametrize(
    ("each_us", "left_to", "composition"),
    [
        ({"compiled": 50.0}, "compile", "inductor"),
        ({"compiled": 50.0, "graphed": 40.0}, "compile + CUDA graphs", "cudagraph"),
        ({"compiled": 50.0, "replayed": 40.0}, GRAPHED_EAGER, "replay"),
        ({"patched": 70.0, "compiled": 50.0}, "compile", "inductor"),
        ({"patched": 130.0, "compiled": 99.0}, "compile", "inductor"),
    ],
)
def test_a_model_that_no_patch_helps_is_left_to_the_fastest_other_way(
    each_us: dict[str, float], left_to: str, composition: str
) -> None:
    verdict, plan = concluded(**each_us)
    assert plan.is_empty and plan.composition == composition
    assert (verdict.left_to, verdict.rival, verdict.composition) == (left_to, left_to, composition)
    fastest = min(each_us.values())
    assert verdict.speedup.mid == pytest.approx(100 / fastest)
    assert verdict.patched.mid == pytest.approx(fastest, rel=0.01)
    assert verdict.speedup_over_rival.mid == 1.0
    assert (verdict.sites_patched, verdict.verified) == (0, True)
    assert verdict.verdict.startswith("Keep the framework code")
    assert f"The plan leaves the whole model to {left_to}: {100 / fastest:.2f} times" in verdict.verdict


def test_whether_a_plan_holds_does_not_depend_on_other_ways() -> None:
    """`fusescout apply` asks that: a model that could be left to `torch.compile` is no reason to say yes."""
    plan = make_plan(MODEL, X)
    times = {"eager": 100.0, "eager again": 100.0, "compile": 50.0, "patched": 40.0}
    ways = [Way(n, MODEL, lambda: None, 0.0, Backend(plan) if n == "patched" else None, "eager") for n in times]
    samples = {n: [t] * 9 for n, t in times.items()}
    verdict, kept = conclude(plan, ways, [], samples, [], Config(), "Output 0 has an error of 2 where 1 is allowed")
    assert (verdict.verified, verdict.left_to, kept) == (False, "", plan.emptied())
    verdict, kept = leave(verdict, kept, ways, samples, Config(), lambda _: EXACT)
    assert (verdict.left_to, kept) == ("compile", plan.emptied().composed("inductor"))


def test_a_plan_that_leaves_the_model_to_inductor_is_carried_out_as_planned() -> None:
    torch._dynamo.reset()
    plan = make_plan(MODEL, X).emptied().composed("inductor")
    handle = patch(MODEL, plan)
    with torch.no_grad():
        torch.testing.assert_close(MODEL(X), MODEL.forward(X))
    assert (handle.counters.captures, handle.counters.framework_calls, handle.counters.fallbacks) == (1, 0, {})
    handle.undo()


def test_a_patch_that_is_as_fast_is_kept() -> None:
    verdict, plan = concluded(patched=50.0, compiled=50.0)
    assert len(plan.entries) == 1 and plan.composition == "eager"
    assert (verdict.left_to, verdict.rival) == ("", "compile")


def test_what_a_plan_can_not_carry_out_stays_a_rival() -> None:
    verdict, plan = concluded(compiled=50.0, tuned=40.0)
    assert (verdict.left_to, verdict.rival, plan.composition) == ("compile", "compile max-autotune", "inductor")
    assert verdict.speedup_over_rival.mid == pytest.approx(0.8)


def test_a_way_that_is_off_is_passed_over_and_the_verdict_says_why() -> None:
    def check(way: Way) -> ErrorStats | str:
        return "Output 0 has an error of 2 where 1 is allowed." if way.name == "compile + CUDA graphs" else EXACT

    verdict, plan = concluded(compiled=50.0, graphed=40.0, check=check)
    assert (verdict.left_to, plan.composition, verdict.speedup_over_rival.mid) == ("compile", "inductor", 0.8)
    said = verdict.verdict.index("It is not left to compile + CUDA graphs, 2.50 times")
    assert "as fast as eager: Output 0 has an error of 2 where 1 is allowed. The plan leaves" in verdict.verdict[said:]
    verdict, plan = concluded(compiled=50.0, check=broken)
    assert verdict.verdict.endswith("as fast as eager: RuntimeError: it broke.") and plan == plan.emptied()


def broken(way: Way) -> ErrorStats:
    raise RuntimeError("it broke")


@pytest.mark.parametrize(
    "given",
    [
        {"compiled": 99.9},
        {"compiled": 120.0},
        {"compiled": 50.0, "check": lambda way: "Output 0 has an error"},
        {"compiled": 50.0, "check": broken},
        {"compiled": 50.0, "config": Config(compose="eager")},
        {"compiled": 50.0, "config": Config(min_gain=3.0)},
        {"tuned": 50.0},
    ],
)
def test_else_it_stays_as_it_is(given: dict[str, Any]) -> None:
    verdict, plan = concluded(**given)
    assert plan.is_empty and plan.composition == "eager"
    assert verdict.left_to == "" and verdict.patched is None and verdict.speedup is None
    assert verdict.verdict.startswith("Keep the framework code. No chain was accepted; eager takes 0.1 ms")
