"""Both benches through the command line, for real, on the smallest work there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusescout import cli
from fusescout.bench import cases
from fusescout.bench import chains
from fusescout.bench import kernels
from fusescout.bench import models
from fusescout.bench import suite
from fusescout.bench.records import KernelBench
from fusescout.bench.records import ModelBench
from fusescout.config import Config
from fusescout.contenders import liger
from fusescout.contenders.bare import upto
from fusescout.device import Device
from fusescout.reference import build
from fusescout.session import Session
from fusescout.workerpool import Spare

CPU = Device("cpu", "test", "x86", 1)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children take over the thread count. On a busy machine a parallel loop's barrier waits for scheduler ticks."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_case_has_its_chain_in_the_order_of_its_inputs() -> None:
    for case in cases.select("quick"):
        inputs = list(kernels._tensors(case, CPU, "float32", 0))
        cut = kernels._cut(case, CPU, "float32", 0)
        values = cut.values(inputs)
        expected = getattr(chains, case.chain)(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        got = build(cut.graph)(values)
        by_shape = sorted(expected, key=lambda t: float(t.double().sum()))
        for a, b in zip(sorted(got, key=lambda t: float(t.double().sum())), by_shape, strict=True):
            torch.testing.assert_close(a, b)
        for value, spec in zip(values, cut.graph.inputs, strict=True):
            assert (tuple(value.shape), value.stride()) == (spec.shape, spec.stride)
        weights = sum(t.weight for t in case.inputs)
        assert sum(s.constant for s in cut.graph.inputs) == weights, case.name


def test_every_chain_that_is_named_exists_and_every_one_is_named() -> None:
    named = {c.chain for c in cases.CASES}
    assert named == {n for n, f in vars(chains).items() if getattr(f, "__module__", "") == chains.__name__}


def test_the_yardstick_is_the_matrix_products_alone() -> None:
    (case,) = [c for c in cases.select("quick") if c.chain == "swiglu"]
    cut = kernels._cut(case, CPU, "float32", 0)
    x, gate, up = kernels._tensors(case, CPU, "float32", 0)
    products = [len(cut.graph.inputs) + k for k, op in enumerate(cut.graph.ops) if op.name == "linear"]
    alone = upto(cut.graph, products)
    assert alone.chain == ("linear", "linear")
    got = build(alone)(cut.values([x, gate, up]))
    assert torch.equal(got[0], x @ gate.t())
    assert torch.equal(got[1], x @ up.t())


def test_bench_kernels_races_its_cases_and_writes_them_down(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--device", "cpu", "--effort", "quick", "--json", str(file), "-j", "2"]
    assert cli.main([*arguments, "--only", "swiglu", "--only", "new_gelu"]) == 0
    shown = capsys.readouterr().out
    found = KernelBench.model_validate_json(file.read_text())
    assert [r.family for r in found.rows] == ["gated_mlp", "pointwise"]
    for row in found.rows:
        assert row.region == row.family
        assert row.name in shown
        eager = row.result("eager")
        assert eager is not None
        assert eager.time is not None
        assert eager.error is not None
    gelu = found.rows[1].result("tilelang")
    assert gelu is not None
    assert gelu.time is not None
    assert gelu.error is not None
    assert gelu.error.worst <= 1
    assert 1 <= found.rows[1].guess <= found.rows[1].guesses
    assert found.rows[1].ratios["eager"].mid > 1, "GELU spelled in eight operators is not slower than all of them"
    bare = found.rows[0].result("bare")
    assert bare is not None
    assert bare.status == "yardstick"
    assert "bare" in found.rows[0].ratios or found.rows[0].result("tilelang").status != "ok"  # type: ignore[union-attr]


def test_bench_models_analyses_in_another_process_and_goes_on_after_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(suite.MODELS[-1], name="broken", builder="plain:no_such_builder")
    tiny = suite.Model("tiny", "plain:mixer", {"batch": 2}, {"side": 32, "layers": 0, "width": 32})
    monkeypatch.setattr(suite, "MODELS", (broken, tiny))
    file, kept = tmp_path / "models.json", tmp_path / "runs"
    arguments = ["bench", "models", "broken", "tiny", "--device", "cpu", "--effort", "quick", "--with", "eager"]
    few = ["--top", "1", "--rounds", "2", "--runs", "1", "--json", str(file), "-o", str(kept)]
    assert cli.main([*arguments, *few]) == 0
    shown = capsys.readouterr().out
    crashed, row = ModelBench.model_validate_json(file.read_text()).rows
    assert "no_such_builder" in crashed.reason
    assert crashed.reason in shown
    assert row.reason == ""
    session = Session.load(kept / "tiny-float32")
    assert row.verdict == session.verdict
    assert row.raced == len(session.candidates) == 1
    assert {"eager", "compile"} <= {w.name for w in row.ways if w.time}
    assert row.compile_s > 0
    assert row.analysis_s == pytest.approx(sum(session.stages_s.values()))
    assert "| tiny float32 " in shown


def test_what_runs_when_the_limit_is_reached_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases._rows("softmax", 4, 8)
    config, dtype = Config(cache_dir=tmp_path, effort="quick"), "float32"
    with Spare() as spare:
        cut = kernels._cut(case, CPU, dtype, 0)
        row = kernels._row(case, cut, CPU, dtype, config, tmp_path, spare, lambda *_: None, limit_s=0.1)
    assert row.reason.startswith("Stopped after")
    allowed: list[float] = []
    monkeypatch.setattr(models, "_child", lambda _request, _environment, each_s: allowed.append(each_s) or "late")
    found = models.run(suite.MODELS[:1], [dtype], config, "cpu", small=True, each_s=900, limit_s=50)
    assert found.rows[0].reason == "late"
    assert 40 < allowed[0] <= 50


PEERS = {
    "layer_norm": ("layer_norm", cases._norm("layer_norm", 4, 8)),
    "rms_norm": ("rms_norm", cases._norm("rms_norm", 4, 8)),
    "llama_rms_norm": ("llama_rms_norm", cases._norm("llama_rms_norm", 4, 8)),
    "gemma_rms_norm": ("gemma_rms_norm", cases._norm("gemma_rms_norm", 4, 8)),
    "add_rms_norm": ("add_rms_norm", cases._norm("add_rms_norm", 4, 8)),
    "add_layer_norm": (None, cases._norm("add_layer_norm", 4, 8)),
    "softmax": ("softmax", cases._rows("softmax", 4, 8)),
    "silu_mul": ("silu_mul", cases._points("silu_mul", 4, 8, extra=(cases._x(4, 8),))),
    "cross_entropy": ("cross_entropy", cases._cross_entropy(4, 8)),
    "linear_cross_entropy": ("linear_cross_entropy", cases._linear_cross_entropy(4, 40, 8)),
    "group_norm": ("group_norm_silu", cases._group_norm("group_norm_silu", 2, 64, 4)),
    "swiglu": (None, cases._gated(4, 8, 8)),
}


@pytest.mark.parametrize("name", PEERS)
def test_liger_is_asked_for_the_chains_it_has_an_operator_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, case = PEERS[name]
    graph = kernels._cut(case, CPU, "bfloat16", 0).graph
    assert liger._operator(graph) == expected
    made = liger.Liger()
    monkeypatch.setattr(liger, "find_spec", lambda package: None)
    assert isinstance(made.variants(graph, CPU, "quick"), str)
    monkeypatch.setattr(liger, "find_spec", lambda package: object())
    on_gpu = made.variants(graph, Device("cuda", "test", "sm_90a", 1), "quick")
    assert on_gpu == [{"operator": expected}] if expected else isinstance(on_gpu, str)
    assert isinstance(made.variants(graph, CPU, "quick"), str), "its kernels need a GPU"
