"""Profiling real models on CPU, and costs checked against torch's own knowledge."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fusescout.capture import capture
from fusescout.errors import ProfilerBusy
from fusescout.flops import cost
from fusescout.flops import is_viewable
from fusescout.flops import op_class
from fusescout.graph import OpGraph
from fusescout.ir import TensorSpec
from fusescout.probe import measure_device
from fusescout.profiling import Profile
from fusescout.profiling import profile
from fusescout.profiling.trace import read
from fusescout.workload import Workload


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return self.batch(x + F.dropout(self.down(h), 0.1, self.training))


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        torch._dynamo.graph_break()
        if float(h.sum()) > 1e9:
            return h
        return torch.tanh(h) * 2


def workload(mode: str = "inference", kind: type[Block] = Block, **changes: Any) -> Workload:
    torch.manual_seed(0)
    model = kind().train(mode == "training")
    return Workload(**{"model": model, "args": (torch.randn(16, 8, 32),), "mode": mode, "name": "test", **changes})


def check_sums(found: Profile) -> None:
    nodes = sum(n.time_us + n.backward_us for n in found.nodes)
    assert nodes == found.attributed_us
    assert nodes + found.unlinked_us == found.kernel_us == sum(k.time_us for k in found.kernels)
    assert 0 <= found.coverage <= 1
    assert found.step.low <= found.step.mid <= found.step.high


def test_inference_attributes_every_operator(tmp_path: Path) -> None:
    work = workload()
    captured = capture(work)
    path = tmp_path / "deep" / "trace.json.gz"
    found = profile(work, captured, runs=3, trace_path=path)
    check_sums(found)
    assert found.source == "operators"
    assert found.coverage > 0.99
    ops = {n.name for n in captured.graphs[0].graph.nodes if n.is_op}
    assert {n.node for n in found.nodes} == ops
    assert all(n.time_us > 0 and n.backward_us == 0 for n in found.nodes)
    linear = [k for k in found.kernels if k.name == "aten::linear"]
    assert linear[0].calls == 2
    assert found.trace == str(path)
    assert len(read(path).ops) > 0
    assert b'"traceEvents"' in gzip.decompress(path.read_bytes())
    graph = OpGraph.build([g.graph for g in captured.graphs], found, measure_device("cpu", ("float32",)))
    assert sum(r.time_us for r in graph.rows()) == found.attributed_us
    assert found.info(graph, 1).coverage == found.coverage


def test_training_attributes_backward_to_forward_nodes() -> None:
    work = workload("training")
    captured = capture(work)
    found = profile(work, captured, runs=3)
    check_sums(found)
    assert found.coverage > 0.9
    by_op = {n.name: n.op for n in captured.graphs[0].graph.nodes}
    for op in ("linear", "gelu", "layer_norm", "batch_norm", "add", "dropout"):
        times = [n for n in found.nodes if by_op[n.node] == op]
        assert times
        assert all(n.backward_us > 0 and n.backward_kernels > 0 for n in times), op


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_model_is_left_as_it_was(mode: str) -> None:
    work = workload(mode)
    weight = work.model.up.weight  # type: ignore[union-attr]
    weight.grad = torch.full_like(weight, 3.0)  # type: ignore[union-attr]
    before = {k: v.clone() for k, v in work.model.state_dict().items()}
    inputs = work.args[0].clone()
    captured = capture(work)
    random_state = torch.get_rng_state()
    profile(work, captured, runs=2)
    assert all(torch.equal(v, before[k]) for k, v in work.model.state_dict().items())
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))  # type: ignore[arg-type, union-attr]
    assert work.model.norm.weight.grad is None  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(work.args[0], inputs)


def test_graph_breaks_leave_time_outside() -> None:
    work = workload(kind=Broken)
    captured = capture(work)
    assert len(captured.graphs) > 1
    found = profile(work, captured, runs=3)
    check_sums(found)
    assert {n.graph for n in found.nodes} == {g.index for g in captured.graphs}


def test_without_graphs_everything_is_unlinked() -> None:
    from fusescout.capture import Capture

    found = profile(workload(), Capture(()), runs=2)
    check_sums(found)
    assert found.coverage == 0
    assert found.nodes == ()
    assert "aten::linear" in {k.name for k in found.kernels}


def test_a_graph_that_ran_twice_counts_twice() -> None:
    class Twice(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = self.piece(x)
                torch._dynamo.graph_break()
            return x

        def piece(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.down(self.up(x)))

    work = workload(kind=Twice)
    captured = capture(work)
    found = profile(work, captured, runs=2)
    check_sums(found)
    calls = {g.index: g.calls for g in captured.graphs}
    for node in found.nodes:
        assert node.kernels == calls[node.graph] or node.kernels == 0


def test_an_active_profiler_is_refused_and_survives() -> None:
    work = workload()
    captured = capture(work)
    with torch.profiler.profile() as outer:
        with pytest.raises(ProfilerBusy) as raised:
            profile(work, captured)
        torch.ones(3) + 1
    assert raised.value.exit_code == 3
    assert any(e.key == "aten::add" for e in outer.key_averages())


def test_odd_names_do_not_break_the_trace() -> None:
    class Odd(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("層\t1\\"):
                return super().forward(x)

    work = workload(kind=Odd)
    check_sums(profile(work, capture(work), runs=2))


def test_probe_is_cached_and_plausible() -> None:
    device = measure_device("cpu", ("float32",))
    assert device is measure_device("cpu", ("float32",))
    assert 1e8 < device.copy_bytes_per_s < 1e13
    assert 1e8 < device.flops_per_s["float32"] < 1e14
    assert 0.05 < device.launch_us < 1e4
    threads = torch.get_num_threads()
    assert device.cores == threads
    torch.set_num_threads(threads + 1)
    try:
        assert measure_device("cpu", ("float32",)).cores == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert device.name


def test_probe_leaves_the_random_state() -> None:
    state = torch.get_rng_state()
    measure_device("cpu", ("float16",))
    assert torch.equal(torch.get_rng_state(), state)


def test_operators_that_torch_calls_pointwise_are_pointwise() -> None:
    missed = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            if torch.Tag.pointwise in target.tags and "out" not in overload and op_class(str(target)) != "pointwise":
                missed.add(str(target))
    assert missed == {"aten.clone.default", "aten.equal.default"}


ATTENTION = torch.rand(2, 3, 8, 16)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "linear": (F.linear, (torch.rand(4, 6, 8), torch.rand(5, 8))),
    "mm": (torch.mm, (torch.rand(4, 6), torch.rand(6, 5))),
    "bmm": (torch.bmm, (torch.rand(3, 4, 6), torch.rand(3, 6, 5))),
    "matmul": (torch.matmul, (torch.rand(3, 4, 6), torch.rand(6, 5))),
    "conv2d": (F.conv2d, (torch.rand(2, 8, 9, 9), torch.rand(6, 4, 3, 3), None, 2, 1, 1, 2)),
    "conv1d": (F.conv1d, (torch.rand(2, 8, 9), torch.rand(6, 8, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (torch.rand(2, 8, 9, 9), torch.rand(8, 6, 3, 3))),
    "attention": (F.scaled_dot_product_attention, (ATTENTION, ATTENTION, ATTENTION)),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_agree_with_torch(name: str) -> None:
    function, args = CASES[name]

    class Model(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors, *args[len(tensors) :])

    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        function(*args)
    (captured,) = capture(Workload(model=Model().eval(), args=tensors)).graphs
    graph = captured.graph
    ours = sum(cost(n, [graph.by_name[i].out for i in n.inputs]).flops for n in graph.nodes if n.is_op)
    assert ours == counter.get_total_flops()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_viewable_as_torch_says(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.zeros(shape).permute(data.draw(st.permutations(range(len(shape)))))
    if data.draw(st.booleans()) and x.shape[0] > 1:
        x = x[1:]
    flat = data.draw(st.sampled_from([[x.numel()], [*x.shape[:-2], -1], [-1, *x.shape[2:]], [*x.shape, 1], [1, -1]]))
    try:
        target = list(x.reshape(flat).shape)
    except RuntimeError:
        return
    try:
        x.view(target)
        viewable = True
    except RuntimeError:
        viewable = False
    assert is_viewable(TensorSpec(tuple(x.shape), "float32", tuple(x.stride())), target) == viewable


def cuda_trace(kernels: list[tuple[str, float, str]], calls: int = 3) -> bytes:
    """A trace of equal calls; per kernel its name, µs, and the node whose marker it was launched in ("" for none)."""
    events: list[dict[str, Any]] = []

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for call in range(calls):
        start = 10_000.0 * call
        event("user_annotation", f"fs-call:{call}", start, 9_000.0)
        for k, (name, us, node) in enumerate(kernels):
            ts, correlation = start + 100 * k + 10, 1 + call * len(kernels) + k
            if node:
                event("cpu_op", f"fs:0:{node}", ts, 50.0)
            event("cuda_runtime", "cudaLaunchKernel", ts + 10, 3.0, correlation=correlation)
            event("kernel", name, ts + 20, us + call, tid=7, device=0, stream=7, correlation=correlation)
    return json.dumps({"traceEvents": events}).encode()


class FakeReplay:
    def __init__(self, graphs: tuple[Any, ...]) -> None:
        self.graphs = list(graphs)

    def prepare(self) -> Callable[[], None]:
        return lambda: None

    def event_times(self, runs: int) -> dict[tuple[int, str], float]:
        return {(0, "linear"): 12.0}


def cuda_run(monkeypatch: pytest.MonkeyPatch, traces: list[bytes]) -> Any:
    """What the CUDA side of a profile makes of these traces, in the order in which it records them."""
    from fusescout.profiling import run

    work = workload()
    monkeypatch.setattr(run, "record", lambda *args: read(traces.pop(0)))
    return run._on_cuda(work, FakeReplay(capture(work).graphs), 3, None)  # type: ignore[arg-type]


def test_cuda_kernels_get_owners_from_one_trace_and_times_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    light = cuda_trace([("gemm", 20.0, ""), ("gelu", 5.0, ""), ("loss", 2.0, "")])
    marked = cuda_trace([("gemm", 30.0, "linear"), ("gelu", 9.0, "gelu")])
    items, calls, source, notes = cuda_run(monkeypatch, [light, marked])
    assert [(i.us, i.owner) for i in items] == [(21.0, (0, "linear")), (6.0, (0, "gelu")), (3.0, None)]
    assert (source, notes, len(calls)) == ("kernels", [], 3)


def test_cuda_runs_that_differ_use_the_marked_times_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    light = cuda_trace([("void at::native::x", 20.0, "")])
    marked = cuda_trace([("gemm", 30.0, "linear")])
    items, _, source, notes = cuda_run(monkeypatch, [light, marked])
    assert [(i.us, i.owner) for i in items] == [(31.0, (0, "linear"))]
    assert source == "kernels"
    assert "times are those of the captured graphs" in notes[0]


def test_cuda_without_records_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    light, marked = cuda_trace([("gemm", 20.0, "")]), cuda_trace([("gemm", 30.0, "linear")])
    items, _, source, notes = cuda_run(monkeypatch, [cuda_trace([]), light, marked])
    assert [i.us for i in items] == [21.0]
    assert (source, notes) == ("kernels", [])


def test_cuda_without_records_twice_falls_back_to_events(monkeypatch: pytest.MonkeyPatch) -> None:
    items, calls, source, notes = cuda_run(monkeypatch, [cuda_trace([]), cuda_trace([])])
    assert [(i.name, i.us, i.owner) for i in items] == [("linear", 12.0, (0, "linear"))]
    assert (source, calls) == ("events", [])
    assert "twice" in notes[0]
