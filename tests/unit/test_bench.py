"""The benches' data and tables, without torch: which cases there are, what a table says, what is read back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_session import accepted
from sample_session import all_kept

from fusescout import cli
from fusescout.bench import cases
from fusescout.bench import models
from fusescout.bench import suite
from fusescout.bench import tables
from fusescout.bench.models import row_of
from fusescout.bench.records import KernelBench
from fusescout.bench.records import KernelRow
from fusescout.bench.records import ModelBench
from fusescout.bench.records import ModelRow
from fusescout.bench.records import geometric_mean
from fusescout.session import ContenderResult
from fusescout.session import ErrorStats
from fusescout.session import Interval
from fusescout.session import Rival
from fusescout.session import Session

PROMISED = {
    "gemm_epilogue": [
        "8192×3072×768", "4096×4096×4096", "8192×768×3072", "3152×3072×768", "512×4096×4096", "16×4096×4096",
    ],
    "gated_mlp": ["8192×3072×1024", "4096×11008×4096", "4096×14336×4096", "2048×8192×2048"],
}  # fmt: skip


def around(mid: float) -> Interval:
    return Interval(mid=mid, low=mid * 0.98, high=mid * 1.02, samples=15)


def result(name: str, mid: float | None, **facts: object) -> ContenderResult:
    shown = {"status": "ok", "time": around(mid), "bound_share": 0.5} if mid else {"status": "failed"}
    return ContenderResult(**{"name": name, **shown, **facts})


def row(**facts: object) -> KernelRow:
    stats = ErrorStats(worst=0.4, contender_max=1e-3, eager_max=2e-3, cases=10)
    schedule = {"template": "gemm", "schedule": "pingpong", "BM": 128, "BN": 128, "BK": 64, "stages": 4, "ctas": 1}
    found = [
        result("eager", 90.0),
        result("inductor", 80.0, compile_s=3.2),
        result("tilelang", 64.0, variant=schedule, compile_s=7.5, error=stats),
        result("bare", 60.0, status="yardstick"),
    ]
    plain = {
        "family": "gemm_epilogue",
        "name": "1×2×3 silu",
        "region": "gemm_epilogue",
        "contenders": found,
        "ratios": {"eager": around(90 / 64), "inductor": around(80 / 64), "bare": around(60 / 64)},
        "guess": 2,
        "guesses": 4,
    }
    return KernelRow(**{**plain, **facts})


def bench(*rows: KernelRow) -> KernelBench:
    return KernelBench(environment=accepted().environment, rows=list(rows), settings={"dtype": "bfloat16"})


@pytest.mark.parametrize("shapes", cases.SHAPES)
def test_every_set_of_cases_has_every_family_and_no_name_twice(shapes: str) -> None:
    chosen = cases.select(shapes)
    assert {c.family for c in chosen} == set(cases.families())
    assert len({c.name for c in chosen}) == len(chosen)
    assert all(t.shape and all(n > 0 for n in t.shape) for c in chosen for t in c.inputs)
    assert all(sorted(t.order) == list(range(len(t.shape))) for c in chosen for t in c.inputs if t.order)


@pytest.mark.parametrize("family", PROMISED)
def test_the_shapes_that_were_promised_are_measured(family: str) -> None:
    assert set(PROMISED[family]) <= {c.title for c in cases.select("full", [family])}


def test_all_holds_every_epilogue_of_every_gemm_shape_and_all_of_full() -> None:
    every = {(c.title, c.chain) for c in cases.select("all", ["gemm_epilogue"])}
    assert {(shape, chain) for shape in PROMISED["gemm_epilogue"] for chain in cases.EPILOGUES} <= every
    assert {c.name for c in cases.select("full")} <= {c.name for c in cases.select("all")}


def test_a_table_shows_who_leads_and_what_was_chosen() -> None:
    text = tables.kernels(bench(row()))
    line = next(part for part in text.splitlines() if "silu" in part)
    assert "**64.0**" in line
    assert "1.25 [1.23–1.27] Inductor" in line
    assert "pingpong 128x128x64 st4 (guess 2 of 4)" in line
    assert "7.5 / 3.2" in line
    assert "bare products" in text
    assert "TileLang over bare products 1.07 (1)" in text
    assert "best other over TileLang 1.25 (1)" in text


def test_a_loser_is_not_shown_in_bold_and_gives_the_reason() -> None:
    beaten = row(ratios={"eager": around(0.8), "inductor": around(0.7)})
    assert "**80.0**" in tables.kernels(bench(beaten))
    refused = row(contenders=[result("eager", 9.0), result("tilelang", None, status="wrong", reason="off by\n1")])
    text = tables.kernels(bench(refused.model_copy(update={"ratios": {}, "region": ""})))
    assert "TileLang wrong: off by 1" in text
    assert "the finder would cut this chain up" in text


def test_a_row_that_was_not_begun_says_so() -> None:
    late = KernelRow(family="gemm_epilogue", name="late", reason="Not begun: 200 s had passed.")
    text = tables.kernels(bench(row(), late))
    assert "- late: Not begun: 200 s had passed." in text
    assert "| late" not in text
    assert "- late: Not begun" in tables.kernels(bench(late))


def test_a_disturbed_measurement_is_told() -> None:
    assert "disturbed" not in tables.kernels(bench(row(noise=around(1.0))))
    noisy = row(noise=Interval(mid=1.0, low=0.7, high=1.2, samples=15))
    assert "disturbed: eager over itself is 1.00 [0.70–1.20]" in tables.kernels(bench(noisy))


def test_a_yardstick_is_never_the_best_other_way() -> None:
    assert row().best_other == "inductor"


def test_both_files_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    kernels, models = bench(row()), ModelBench(rows=[row_of("gpt2", "bfloat16", accepted())])
    kernels.save(tmp_path / "k.json")
    models.save(tmp_path / "m.json")
    assert KernelBench.model_validate_json((tmp_path / "k.json").read_text()) == kernels
    assert ModelBench.model_validate_json((tmp_path / "m.json").read_text()) == models


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_the_geometric_mean_lies_between_and_turns_over_with_its_values(values: list[float]) -> None:
    mean = geometric_mean(values)
    assert mean is not None
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert math.isclose(mean * (geometric_mean([1 / v for v in values]) or 0.0), 1.0, rel_tol=1e-9)
    assert geometric_mean([]) is None


def test_the_suite_has_every_promised_model() -> None:
    promised = {
        "gpt2", "bert", "t5-encoder", "llama-prefill", "llama-decode", "mixtral-moe", "vit-b", "convnext-t",
        "resnet-50", "efficientnet-b0", "mlp-mixer", "swin-t", "dit", "whisper-encoder", "dlrm",
    }  # fmt: skip
    assert set(suite.names()) == promised
    assert [m.name for m in suite.select(["dlrm", "gpt2"])] == ["gpt2", "dlrm"]
    assert {m.name for m in suite.select([], "short")} == set(suite.QUICK) < promised
    assert all(set(m.small) & {"batch"} for m in suite.MODELS)


def test_a_models_row_is_what_its_session_says() -> None:
    session = accepted()
    assert session.end_to_end is not None
    found = row_of("gpt2", "bfloat16", session)
    assert found.way("eager").time == session.end_to_end.baseline  # type: ignore[union-attr]
    assert found.way(found.patched).time == session.end_to_end.patched  # type: ignore[union-attr]
    assert sum(found.accepted.values()) == sum(len(c.sites) for c in session.candidates if c.status == "accepted")
    assert found.compile_s == max(r.compile_s for r in session.end_to_end.rivals if r.name.startswith("compile"))
    assert row_of("gpt2", "bfloat16", all_kept()).accepted == {}


def test_a_models_table_has_a_line_for_all_that_ran_and_a_reason_for_the_rest() -> None:
    crashed = ModelRow(model="bert", dtype="float32", reason="It ended with signal 11: no message")
    broken = row_of("gpt2", "bfloat16", accepted())
    broken = broken.model_copy(update={"ways": [*broken.ways, Rival(name="compile max-autotune", reason="no Triton")]})
    text = tables.models(ModelBench(rows=[broken, crashed], environment=accepted().environment))
    assert "- bert float32: It ended with signal 11" in text
    assert "- gpt2 bfloat16: compile max-autotune: no Triton" in text
    lines = [line for line in text.splitlines() if line.startswith("| gpt2 bfloat16")]
    assert len(lines) == 2
    assert "Geometric mean against eager" in text


def test_a_graph_that_is_replayed_shows_the_memory_of_its_kernels_without_one() -> None:
    row = row_of("gpt2", "bfloat16", accepted())
    ways = [
        Rival(name="eager", time=row.ways[0].time, peak_bytes=837_000_000),
        Rival(name="patched, rest inductor", time=row.ways[0].time, peak_bytes=600_000_000),
        Rival(name="patched, rest cudagraph", time=row.ways[0].time),
    ]
    row = row.model_copy(update={"ways": ways, "patched": "patched, rest cudagraph"})
    assert "| 837 MB / 600 MB compiled" in tables.models(ModelBench(rows=[row]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernels", "--family", "nobody"], "--family can't be nobody."),
        (["kernels", "--shapes", "huge"], "--shapes can't be huge."),
        (["kernels", "--only", "no such case", "--device", "cpu"], "No case is left."),
        (["models", "gpt5"], "MODELS can't be gpt5."),
        (["models", "gpt2", "--dtype", "int3"], "--dtype can't be int3."),
        (["models", "gpt2", "--each-s", "nan"], "--each-s can't be nan."),
        (["models", "gpt2", "--each-s", "0"], "--each-s can't be 0."),
        (["models", "gpt2", "--limit-s", "-5"], "--limit-s can't be -5."),
        (["models", "gpt2", "-o", __file__], "It is a file."),
        (["kernels", "--limit-s", "nan"], "--limit-s can't be nan."),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_tables_and_cases_need_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import fusescout.bench.tables, fusescout.bench.cases, fusescout.bench.suite, fusescout.bench.models"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_session_of_version_1_is_still_read(tmp_path: Path) -> None:
    text = accepted().model_dump_json(exclude={"end_to_end": {"rival", "baseline_peak_bytes", "speedup_over_rival"}})
    (tmp_path / "session.json").write_text(text.replace('"schema_version":2', '"schema_version":1'))
    assert '"schema_version":1' in (tmp_path / "session.json").read_text()
    assert Session.load(tmp_path) == accepted()


def test_a_model_that_was_stopped_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "import sys, time; open(sys.argv[1], 'w').write('0.1 s: race 1/4 a\\n2.5 s: race 2/4 b\\n'); time.sleep(60)"
    start = subprocess.Popen

    def slow(command: list[str], **how: Any) -> Any:
        return start([sys.executable, "-c", late, str(tmp_path / "progress.txt")], **how)

    monkeypatch.setattr(models.subprocess, "Popen", slow)
    reason = models._child({"folder": str(tmp_path)}, {}, 1.5)
    assert reason == "It took more than 2 s and was stopped; begun last, after 2.5 s: race 2/4 b."
