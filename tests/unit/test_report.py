"""Reports: every format over every sample session, and what each format promises."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_session import HOSTILE
from sample_session import SAMPLES
from sample_session import accepted
from sample_session import all_kept
from sample_session import bert_profile
from sample_session import empty
from sample_session import hostile
from sample_session import large
from sample_session import with_drop

from fusescout.errors import UnknownReportFormat
from fusescout.report import bars
from fusescout.report import facts
from fusescout.report import format_of
from fusescout.report import formats
from fusescout.report import markdown
from fusescout.report import numbers as n
from fusescout.report import opgraph
from fusescout.report import render
from fusescout.session import Interval
from fusescout.session import Session

VOID = {"meta", "br", "img", "link", "input", "hr"}
EXECUTABLE = {"script", "style"}


class Page(HTMLParser):
    """Checks balance while it collects elements, ids and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in EXECUTABLE:
            name = self.elements[-1][1].get("id") or self.open[-1]
            self.raw[name] = self.raw.get(name, "") + data
        else:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(render(make(), "html")) for name, make in SAMPLES.items()}


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


# --- json


@pytest.mark.parametrize("sample", SAMPLES)
def test_json_is_the_session_document(sample: str, tmp_path: Path) -> None:
    session = SAMPLES[sample]()
    file = tmp_path / "session.json"
    file.write_text(render(session, "json"), encoding="utf-8")
    again = Session.load(file)
    assert again.model_dump_json() == session.model_dump_json()


# --- text


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
        "fusescout apply fusescout-runs/bert-1/session.json",
    ):
        assert needed in text
    assert "\x1b" not in text
    assert "fusescout apply" not in render(all_kept(), "text")


def test_text_names_the_cure_for_host_bound_steps() -> None:
    assert "CUDA graphs are the cure" in render(all_kept(), "text")
    assert "CUDA graphs" not in render(accepted(), "text")
    on_cpu = all_kept()
    on_cpu = on_cpu.model_copy(update={"environment": on_cpu.environment.model_copy(update={"device_kind": "cpu"})})
    assert "CUDA graphs" not in render(on_cpu, "text")


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


# --- html


@pytest.mark.parametrize("sample", SAMPLES)
def test_html_is_balanced_and_loads_nothing(sample: str, pages: dict[str, Page]) -> None:
    page = pages[sample]
    assert page.open == []
    for tag, attrs in page.elements:
        assert tag not in {"img", "link", "iframe", "object", "embed", "base"}
        for name, value in attrs.items():
            assert not name.startswith("on"), f"{tag} has a handler"
            if name in {"src", "href", "action", "data", "xlink:href"}:
                assert value is not None
                assert value.startswith("#"), f"{tag} points to {value}"
    styles = "".join(text for name, text in page.raw.items() if name == "style")
    assert "url(" not in styles
    assert "@import" not in styles


@pytest.mark.parametrize("sample", SAMPLES)
def test_html_links_and_labels_resolve(sample: str, pages: dict[str, Page]) -> None:
    page = pages[sample]
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.elements:
        if attrs.get("href", "#").startswith("#") and len(attrs.get("href", "#")) > 1:  # type: ignore[union-attr,arg-type]
            target = attrs["href"]
            if target is not None and re.fullmatch(r"#c\d+", target) and target[1:] not in ids:
                assert sample == "large", "only cards beyond the limit may be missing"
                continue
            assert target is not None
            assert target[1:] in ids
        if attrs.get("aria-labelledby"):
            assert attrs["aria-labelledby"] in ids


@pytest.mark.parametrize("sample", SAMPLES)
def test_html_shows_each_candidate_and_rejection(sample: str, pages: dict[str, Page]) -> None:
    session, text = SAMPLES[sample](), "".join(pages[sample].text)
    for candidate in session.candidates:
        assert facts.shorten(facts.clean(candidate.id), 32) in text
        assert facts.chain_text(candidate.chain) in text
    for rejection in session.rejections:
        assert facts.clean(rejection.reason) in text


@pytest.mark.parametrize("sample", SAMPLES)
def test_html_holds_the_session_as_data(sample: str, pages: dict[str, Page]) -> None:
    session = SAMPLES[sample]()
    data = json.loads(pages[sample].raw["session"])
    assert Session.model_validate(data).verdict == session.verdict
    assert len(data["candidates"]) == len(session.candidates)
    assert data["profile"]["step"] == json.loads(session.model_dump_json())["profile"]["step"]


def test_hostile_names_stay_text(pages: dict[str, Page]) -> None:
    page = pages["hostile"]
    scripts = page.all("script")
    assert [s.get("type") for s in scripts] == ["application/json", None]
    assert facts.clean(HOSTILE) in "".join(page.text)
    assert "49" not in "".join(page.text).split("Op graph")[0].replace("\u2060", ""), (
        "a name was evaluated as a template"
    )


def test_source_lines_only_on_request() -> None:
    secret = "SECRET_LINE"
    assert secret in accepted().model_dump_json()
    assert secret not in render(accepted(), "html")
    asked = accepted()
    asked = asked.model_copy(update={"settings": asked.settings | {"include_source": True}})
    page = Page(render(asked, "html"))
    assert secret in "".join(page.text)
    for format in ("text", "markdown"):
        assert secret not in render(accepted(), format)


def test_tables_are_usable_without_sight(pages: dict[str, Page]) -> None:
    page = pages["accepted"]
    for attrs in page.all("th"):
        assert attrs.get("scope") in {"col", "row"}
    assert len(page.all("caption")) >= 7
    assert {a.get("aria-sort") for a in page.all("th")} >= {"descending"}
    for attrs in page.all("svg"):
        assert attrs.get("aria-hidden") == "true" or attrs.get("aria-label")
    assert [a.get("lang") for a in page.all("html")] == ["en"]


def test_the_page_forbids_requests(pages: dict[str, Page]) -> None:
    policy = next(
        a["content"] for a in pages["accepted"].all("meta") if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]


def test_a_report_for_thousands_of_operators_stays_small() -> None:
    assert len(render(large(), "html")) < 3_000_000


# --- markdown


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


# --- numbers


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_never_fail_and_never_use_exponents(value: float) -> None:
    interval = Interval(mid=value, low=value, high=value)
    shown = [
        n.significant(value),
        n.duration(value),
        n.percent(value),
        n.timing(interval),
        n.speedup(interval),
        n.payback(value),
        n.nbytes(value),
        n.flops(value),
        n.unit_for([value]).show(value),
        str(bars.bar(interval, bars.scale([interval]))),
    ]
    for text in shown:
        assert "nan" not in text.lower()
        assert not re.search(r"\de[+-]?\d", text)


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_three_significant_digits_are_right(value: float) -> None:
    assert math.isclose(float(n.significant(value).replace(",", "")), value, rel_tol=5.1e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (0.01234, "0.0123 µs"),
        (812.4, "812 µs"),
        (999.6, "1.00 ms"),
        (1234.0, "1.23 ms"),
        (4.56e6, "4.56 s"),
        (9.999, "10.0 µs"),
    ],
)
def test_durations_scale(value: float, text: str) -> None:
    assert n.duration(value) == text


def test_speedups_carry_their_interval() -> None:
    gain = Interval(mid=1.234, low=1.2, high=1.2649)
    assert n.speedup(gain) == "1.23× [1.20–1.26]"
    assert facts.speedup_text(gain) == "1.23× [1.20–1.26]"
    assert facts.speedup_text(Interval(mid=1.01, low=0.99, high=1.03)) == "1.01× [0.99–1.03], no difference"
    assert n.speedup(Interval(mid=math.nan, low=0, high=1)) == n.NOTHING


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


def test_ratio_of_separate_intervals_is_the_widest() -> None:
    ratio = n.ratio(Interval(mid=10, low=9, high=11), Interval(mid=5, low=4, high=6))
    assert ratio is not None
    assert (ratio.low, ratio.mid, ratio.high) == (9 / 6, 2.0, 11 / 4)
    assert n.ratio(Interval(mid=1, low=1, high=1), Interval(mid=0, low=0, high=0)) is None


# --- facts


def test_best_needs_a_clear_lead() -> None:
    clear = {w.name: w.best for w in facts.ways(accepted())}
    assert [name for name, best in clear.items() if best] == ["patched"]
    assert not any(w.best for w in facts.ways(empty()))
    session = accepted()
    end = session.end_to_end
    assert end is not None
    close = end.model_copy(
        update={"patched": end.baseline.model_copy(update={"mid": end.baseline.mid * 0.999}), "rivals": []}
    )
    assert not any(w.best for w in facts.ways(session.model_copy(update={"end_to_end": close})))


def test_small_rows_are_folded_and_nothing_is_lost() -> None:
    rows = facts.by_op(accepted())
    assert rows[-1].folded
    assert [g.folded for g in rows[:-1]] == [False] * (len(rows) - 1)
    assert all(g.share >= facts.SMALL for g in rows[:-1])
    assert sum(g.time_us for g in rows) == pytest.approx(sum(op.time_us for op in accepted().profile.ops))


def test_places_count_equal_layers() -> None:
    found = {c.id: c for c in accepted().candidates}
    assert facts.places(found["c1"].sites) == ["encoder.layer.*.intermediate (×12)"]
    assert facts.places(found["c3"].sites) == ["pooler"]


# --- op graph


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


# --- imports


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
