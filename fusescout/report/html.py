"""The HTML report: one offline file with styles, script, drawings and the raw data inside.

Nothing in it loads anything: the page's own policy forbids every request and every script but the one it ships.
All text goes through Jinja's autoescape; drawings are built with `Markup.format`, which escapes too.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache

from jinja2 import Environment
from jinja2 import PackageLoader
from jinja2 import StrictUndefined
from markupsafe import Markup

from fusescout.report import bars
from fusescout.report import drawing
from fusescout.report import facts
from fusescout.report import grouping
from fusescout.report import numbers
from fusescout.report import opgraph
from fusescout.report import wholemodel
from fusescout.session import Session

MAX_OPS_PER_BOX, MAX_CARDS, MAX_NAME = 40, 60, 32
PLACE = re.compile(r"\S+?:\d+(?= |$)")
"""Of "model.py:31 x = gelu(x)", as capture writes it, the file and the line number."""
INTERVAL = re.compile(r"(\S+) \[([^\s–]+)–([^\s–]+)\]")
PROSE_SETTINGS = frozenset({"policy", "include_source", "run_dir"})


def render(session: Session) -> str:
    """The page. Source lines are in it only if `session.settings["include_source"]` is true."""
    shown = session if session.settings.get("include_source") is True else without_source(session)
    graph = opgraph.collapse(shown)
    candidates = facts.ordered(shown.candidates)
    marks = {c.id: drawing.Mark(str(k), c.status == "accepted") for k, c in enumerate(candidates, 1)}
    page = _environment().get_template("report.html.j2")
    return page.render(
        s=shown,
        candidates=candidates,
        figures=wholemodel.figures(shown),
        facts=facts,
        whole=wholemodel,
        grouping=grouping,
        n=numbers,
        bars=bars,
        boxes=graph.boxes,
        graph=drawing.draw(graph, marks),
        settings={k: v for k, v in shown.settings.items() if k not in PROSE_SETTINGS},
        max_ops=MAX_OPS_PER_BOX,
        max_cards=MAX_CARDS,
        island=island(shown),
        css=_asset("report.css"),
        js=_asset("report.js"),
        js_hash=_hash(_asset("report.js")),
    )


def without_source(session: Session) -> Session:
    """The session with no line of the model's source in it, only where it is: a page is made to be passed on."""
    profile = session.profile

    def place(source: str) -> str:
        found = PLACE.match(source)
        return found[0] if found else ""

    return session.model_copy(
        update={
            "profile": profile.model_copy(
                update={"ops": [op.model_copy(update={"source": place(op.source)}) for op in profile.ops]}
            ),
            "candidates": [
                c.model_copy(
                    update={"sites": [site.model_copy(update={"source": place(site.source)}) for site in c.sites]}
                )
                for c in session.candidates
            ],
        }
    )


def island(session: Session) -> Markup:
    """The session document as JSON that can't end the script element it stands in."""
    text = session.model_dump_json()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fusescout.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["clean"] = facts.clean
    environment.filters["name"] = lambda text: facts.shorten(facts.clean(text), MAX_NAME)
    environment.filters["keep"] = _unbroken
    return environment


@cache
def _asset(name: str) -> Markup:
    """A file we ship, as it is; Markup because it is ours, not a user's."""
    loader = _environment().loader
    assert loader is not None
    return Markup(loader.get_source(_environment(), name)[0])


def _unbroken(text: str) -> str:
    """No line break inside "1.14× [1.13–1.15]"."""
    return INTERVAL.sub("\\1\u00a0[\\2\u2060–\u2060\\3]", text)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
