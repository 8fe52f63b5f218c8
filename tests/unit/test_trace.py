"""Reading traces as torch.profiler (Kineto) writes them on CUDA, and the untidy ones it and others write too."""

import gzip
import json
import math
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusescout.errors import TraceUnreadable
from fusescout.profiling.link import enclosing
from fusescout.profiling.link import link_gpu
from fusescout.profiling.sequence import gpu_calls
from fusescout.profiling.sequence import kernel_times
from fusescout.profiling.sequence import node_times
from fusescout.profiling.sequence import on_grid
from fusescout.profiling.sequence import typical
from fusescout.profiling.sequence import union_us
from fusescout.profiling.trace import read

HOST, BACKWARD_THREAD = 4242, 4301
SYNC = "cudaDeviceSynchronize"


class Writer:
    """Writes events with the keys and categories of a CUDA trace."""

    def __init__(self, start: float = 5167077842998.122) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": start, "pid": HOST, "tid": 0, "args": {"name": "python"}}
        ]
        self.start = start
        self.correlation = 100

    def host(self, category: str, name: str, ts: float, dur: float, tid: int = HOST, **args: Any) -> None:
        ts = round(self.start + ts, 3)
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def op(
        self, name: str, ts: float, dur: float, tid: int = HOST, seq: int | None = None, fwd: int = 0, external: int = 0
    ) -> None:
        args: dict[str, Any] = {"External id": external, "Record function id": 0, "Ev Idx": 1}
        if seq is not None:
            args |= {"Sequence number": seq, "Fwd thread id": fwd}
        self.host("cpu_op", name, ts, dur, tid, **args)

    def launch(
        self,
        ts: float,
        tid: int = HOST,
        name: str = "cudaLaunchKernel",
        category: str = "cuda_runtime",
        dur: float = 2.0,
    ) -> int:
        self.correlation += 1
        self.host(category, name, ts, dur, tid, cbid=211, correlation=self.correlation, **{"External id": 0})
        return self.correlation

    def kernel(
        self,
        name: str,
        ts: float,
        dur: float,
        correlation: int,
        stream: int = 7,
        category: str = "kernel",
        external: int = 0,
    ) -> None:
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "External id": external}
        ts = round(self.start + ts, 3)
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}
        )

    def arrow(self, number: int, ts: float, tid: int, phase: str) -> None:
        ts = round(self.start + ts, 3)
        self.events.append(
            {"ph": phase, "id": number, "pid": HOST, "tid": tid, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"}
        )

    def bytes(self, **keys: Any) -> bytes:
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "displayTimeUnit": "ms"}
        return json.dumps({**head, **keys, "traceEvents": self.events, "traceName": "x"}, indent=2).encode()


def training_step() -> Writer:
    """One call: linear → relu with its backward on the autograd thread, a loss outside of the markers, a memset."""
    w = Writer()
    w.host("user_annotation", "fs-call:0", 0.0, 400.0)
    w.op("fs:0:linear", 10.0, 40.0)
    w.op("aten::linear", 11.0, 38.0, seq=7, external=1)
    w.op("aten::t", 12.0, 3.0, seq=7)
    w.op("aten::addmm", 16.0, 30.0, seq=8, external=2)
    a = w.launch(20.0, name="cudaLaunchKernelExC")
    b = w.launch(26.0, name="cuLaunchKernelEx", category="cuda_driver")
    w.op("fs:0:relu", 60.0, 20.0)
    w.op("aten::relu", 61.0, 18.0, seq=9)
    c = w.launch(65.0)
    w.op("aten::sum", 90.0, 20.0, seq=10)
    d = w.launch(95.0)
    w.kernel("memset", 24.0, 1.25, a, category="gpu_memset")
    w.kernel("sm90_gemm<a, b>", 30.0, 50.125, b)
    w.kernel("relu_kernel", 80.125, 10.0, c)
    w.kernel("reduce_kernel", 100.0, 5.0, d)
    evaluate = "autograd::engine::evaluate_function: "
    for ts, name, seq in ((150.0, "SumBackward0", 10), (200.0, "ReluBackward0", 9), (250.0, "AddmmBackward0", 8)):
        w.op(f"{evaluate}{name}", ts, 40.0, BACKWARD_THREAD, seq=seq, fwd=1)
        w.op(name, ts + 1, 20.0, BACKWARD_THREAD, seq=seq, fwd=1)
        w.op("aten::kernel_op", ts + 2, 15.0, BACKWARD_THREAD)
        w.kernel(f"{name}_kernel", ts + 10, 20.0, w.launch(ts + 5, BACKWARD_THREAD))
        # Adding up gradients happens after the node itself, still in its evaluate_function.
        w.op("aten::add_", ts + 25, 10.0, BACKWARD_THREAD)
        w.kernel("accumulate", ts + 32, 2.0, w.launch(ts + 28, BACKWARD_THREAD))
    w.op(f"{evaluate}torch::autograd::AccumulateGrad", 300.0, 20.0, BACKWARD_THREAD)
    w.kernel("accumulate_grad", 310.0, 3.5, w.launch(305.0, BACKWARD_THREAD))
    w.host("cuda_runtime", SYNC, 330.0, 60.0, cbid=165, correlation=9999)
    return w


def test_training_step_is_attributed_to_its_nodes() -> None:
    (call,) = gpu_calls(read(training_step().bytes()))
    items, warning = typical([call])
    nodes = {n.node: n for n in node_times(items)}
    assert not warning
    assert nodes["linear"].time_us == on_grid(1.25) + on_grid(50.125)
    assert nodes["linear"].kernels == 2
    assert nodes["linear"].backward_us == 22.0
    assert nodes["relu"].time_us == 10.0
    assert (nodes["relu"].backward_us, nodes["relu"].backward_kernels) == (22.0, 2)
    unlinked = {i.name for i in items if i.owner is None}
    assert unlinked == {"reduce_kernel", "SumBackward0_kernel", "accumulate", "accumulate_grad"}
    assert call.launches == 10  # the memset is no kernel
    attributed = sum(n.time_us + n.backward_us for n in nodes.values())
    assert attributed + sum(i.us for i in items if i.owner is None) == sum(k.time_us for k in kernel_times(items))


def test_leaf_operator_owns_the_kernel_and_parents_do_not() -> None:
    trace = read(training_step().bytes())
    links = link_gpu(trace)
    op = trace.ops["name"].tolist()
    assert [op[i] for i in links["op"][:4]] == ["aten::addmm", "aten::addmm", "aten::relu", "aten::sum"]


def test_idle_time_is_split_by_who_waits() -> None:
    w = Writer()
    w.host("user_annotation", "fs-call:0", 0.0, 100.0)
    a, b, c = w.launch(10.0), w.launch(14.0), w.launch(50.0)
    w.kernel("k", 15.0, 10.0, a)  # 12 µs until launched, 3 µs until it starts
    w.kernel("k", 27.0, 3.0, b)  # launched long ago: 2 µs are the GPU's own
    w.kernel("k", 55.0, 5.0, c)  # 22 µs for the host, 3 µs for the GPU
    (call,) = gpu_calls(read(w.bytes()))
    assert call.busy_us == pytest.approx(18.0, abs=0.01)
    assert (call.idle_host_us, call.idle_kernel_us, call.idle_other_us) == pytest.approx((34.0, 8.0, 40.0), abs=0.01)
    assert call.busy_us + call.idle_host_us + call.idle_kernel_us + call.idle_other_us == pytest.approx(100.0)


def test_backward_of_two_forward_threads_follows_the_arrows() -> None:
    w = Writer()
    other = HOST + 1
    w.host("user_annotation", "fs-call:0", 0.0, 200.0)
    for tid, node in ((HOST, "a"), (other, "b")):
        w.op(f"fs:0:{node}", 10.0, 20.0, tid)
        w.op("aten::mul", 11.0, 10.0, tid, seq=3)
    for number, (tid, ts, fwd) in enumerate(((HOST, 50.0, 1), (other, 80.0, 2))):
        w.op("MulBackward0", ts, 20.0, BACKWARD_THREAD, seq=3, fwd=fwd)
        w.arrow(number, 11.0, tid, "s")
        w.arrow(number, ts, BACKWARD_THREAD, "f")
        w.kernel("mul", ts + 5, 4.0 + number, w.launch(ts + 2, BACKWARD_THREAD))
    (call,) = gpu_calls(read(w.bytes()))
    assert {n.node: n.backward_us for n in node_times(call.items)} == {"a": 4.0, "b": 5.0}


def test_one_graph_launch_owns_many_kernels() -> None:
    w = Writer()
    w.host("user_annotation", "fs-call:0", 0.0, 500.0)
    w.op("fs:0:graph", 5.0, 20.0)
    launch = w.launch(10.0, name="cudaGraphLaunch")
    for k in range(50):
        w.kernel(f"k{k}", 20.0 + 4 * k, 3.0, launch)
    (call,) = gpu_calls(read(w.bytes()))
    assert (len(call.items), call.launches, call.items[0].owner) == (50, 1, (0, "graph"))
    assert [i.name for i in call.items] == [f"k{k}" for k in range(50)]


def test_short_kernels_are_not_rounded() -> None:
    w = Writer()
    durations = [1.0 + 0.067 * k for k in range(60)]
    for k, us in enumerate(durations):
        w.kernel("k", 10.0 * k, us, w.launch(10.0 * k - 5))
    trace = read(w.bytes())
    assert trace.gpu["dur"].sum() == pytest.approx(math.fsum(durations), rel=1e-9)
    assert not trace.warnings


def test_bogus_duration_is_cut_at_the_next_start_and_said() -> None:
    w = Writer()
    w.kernel("a", 0.0, 1e9, w.launch(-5.0))
    w.kernel("b", 10.0, 5.0, w.launch(-4.0))
    w.kernel("elsewhere", 3.0, 30.0, w.launch(-3.0), stream=9)
    trace = read(w.bytes())
    assert trace.gpu["dur"].tolist() == pytest.approx([10.0, 30.0, 5.0], abs=0.01)
    assert "1 GPU events ran into the next one" in trace.warnings[0]
    assert union_us(trace.gpu["ts"], trace.gpu["dur"]) == pytest.approx(33.0, abs=0.01)


def test_equal_timestamps_keep_parents_outside() -> None:
    w = Writer()
    w.op("inner", 10.0, 5.0)
    w.op("outer", 10.0, 50.0)
    w.op("empty", 10.0, 0.0)
    w.kernel("k", 20.0, 1.0, w.launch(10.0))
    w.kernel("k", 20.0, 1.0, w.launch(12.0))
    w.kernel("k", 25.0, 1.0, w.launch(30.0))
    trace = read(w.bytes())
    op = trace.ops["name"].tolist()
    assert op == ["outer", "inner", "empty"]
    assert [op[i] for i in link_gpu(trace)["op"]] == ["empty", "inner", "outer"]
    assert not trace.warnings


def test_crossing_annotations() -> None:
    w = Writer()
    w.host("user_annotation", "fs:0:a", 0.0, 20.0)
    w.host("user_annotation", "fs:0:b", 10.0, 20.0)
    for ts in (5.0, 15.0, 25.0, 40.0):
        w.kernel("k", ts + 1, 1.0, w.launch(ts))
    trace = read(w.bytes())
    names = [*trace.markers["name"], None]
    assert [names[i] for i in link_gpu(trace)["marker"]] == ["fs:0:a", "fs:0:b", "fs:0:b", None]


def test_lost_launch_record_falls_back_to_the_external_id() -> None:
    w = Writer()
    w.op("fs:0:mul", 0.0, 20.0)
    w.op("aten::mul", 1.0, 10.0, external=77)
    w.kernel("k", 5.0, 1.0, correlation=123456, external=77)
    w.kernel("orphan", 7.0, 1.0, correlation=123457)
    links = link_gpu(read(w.bytes()))
    assert links["launch"].tolist() == [-1, -1]
    assert links["marker"].tolist() == [0, -1]


def test_untidy_events_are_left_out_and_counted() -> None:
    w = Writer()
    w.events += [
        {"ph": "X", "name": "no category", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "no time", "pid": 0, "tid": 7, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "negative", "pid": 0, "tid": 7, "ts": 1.0, "dur": -4.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "bare", "pid": "GPU 0", "tid": "stream 7", "ts": "2.5", "dur": "1.5"},
        {"ph": "X", "cat": "overhead", "name": "Command Buffer Full", "pid": 0, "tid": 7, "ts": 1.0, "dur": 9.0},
        {"ph": "X", "cat": "kernel", "name": None, "pid": 0, "tid": 7, "ts": 9.0, "dur": 1.0, "args": None},
        ["not an event"],
        {"ph": "C", "name": "GPU Utilization", "ts": 1.0},
    ]  # fmt: skip
    trace = read(w.bytes())
    assert trace.gpu["name"].tolist() == ["bare", "None"]
    assert any("1 events without a category" in text for text in trace.warnings)
    assert any("3 events with no usable time" in text for text in trace.warnings)


@pytest.mark.parametrize("data", [b'{"traceEvents": []}', b"[]", Writer().bytes()])
def test_traces_without_kernels_are_fine(data: bytes) -> None:
    trace = read(data)
    assert len(trace.gpu) == len(link_gpu(trace)) == 0
    assert gpu_calls(trace) == []
    assert not trace.warnings


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not valid JSON"),
        (b'{"traceEvents": [{"name": "a"b"}]}', "not valid JSON"),
        (b'{"events": []}', 'no "traceEvents"'),
        (b"\x1f\x8bnot gzip", ""),
        (gzip.compress(b"[]" * 100, mtime=0)[:-9], ""),
    ],
)
def test_unreadable_traces_say_why(data: bytes, why: str) -> None:
    with pytest.raises(TraceUnreadable) as raised:
        read(data)
    assert why in str(raised.value)
    assert raised.value.fix


def test_missing_file(tmp_path: Any) -> None:
    with pytest.raises(TraceUnreadable, match="No such file"):
        read(tmp_path / "none.json")


def test_reads_plain_and_gzip_files_alike(tmp_path: Any) -> None:
    data = training_step().bytes()
    (tmp_path / "a.json").write_bytes(data)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(data))
    a, b = read(tmp_path / "a.json"), read(str(tmp_path / "b.json.gz"))
    assert a.gpu.equals(b.gpu)
    assert a.ops.equals(b.ops)


@pytest.mark.parametrize("indent", [None, 2])
def test_reading_in_pieces_changes_nothing(indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    w = training_step()
    nested = {"kernels": [{"a": [{"b": 1}, {"c": 2}]}, {"d": 3}, {"e": 4}]}
    data = json.dumps({"traceEvents": w.events, "after": nested, "list": [{"x": 1}, {"y": 2}]}, indent=indent).encode()
    whole = read(data)
    monkeypatch.setattr("fusescout.profiling.trace._CHUNK", 64)
    pieces = read(data)
    assert pieces.ops.equals(whole.ops)
    assert pieces.gpu.equals(whole.gpu)


def test_half_a_million_events_in_time_and_memory(tmp_path: Any) -> None:
    """5 events per operator, laid out as Kineto lays them out; read and linked in less than 10 s and 1 GB."""
    file = tmp_path / "big.json"
    with file.open("w") as out:
        out.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n  {\n    "ph": "M", "name": "x"\n  }')
        for k in range(100_000):
            ts = 5167077842998.122 + 20 * k
            common = f'"Sequence number": {k}, "Fwd thread id": 0, "Record function id": 0, "Ev Idx": {k}'
            for cat, name, pid, tid, at, dur, args in (
                ("cpu_op", "aten::linear", 1, 1, ts, 15, f'"External id": {k}, {common}'),
                ("cpu_op", "aten::addmm", 1, 1, ts + 1, 12, f'"External id": {k}, {common}'),
                ("cuda_runtime", "cudaLaunchKernel", 1, 1, ts + 4, 3, f'"cbid": 211, "correlation": {k + 1}'),
                (
                    "kernel",
                    f"void gemm<{k % 300}>",
                    0,
                    7,
                    ts + 30,
                    9.5,
                    f'"stream": 7, "device": 0, "correlation": {k + 1}',
                ),
            ):
                out.write(
                    f',\n  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
                    f'    "ts": {at:.3f}, "dur": {dur},\n    "args": {{\n      {args}\n    }}\n  }}'
                )
            out.write(f',\n  {{\n    "ph": "s", "id": {k}, "pid": 1, "tid": 1, "ts": {ts:.3f}, "cat": "ac2g"\n  }}')
        out.write('\n  ],\n  "traceName": "x"\n}\n')
    before = _resident_mb()
    start = time.process_time()
    trace = read(file)
    links = link_gpu(trace)
    seconds = time.process_time() - start
    assert (len(trace.gpu), len(trace.ops), int((links["op"] >= 0).sum())) == (100_000, 200_000, 100_000)
    assert seconds < 10
    assert _resident_mb() - before < 700


def _resident_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform == "linux" else 1 << 20)


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 1)), max_size=30)


@given(outer=intervals, inner=intervals)
def test_enclosing_is_the_latest_open_interval(
    outer: list[tuple[int, int, int]], inner: list[tuple[int, int, int]]
) -> None:
    import pandas as pd

    def frame(rows: list[tuple[int, int, int]]) -> Any:
        rows = sorted(rows, key=lambda r: (r[0], -r[1]))
        return pd.DataFrame(rows, columns=["ts", "dur", "track"]).astype({"ts": float, "dur": float, "track": int})

    a, b = frame(outer), frame(inner)
    for row, answer in enumerate(enclosing(a, b).tolist()):
        ts, track = b["ts"][row], b["track"][row]
        # Ending exactly here still counts as open, unless something that started later is open too.
        open_now = [k for k in range(len(a)) if a["track"][k] == track and a["ts"][k] <= ts <= a["ts"][k] + a["dur"][k]]
        strictly = [k for k in open_now if ts < a["ts"][k] + a["dur"][k]]
        if answer < 0:
            assert not strictly
        else:
            assert answer in open_now
            assert not strictly or answer >= strictly[-1]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), max_size=40))
def test_union_is_at_most_the_sum_and_at_least_the_longest(rows: list[tuple[float, float]]) -> None:
    import pandas as pd

    ts, dur = pd.Series([r[0] for r in rows], dtype=float), pd.Series([r[1] for r in rows], dtype=float)
    union = union_us(ts, dur)
    assert max(dur, default=0.0) - 1e-6 <= union <= sum(dur) + 1e-6
