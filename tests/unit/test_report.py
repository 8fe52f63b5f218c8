"""Reports: every format over every sample session, and what text, JSON and Markdown promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st
from sample_session import SAMPLES
from sample_session import accepted
from sample_session import all_kept
from sample_session import bert_profile
from sample_session import empty
from sample_session import hostile
from sample_session import with_drop

from fusescout.errors import UnknownReportFormat
from fusescout.report import facts
from fusescout.report import format_of
from fusescout.report import formats
from fusescout.report import grouping
from fusescout.report import markdown
from fusescout.report import opgraph
from fusescout.report import render
from fusescout.report import wholemodel
from fusescout.session import Session


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("format", formats())
def test_every_format_renders_every_session(format: str, sample: str) -> None:
    session = SAMPLES[sample]()
    text = render(session, format)
    assert text.endswith("\n")
    text.encode()
    assert render(session, format) == text, "reports must not depend on when they are made"


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
@pytest.mark.parametrize("sample", ["accepted", "all_kept", "with_drop", "empty"])
def test_the_verdict_leads(format: str, sample: str) -> None:
    session = SAMPLES[sample]()
    text = render(session, format)
    visible = re.sub(r"\s+", " ", "".join(Page(text).text) if format == "html" else text)
    visible = visible.replace("\u2060", "").replace("\\", "").removeprefix("**")
    start = visible.find(session.verdict)
    assert 0 <= start < 200


def test_unknown_formats_list_the_valid_ones() -> None:
    with pytest.raises(UnknownReportFormat, match="text, html, json, markdown"):
        render(empty(), "pdf")
    with pytest.raises(UnknownReportFormat, match=r"\.html"):
        format_of("report.pdf")


@pytest.mark.parametrize(
    ("path", "format"), [("a/b.HTML", "html"), ("x.json", "json"), (Path("x.md"), "markdown"), ("x.txt", "text")]
)
def test_the_extension_picks_the_format(path: str | Path, format: str) -> None:
    assert format_of(path) == format


@pytest.mark.parametrize("sample", SAMPLES)
def test_json_is_the_session_document(sample: str, tmp_path: Path) -> None:
    session = SAMPLES[sample]()
    file = tmp_path / "session.json"
    file.write_text(render(session, "json"), encoding="utf-8")
    again = Session.load(file)
    assert again.model_dump_json() == session.model_dump_json()


@pytest.mark.parametrize("sample", SAMPLES)
def test_text_fits_a_terminal(sample: str) -> None:
    lines = render(SAMPLES[sample](), "text").splitlines()
    assert len(lines) <= 45
    commands = [line for line in lines if line.startswith("fusescout ")]
    assert commands
    if sample != "hostile":
        assert max(len(line) for line in lines) <= 100


def test_text_shows_what_was_decided_and_why() -> None:
    text = render(accepted(), "text")
    for needed in (
        "linear → gelu",
        "1.12× [1.11–1.13]",
        "1.14× [1.13–1.15]",
        "tilelang 169 µs [167–170]",
        "no difference",
        "GEMM-bound",
        "97.0 % of GPU time",
        "pays back after 183,000 calls",
        "Capture failed",
        "fusescout apply fusescout-runs/bert-1 bert.py",
    ):
        assert needed in text
    assert "\x1b" not in text
    assert "fusescout apply" not in render(all_kept(), "text")


def test_text_names_the_cure_for_host_bound_steps() -> None:
    assert "CUDA graphs are the cure" in render(all_kept(), "text")
    assert "the cure" not in render(accepted(), "text")
    on_cpu = all_kept()
    on_cpu = on_cpu.model_copy(update={"environment": on_cpu.environment.model_copy(update={"device_kind": "cpu"})})
    assert "the cure" not in render(on_cpu, "text")


def test_colour_changes_no_text() -> None:
    coloured = render(accepted(), "text", color=True)
    assert "\x1b[" in coloured
    stripped = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines())
    plain = render(accepted(), "text").rstrip("\n")
    assert [line for line in stripped.splitlines() if line] == [line for line in plain.splitlines() if line]


def test_names_are_not_markup_and_move_no_cursor() -> None:
    text = render(hostile(), "text")
    assert "[bold]x[/usr/x]" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)


def _rows(text: str) -> list[list[str]]:
    """Cells of table lines, split as GitHub does: at pipes without a backslash before them."""
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("sample", SAMPLES)
def test_markdown_tables_are_rectangular(sample: str) -> None:
    width = 0
    for line in render(SAMPLES[sample](), "markdown").splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(_rows(line)[0])
        assert width in (0, cells)
        width = cells


def test_markdown_names_do_nothing() -> None:
    outside = re.sub(r"(`+) ?.*? ?\1", "", "\n".join(render(hostile(), "markdown").splitlines()[:6]))
    assert not re.search(r"(?<!\\)<(?!br>|!-- -->)", outside)


@given(st.text(max_size=40))
def test_markdown_code_spans_hold_any_name(name: str) -> None:
    span = markdown.code(name)
    fence = re.match("`+", span)
    assert fence is not None
    inner = span[len(fence[0]) : -len(fence[0])]
    assert span.endswith(fence[0])
    assert fence[0] not in re.findall("`+", inner), "the name closes its own span"
    assert len(_rows(f"|{span}|")[0]) == 1
    assert "\n" not in span


@pytest.mark.parametrize("format", ["text", "markdown", "html"])
@pytest.mark.parametrize("make", [accepted, all_kept, with_drop])
def test_no_speedup_without_interval(format: str, make: object) -> None:
    session = make()  # type: ignore[operator]
    session = session.model_copy(
        update={"candidates": [c.model_copy(update={"reason": "because"}) for c in session.candidates]}
    )
    text = render(session, format)
    visible = ("".join(Page(text).text) if format == "html" else text).replace("\\", "")
    for found in re.finditer(r"\d\.\d+×(.{2})", visible):
        assert re.fullmatch(r"\s\[", found[1]), visible[found.start() - 40 : found.end() + 20]


def test_best_needs_a_clear_lead() -> None:
    clear = {w.name: w.best for w in wholemodel.ways(accepted())}
    assert [name for name, best in clear.items() if best] == ["patched, rest eager"]
    assert not any(w.best for w in wholemodel.ways(empty()))
    session = accepted()
    end = session.end_to_end
    assert end is not None
    close = end.model_copy(
        update={"patched": end.baseline.model_copy(update={"mid": end.baseline.mid * 0.999}), "rivals": []}
    )
    assert not any(w.best for w in wholemodel.ways(session.model_copy(update={"end_to_end": close})))


def test_an_unverified_patch_is_never_best() -> None:
    session = accepted()
    assert session.end_to_end is not None
    wrong = session.model_copy(update={"end_to_end": session.end_to_end.model_copy(update={"verified": False})})
    assert not any(w.best for w in wholemodel.ways(wrong) if w.name == "patched, rest eager")


def test_small_rows_are_folded_and_nothing_is_lost() -> None:
    rows = grouping.by_op(accepted())
    assert rows[-1].folded
    assert [g.folded for g in rows[:-1]] == [False] * (len(rows) - 1)
    assert all(g.share >= grouping.SMALL for g in rows[:-1])
    assert sum(g.time_us for g in rows) == pytest.approx(sum(op.time_us for op in accepted().profile.ops))


def test_places_count_equal_layers() -> None:
    found = {c.id: c for c in accepted().candidates}
    assert facts.places(found["c1"].sites) == ["encoder.layer.*.intermediate (×12)"]
    assert facts.places(found["c3"].sites) == ["pooler"]


def test_equal_layers_fold_into_one() -> None:
    graph = opgraph.collapse(accepted())
    assert [times for _, _, times in graph.folds] == [12]
    assert len(graph.boxes) == 18
    total = sum(op.time_us for op in bert_profile().ops)
    assert sum(box.time_us for box in graph.boxes) == pytest.approx(total)
    hot = next(b for b in graph.boxes if b.label == "encoder.layer.*.intermediate.dense")
    assert (hot.times, hot.candidates) == (12, ("c1",))


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_graph_is_acyclic_and_bounded(sample: str) -> None:
    graph = opgraph.collapse(SAMPLES[sample]())
    assert len(graph.boxes) <= opgraph.MAX_BOXES
    assert all(source < target < len(graph.boxes) for source, target in graph.edges)


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_folds_cover_the_sequence_exactly(letters: list[str]) -> None:
    again: list[str] = []
    for start, period, times in opgraph._folds(letters):
        assert start == len(again)
        again += letters[start : start + period] * times
    assert again == letters


def test_reports_need_no_torch() -> None:
    """With torch, tilelang, pandas and networkx not importable, all formats still render."""
    script = (
        "import sys\n"
        "for name in ('torch', 'tilelang', 'pandas', 'networkx'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from sample_session import accepted\n"
        "from fusescout.report import formats, render\n"
        "print(sum(len(render(accepted(), f)) > 1000 for f in formats()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(len(formats()))


def test_a_disturbed_profile_is_said_so() -> None:
    session = accepted()
    slow = session.profile.model_copy(update={"attributed_us": 80_000.0})
    for format in ("text", "markdown", "html"):
        assert "slowed down" in render(session.model_copy(update={"profile": slow}), format)
        assert "slowed down" not in render(session, format)


def test_text_says_why_a_raced_chain_stays_with_the_framework() -> None:
    session = all_kept()
    assert session.candidates[0].reason
    assert session.candidates[0].reason.split(".")[0][:60] in " ".join(render(session, "text").split())
