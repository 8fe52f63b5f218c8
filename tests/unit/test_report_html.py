"""The HTML report: well-formed, offline, accessible, and safe against names that a model can choose."""

from __future__ import annotations

import json
import re

import pytest
from html_page import Page
from sample_session import HOSTILE
from sample_session import SAMPLES
from sample_session import accepted
from sample_session import large

from fusescout.report import facts
from fusescout.report import render
from fusescout.session import Session


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(render(make(), "html")) for name, make in SAMPLES.items()}


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
        for result in candidate.contenders:
            if result.error is not None and result.status == "ok":
                assert result.error.measure in text
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
