"""The whole model on a GPU: patched forms out of one trace, memory before a CUDA graph's capture, code made ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fusescout import endtoend
from fusescout import rivals
from fusescout.capture import capture
from fusescout.config import Config
from fusescout.contenders.inductor import Inductor
from fusescout.endtoend import compare
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.ways import compiling
from fusescout.workerpool import STARTUP_S
from fusescout.workerpool import Worker
from fusescout.workload import Workload
from fusescout.workload import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * 0.5
        return x


@pytest.fixture
def workload() -> Workload:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return build(Net(), (torch.randn(64, 1024),), device="cuda:0", dtype="bfloat16")


def plan_of(workload: Workload) -> Plan:
    """Every norm with what is around it, computed by the framework's operators."""
    entries = {}
    for captured in capture(workload).graphs:
        for region in find_regions(captured.graph):
            subgraph, _ = captured.graph.subgraph(region.nodes)
            if region.family == "rowwise":
                entries[subgraph.key] = Entry(
                    id=f"rowwise-{subgraph.key[:8]}", family="rowwise", chain=list(subgraph.chain),
                    subgraph=subgraph.to_json(), contender="eager", variant={}, sites=1,
                )  # fmt: skip
    return Plan(
        target="net", mode="inference", device_kind="cuda", device_name=describe_device("cuda").name,
        torch=torch.__version__, entries=list(entries.values()),
    )  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
def test_the_ways_of_a_patched_model(workload: Workload, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, config = plan_of(workload), Config(rounds=6, device="cuda:0", effort="quick")
    monkeypatch.setattr(endtoend, "COPIED_SHARE", 1.0)
    with compiling(workload):
        built = rivals.build(workload, config, lambda *_: None) if early else None
        verdict, _ = compare(workload, plan, config, lambda *_: None, built=built)
    ways = {r.name: r for r in verdict.rivals}
    assert ways["patched, rest inductor"].reason == endtoend.REPLAYED
    assert verdict.verified
    timed = ("compile", "compile + CUDA graphs", "patched, rest eager", "patched, rest cudagraph")
    for name in timed:
        way = ways[name]
        assert way.time is not None, way.reason
        assert way.compile_s > 0
        assert way.peak_bytes is not None and 0 < way.peak_bytes < 128 << 20, (name, way.peak_bytes)
    replayed = ways["patched, rest cudagraph"].time
    launched = ways["patched, rest eager"].time
    assert replayed is not None and launched is not None
    assert replayed.mid < launched.mid


def test_large_inputs_leave_inductor_in_the_running(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endtoend, "COPIED_SHARE", 0.0)
    verdict, _ = compare(workload, plan_of(workload), Config(rounds=2, device="cuda:0"), lambda *_: None)
    ways = {r.name: r for r in verdict.rivals}
    assert ways["patched, rest inductor"].time is not None, ways["patched, rest inductor"].reason


def test_there_is_room_for_the_rivals_of_a_small_model(workload: Workload) -> None:
    assert rivals.have_room(workload)


def test_inductors_code_made_ahead_is_found(tmp_path: Path) -> None:
    spec = TensorSpec((512, 1024), "bfloat16", (1024, 1))
    ops = (Op("aten.relu.default", (Ref(0),), (), spec), Op("aten.neg.default", (Ref(1),), (), spec))
    graph, device = Subgraph((spec,), ops, (2,)), describe_device("cuda")
    made = Inductor(cold=True, cache_dir=tmp_path)
    ahead_s = made.compile(graph, {"mode": "default"}, device)
    counters.clear()
    built = made.build(graph, {"mode": "default"}, device)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert built.compile_s >= ahead_s
    x = torch.randn(512, 1024, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(built.run([x])[0], -x.relu())


def test_a_worker_gets_ready_for_the_gpu() -> None:
    with Worker() as worker:
        assert worker.call("ready", STARTUP_S, device="cuda")["pid"] == worker.pid
