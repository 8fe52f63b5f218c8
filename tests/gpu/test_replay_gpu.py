"""The composition "replay" on a GPU: eager operators and fused ones in a CUDA graph give what eager gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_endtoend_gpu import plan_of
from torch import nn
from torch._inductor import cudagraph_trees

import fusescout
from fusescout import endtoend
from fusescout.config import Config
from fusescout.endtoend import compare
from fusescout.plan import Plan
from fusescout.ways import GRAPHED_EAGER
from fusescout.workload import Workload
from fusescout.workload import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Net(nn.Module):
    """Launch-bound, with operators that Inductor would take apart, and a value that outlives the graph that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.silu(self.bn(self.conv(x)), inplace=True).flatten(2).transpose(1, 2)
        for block in self.blocks:
            y = y + block(y) * 0.5
        torch._dynamo.graph_break()
        q = y.unflatten(-1, (2, 16)).transpose(1, 2)
        z = nn.functional.scaled_dot_product_attention(q, q, q)
        torch._dynamo.graph_break()
        return y + z.transpose(1, 2).flatten(2), y.relu()


def drawn(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 8, 8, 8, device="cuda:0", dtype=torch.bfloat16)


@pytest.fixture
def workload() -> Iterator[Workload]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield build(Net().eval(), (torch.randn(4, 8, 8, 8),), device="cuda:0", dtype="bfloat16")
    torch._dynamo.reset()


@pytest.fixture
def plan(workload: Workload) -> Plan:
    made = plan_of(workload).composed("replay").model_copy(update={"computed_once": True})
    assert made.entries
    return made


def recorded() -> int:
    """CUDA graphs that the process holds and that something else doesn't come before."""
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    return 0 if manager is None else len([*manager.get_roots()])


def test_each_call_gives_what_eager_gives(workload: Workload, plan: Plan) -> None:
    model = workload.model
    with torch.no_grad(), fusescout.patch(model, plan) as handle:
        for batch in (4, 4, 4, 4, 2, 2, 2, 4, 3):
            x = drawn(batch)
            got = [t.clone() for t in model(x)]
            for a, b in zip(got, model.forward(x), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert handle.counters.sites
    assert not [r for r in handle.counters.fallbacks.values() if "runs eagerly" in r], handle.counters.fallbacks
    assert recorded() > 0


def test_weights_are_read_where_they_are(workload: Workload, plan: Plan) -> None:
    model = workload.model
    x = drawn()
    with torch.no_grad(), fusescout.patch(model, plan):
        before = [[t.clone() for t in model(x)] for _ in range(4)][-1]
        for parameter in model.parameters():
            parameter.mul_(1.5)
        after = [t.clone() for t in model(x)]
    expected = model(x)
    assert not torch.equal(before[0], after[0])
    for a, b in zip(after, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_gradients_are_left_to_eager(workload: Workload, plan: Plan) -> None:
    model = workload.model
    with fusescout.patch(model, plan) as handle:
        model(drawn())[0].sum().backward()
    assert model.conv.weight.grad is not None
    assert all("records gradients" in r for n, r in handle.counters.fallbacks.items() if n.startswith("graph "))


def test_the_patched_and_the_unpatched_operators_are_both_replayed(
    workload: Workload, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endtoend, "SLOWER", 0.0)
    verdict, _ = compare(workload, plan, Config(rounds=6, device="cuda:0"), lambda *_: None)
    ways = {r.name: r for r in verdict.rivals}
    for name in (GRAPHED_EAGER, "patched, rest replay", "patched, rest eager"):
        assert ways[name].time is not None, (name, ways[name].reason)
    replayed, launched = ways["patched, rest replay"].time, ways["patched, rest eager"].time
    assert replayed is not None and launched is not None
    assert replayed.mid < launched.mid
    assert ways[GRAPHED_EAGER].time.mid < verdict.baseline.mid  # type: ignore[union-attr]
    assert verdict.verified


def test_alone_where_it_is_asked_for_without_a_plan(workload: Workload, plan: Plan) -> None:
    config = Config(rounds=6, device="cuda:0", compose="replay")
    verdict, kept = compare(workload, plan.emptied(), config, lambda *_: None)
    assert kept.is_empty
    assert "In a CUDA graph the same operators are" in verdict.verdict
