"""A whole race on the CPU in child processes, and what happens when a contender crashes, hangs, lies or babbles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fusescout import inputs
from fusescout import numerics
from fusescout.config import Config
from fusescout.device import Device
from fusescout.errors import CacheUnwritable
from fusescout.errors import OutOfTime
from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.measure import impossible
from fusescout.measure import interleave
from fusescout.tune import RaceResult
from fusescout.tune import race
from fusescout.workerpool import Spare
from fusescout.workerpool import Worker
from fusescout.workerpool import compile_many

CPU = Device("cpu", "test", "x86", 2)
X = TensorSpec((256, 128), "float32", (128, 1))


def swish_chain() -> Subgraph:
    targets = [("aten.sigmoid.default", (Ref(0),)), ("aten.mul.Tensor", (Ref(0), Ref(1)))]
    return Subgraph((X,), tuple(Op(t, a, (), X) for t, a in targets), (2,))


ROGUE = """
import os, signal, sys, time
NAME, FAMILY = "rogue", "pointwise"

def supports(graph, device):
    return None

def configs(graph, device):
    return [{"do": d} for d in ("babble", "raise", "exit", "segfault", "hang")]

def kernel(graph, config, device):
    what = config["do"]
    print("stray output")
    os.write(1, b'{"ok": true, "result": "forged"}' + bytes([10]))
    if what == "exit":
        print("last words", file=sys.stderr)
        os._exit(7)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(600)
    raise ValueError("no such kernel")
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Children take over the thread count. On a busy machine a parallel loop's barrier waits for scheduler ticks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_kernels_compile_ahead_and_a_template_that_dies_costs_its_own(tmp_path: Path) -> None:
    (tmp_path / "rogue.py").write_text(ROGUE.replace('"babble", ', "").replace(', "hang"', ""))
    cache = tmp_path / "cache"
    with Worker() as worker:
        found = worker.call(
            "compile_ahead", 120, subgraphs=[swish_chain().to_json()], device=asdict(CPU), templates=[str(tmp_path)],
            cache_dir=str(cache), effort="quick", jobs=2,
        )  # fmt: skip
        assert worker.call("ready", 60)["pid"] == worker.pid
    assert 1 <= found["compiled"] == found["of"] - 3
    assert list(cache.rglob("*.so"))


@pytest.fixture(scope="module")
def spare() -> Iterator[Spare]:
    with Spare() as kept:
        yield kept


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    path = tmp_path / "inputs.pt"
    inputs.save(path, [torch.randn(256, 256)[:, ::2].contiguous()])
    return path


def opening(graph: Subgraph, folder: Path, templates: tuple[Path, ...] = ()) -> dict[str, object]:
    return {
        "subgraph": graph.to_json(), "device": asdict(CPU), "inputs": None, "seed": 0, "numerics": numerics.current(),
        "templates": [str(t) for t in templates], "cache_dir": str(folder),
    }  # fmt: skip


def test_a_race_and_its_second_run_from_the_cache(captured: Path, tmp_path: Path, spare: Spare) -> None:
    config = Config(effort="quick", cache_dir=tmp_path / "cache")
    told: list[str] = []
    names = ("eager", "framework", "inductor")
    first = race(
        swish_chain(), captured, CPU, config, names=names, spare=spare, on_event=lambda *event: told.append(event[3])
    )
    by_name = {c.name: c for c in first.contenders}
    assert list(by_name) == list(names)
    assert {c.status for c in first.contenders} == {"ok"}, [c.reason for c in first.contenders]
    assert by_name["framework"].variant == {"calls": ["silu"]}
    assert by_name["inductor"].compile_s > 0.1
    assert len({len(s) for s in first.samples.values()}) == 1
    assert set(first.samples) == set(names)
    assert first.noise is not None and first.noise.low < 1.3 and first.noise.high > 0.7
    for contender in first.contenders:
        assert contender.time is not None and contender.time.low <= contender.time.mid <= contender.time.high
        assert contender.error is not None and contender.error.worst <= 1
    assert "caches warm" in first.policy
    assert told[-1] == "done"

    second = race(swish_chain(), captured, CPU, config, names=names, spare=spare)
    assert second.cached and all(c.cached for c in second.contenders)
    assert second.samples == first.samples
    assert second.scripts == first.scripts

    script = tmp_path / "repro.py"
    script.write_text(first.scripts["framework"])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "error of eager" in done.stdout and "framework" in done.stdout


def test_crashes_hangs_and_stray_output_become_reasons(tmp_path: Path, spare: Spare) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "rogue.py").write_text(ROGUE)
    graph = swish_chain()
    with spare.take() as worker:
        worker.call("open", 120, **opening(graph, tmp_path, (folder,)))
        for name, status, words in (
            ("babble", "failed", "no such kernel"),
            ("raise", "failed", "no such kernel"),
            ("exit", "crashed", "last words"),
        ):
            with pytest.raises((WorkerRefused, WorkerDied)) as caught:
                worker.call("build", 60, contender="tilelang", variant={"template": "rogue", "do": name}, handle=1)
            assert caught.value.kind == status and words in str(caught.value)
        assert not worker.alive
    with Worker() as worker:
        worker.call("open", 120, **opening(graph, tmp_path, (folder,)))
        start = time.monotonic()
        with pytest.raises(WorkerTimeout):
            worker.call("build", 3, contender="tilelang", variant={"template": "rogue", "do": "hang"}, handle=1)
        assert time.monotonic() - start < 30
        assert not worker.alive
    jobs = [("tilelang", {"template": "rogue", "do": d}) for d in ("segfault", "raise")] + [("eager", {})]
    segfault, failed, fine = compile_many(opening(graph, tmp_path, (folder,)), jobs, 1, 60)
    assert segfault["kind"] == "crashed" and "signal 11" in segfault["reason"]
    assert failed["kind"] == "failed"
    assert fine["compile_s"] >= 0


class Doomed(Spare):
    """The first worker it lends is killed, as by a machine that is out of memory; the next ones are another's."""

    def __init__(self, then: Spare) -> None:
        super().__init__()
        self.then, self.given = then, 0

    def take(self) -> Worker:
        self.given += 1
        if self.given > 1:
            return self.then.take()
        worker = Worker()
        worker.kill()
        return worker

    def give(self, worker: Worker) -> None:
        self.then.give(worker)


def test_a_race_goes_on_without_the_contender_that_kills_its_worker(tmp_path: Path, spare: Spare) -> None:
    """And eager, which the race can't do without, is asked a second time where its worker is killed."""
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "rogue.py").write_text(
        ROGUE.replace('"babble", "raise", "exit", "segfault", "hang"', '"exit", "segfault"')
    )
    # No built-in template covers a sort, so the rogue one is alone.
    values = Op("aten.sort.default", (Ref(0),), (), (X, TensorSpec((256, 128), "int64", (128, 1))))
    graph = Subgraph((X,), (values, Op("getitem", (Ref(1), 0), (), X)), (2,))
    config = Config(effort="quick", cache_dir=tmp_path / "cache", templates=(folder,), deadline_s=20)
    result = race(graph, None, CPU, config, names=("eager", "tilelang"), spare=Doomed(spare))
    eager, rogue = result.contenders
    assert eager.status == "ok" and result.samples["eager"]
    assert "second worker" in eager.reason and "signal 9" in eager.reason
    assert rogue.status == "crashed" and "died at build" in rogue.reason and rogue.tried == 2
    assert "tilelang" not in result.samples


def test_a_race_that_is_not_done_in_its_time_is_stopped(tmp_path: Path, spare: Spare) -> None:
    config = Config(effort="quick", cache_dir=tmp_path / "cache", use_cache=False)
    start = time.perf_counter()
    with pytest.raises(OutOfTime):
        race(swish_chain(), None, CPU, config, names=("eager",), spare=spare, limit_s=0.5)
    assert time.perf_counter() - start < 20


def test_a_killed_or_stopped_worker_is_noticed(tmp_path: Path) -> None:
    with Worker() as worker:
        worker.call("open", 120, **opening(swish_chain(), tmp_path))
        threading.Timer(0.3, os.kill, (worker.pid, signal.SIGSTOP)).start()
        time.sleep(0.6)
        with pytest.raises(WorkerTimeout):
            worker.call("variants", 1, contender="eager", effort="quick")
        with pytest.raises(ProcessLookupError):
            os.killpg(worker.pid, 0)
        with pytest.raises((WorkerDied, ValueError)):
            worker.call("variants", 1, contender="eager", effort="quick")


def test_random_operators_are_not_raced(tmp_path: Path) -> None:
    graph = Subgraph((X,), (Op("aten.dropout.default", (Ref(0), 0.5, True), (), X),), (1,))
    result = race(graph, None, CPU, Config(cache_dir=tmp_path))
    assert {c.status for c in result.contenders} == {"unsupported"}
    assert "random" in result.contenders[0].reason


def test_an_unwritable_cache_is_found_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheUnwritable):
        race(swish_chain(), None, CPU, Config(cache_dir=tmp_path / "file"))


def test_interleaving_drops_who_is_far_too_slow_and_pairs_the_rounds() -> None:
    def slow(_: object) -> None:
        time.sleep(0.02)

    timings = interleave([lambda _: time.sleep(0.001), lambda _: time.sleep(0.002), slow], [], "cpu", rounds=6)
    assert [len(s) for s in timings.samples] == [6, 6, 0]
    assert "times as long as eager" in timings.dropped[2]
    assert 1000 < sorted(timings.samples[0])[3] < sorted(timings.samples[1])[3]


def test_a_time_below_the_physical_bound_is_refused() -> None:
    device = Device("cpu", "test", "x86", 2, copy_bytes_per_s=1e9, cache_bytes=1000)
    assert "refused" in (impossible(100.0, swish_chain(), device) or "")
    assert impossible(400.0, swish_chain(), device) is None
    in_cache = Device("cpu", "test", "x86", 2, copy_bytes_per_s=1e9, cache_bytes=1 << 20)
    assert impossible(100.0, swish_chain(), in_cache) is None


def test_a_result_survives_its_json_form() -> None:
    assert RaceResult.from_json(RaceResult(()).to_json()).cached
