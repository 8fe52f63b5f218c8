"""The composition "replay": eager operators in a CUDA graph. Here all of it but the capture, which needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_one_trace import bench_of
from test_patching import make_plan
from torch import fx
from torch import nn

import fusescout
from fusescout import cli
from fusescout import endtoend
from fusescout import patching
from fusescout import replay
from fusescout.capture.aten import to_aten
from fusescout.compose import compose
from fusescout.config import Config
from fusescout.errors import CompositionUnavailable
from fusescout.patching import Backend
from fusescout.plan import Plan
from fusescout.ways import GRAPHED_EAGER
from fusescout.ways import Way
from fusescout.workload import build


class Net(nn.Module):
    """Operators that a table of decompositions would take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True)
        self.fc, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.act(self.bn(self.conv(x))).flatten(2).transpose(1, 2).contiguous()
        y = self.norm(F.gelu(self.fc(y)))
        q = y.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q), y[:1]


Seen = list[tuple[fx.GraphModule, list[int], int]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What would be captured: graphs, the places of inputs that keep their address, and how many inputs there are."""
    found: Seen = []

    def capture(graph: fx.GraphModule, inputs: list[Any], static: Sequence[int]) -> Callable[..., Any]:
        found.append((graph, list(static), len(inputs)))
        return replay.boxed(graph)

    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(replay, "cuda_graph", capture)
    monkeypatch.setattr(patching, "GRAPHED", frozenset())
    return found


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return compose(module, to_aten(module, inputs), inputs, "replay")


def test_the_graph_holds_eagers_own_operators_and_copies_no_weights(seen: Seen) -> None:
    model = Net().eval()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad():
        for size in (6, 6, 8):
            x = torch.randn(2, 3, size, size)
            for got, expected in zip(compiled(x), model(x), strict=True):
                assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert len(seen) == 2, "one for each shape"
    graph, static, count = seen[0]
    ops = targets(graph)
    for name in (
        "convolution.default", "_native_batch_norm_legit_no_training.default", "silu.default", "addmm.default",
        "gelu.default", "native_layer_norm.default", "_scaled_dot_product_flash_attention_for_cpu.default",
    ):  # fmt: skip
        assert ops.count(f"aten.{name}") == 1, ops
    assert len(static) == count - 1 == len([*model.parameters(), *model.buffers()]) - 1, "num_batches_tracked is unread"


def test_a_patched_model_replays_its_fused_operators(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.fc(x) + torch.arange(16).float())

    model, x = Block().eval(), torch.randn(4, 16)
    plan = make_plan(model, x).composed("replay").model_copy(update={"computed_once": True})
    assert plan.entries
    with torch.no_grad(), fusescout.patch(model, plan) as handle:
        got = [model(rows) for rows in (x, x + 1, x[:2])]
    with torch.no_grad():
        for rows, found in zip((x, x + 1, x[:2]), got, strict=True):
            torch.testing.assert_close(found, model(rows))
    assert handle.counters.sites == 1 and handle.counters.computed_once
    fused = [t for t in targets(seen[0][0]) if t.startswith("fusescout.")]
    assert len(fused) == 1
    graph, static, count = seen[0]
    assert not [t for t in targets(graph) if "arange" in t]
    assert len(static) == count - 1, "the kept value stays where it is too"


def test_what_cannot_be_replayed_runs_eagerly_and_says_why(seen: Seen) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(4, 16)
    plan = make_plan(model, x).composed("replay")
    with fusescout.patch(model, plan) as handle:
        model(x).sum().backward()
    assert not seen
    assert handle.counters.fallbacks == {"graph 0": "replay can't run it: it records gradients; the graph runs eagerly"}
    assert model[0].weight.grad is not None
    assert endtoend._nothing_replayed(SimpleNamespace(counters=handle.counters)).startswith("replay can't")


def test_what_stands_against_a_capture() -> None:
    def graph(*values: Any, target: Any = torch.ops.aten.relu.default) -> fx.GraphModule:
        made = fx.Graph()
        x = made.placeholder("x")
        x.meta["val"] = values[0]
        node = made.call_function(target, (x,))
        node.meta["val"] = values[1]
        made.output((node,))
        return fx.GraphModule(nn.Module(), made)

    class OnGpu(torch.Tensor):
        device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    on_cpu = torch.ones(2)
    on_gpu = on_cpu.as_subclass(OnGpu)
    seeds = (on_gpu, on_cpu)  # attention's random state; torch says "cpu" of it, and nobody reads it
    assert replay.obstacle(graph(on_gpu, on_gpu), set()) == ""
    assert replay.obstacle(graph(on_gpu, seeds), set()) == ""
    assert replay.obstacle(graph(on_gpu, torch.ones(2, device="meta")), set()) == ""
    assert replay.obstacle(graph(on_gpu, on_gpu), {0}) == "it writes its inputs"
    assert replay.obstacle(graph(on_gpu, on_cpu), set()) == "some of it is on another device (cpu)"
    helper = torch.ops.aten._fused_moving_avg_obs_fq_helper_functional.default
    assert replay.obstacle(graph(on_gpu, on_gpu, target=helper), set()) == f"{helper} can't be captured"


def test_it_needs_a_gpu_and_no_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    plan = make_plan(model, x).composed("replay")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path) == plan
    with pytest.raises(CompositionUnavailable, match="replay"):
        fusescout.patch(model, plan)
    on_gpu = replace(build(model, (x,)), device="cuda:0")
    assert endtoend.compositions(Config(compose="replay"), on_gpu) == ("replay",)
    with pytest.raises(CompositionUnavailable, match="gradients"):
        endtoend.compositions(Config(compose="replay"), replace(on_gpu, mode="training"))
    (tmp_path / "model.py").write_text(
        "import torch\ndef get_model(): return torch.nn.Linear(2, 2)\ndef get_inputs(): return (torch.ones(1, 2),)\n"
    )
    assert cli.main(["analyze", "--with", "replay", "--device", "cpu", str(tmp_path / "model.py")]) == 2
    assert "can't be run by replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compose_", "empty", "graphs_s", "tried"),
    [
        ("auto", False, 0.9, []),
        ("auto", False, 1.04, []),
        ("auto", False, 1.2, ["bare", "patched"]),
        ("auto", False, None, ["bare", "patched"]),
        ("replay", False, 0.9, ["bare", "patched"]),
        ("auto", True, 0.9, []),
        ("auto", True, 1.2, ["bare"]),
    ],
)
def test_it_is_tried_where_inductor_is_slower_than_eager(
    compose_: Any, empty: bool, graphs_s: float | None, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval(), torch.randn(4, 16)
    bench = bench_of(model, x)
    bench.config = Config(compose=compose_)
    plan = make_plan(model, x)
    done = Backend(plan)
    done.counters.replaced["one"] = 1
    found: list[str] = []

    def fake(name: str, each_s: float, **facts: Any) -> Way:
        return Way(name, model, lambda: each_s, 1.0, **facts)

    bench.ways[:] = [replace(way, step=lambda: 1.0) for way in bench.ways]  # type: ignore[arg-type]
    bench.ways.append(fake(endtoend.PATCHED[0], 1.0, backend=done, composition="eager"))
    if graphs_s is not None:
        bench.ways.append(fake("compile + CUDA graphs", graphs_s))
        bench.ways.append(fake(endtoend.PATCHED[1], graphs_s, backend=done, composition="cudagraph"))
    before = len(bench.ways)

    def attempt(given: Plan) -> Way:
        assert given.composition == "replay"
        found.append("bare" if given.is_empty else "patched")
        return fake("patched, rest replay", 1.0, backend=done, composition="replay")

    monkeypatch.setattr(bench, "_try", attempt)
    monkeypatch.setattr(endtoend, "seconds", lambda step, *_: step())
    bench.add_patched(plan.emptied() if empty else plan, "replay")
    assert found == tried
    names = {"bare": GRAPHED_EAGER, "patched": "patched, rest replay"}
    assert [w.name for w in bench.ways[before:]] == [names[t] for t in tried]
    assert all((w.backend is None) is (w.name == GRAPHED_EAGER) for w in bench.ways[before:])
