"""The trace copy for TensorBoard's profiler plugin says the same in the plugin's terms."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fusescout.cli import main
from fusescout.errors import TraceUnreadable
from fusescout.report.tensorboard import rewritten
from fusescout.report.tensorboard import write_for_tensorboard

TRACE = {
    "traceEvents": [
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": 1.0,
            "dur": 2.0,
            "args": {"correlation": 7},
        },
        {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 4.0, "dur": 2.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 9.0, "args": {"correlation": 7}},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "ts": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#3", "ts": 1.0, "dur": 20.0},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 1.0, "dur": 20.0},
        {"ph": "X", "name": "Record Window End", "ts": 30.0, "dur": 0.0},
    ],
    "deviceProperties": [{"id": 0}],
}


def test_launches_flows_and_steps_are_renamed_and_nothing_else_is_lost() -> None:
    made = rewritten(TRACE)
    assert [e.get("cat") for e in made["traceEvents"]] == [
        "Runtime", "Runtime", "kernel", "forward_backward", "user_annotation", "unknown",
    ]  # fmt: skip
    assert list(made)[-1] == "traceEvents"
    assert made["deviceProperties"] == TRACE["deviceProperties"]
    assert made["traceEvents"][2] == TRACE["traceEvents"][2], "what the plugin understands is not touched"


def test_the_file_has_the_only_kind_of_name_the_plugin_reads(tmp_path: Path) -> None:
    for name, data in (
        ("t.json", json.dumps(TRACE).encode()),
        ("t.json.gz", gzip.compress(json.dumps(TRACE).encode())),
    ):
        (tmp_path / name).write_bytes(data)
        place = write_for_tensorboard(tmp_path / name, tmp_path / "logs")
        assert place.name.endswith(".pt.trace.json.gz")
        assert len(json.loads(gzip.decompress(place.read_bytes()))["traceEvents"]) == 6


@pytest.mark.parametrize("data", [b"", b"[1]", b"{}", b"\x1f\x8bnope"])
def test_what_is_no_trace_says_so(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(TraceUnreadable):
        write_for_tensorboard(tmp_path / "t.json", tmp_path)


def test_the_command_needs_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sample_session import SAMPLES

    session = SAMPLES["accepted"]()
    session = session.model_copy(update={"profile": session.profile.model_copy(update={"trace": None})})
    session.save(tmp_path / "session.json")
    assert main(["report", str(tmp_path), "--tensorboard", str(tmp_path / "tb")]) == 2
    assert "has no trace" in capsys.readouterr().err
