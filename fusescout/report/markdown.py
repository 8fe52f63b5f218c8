"""The Markdown report, for pull-request comments and step summaries: verdict, tables, rejections.

Names from the model stand in code spans, where neither Markdown, HTML nor mentions are active; sentences are escaped.
"""

from __future__ import annotations

import re

from fusescout.report import facts
from fusescout.report import numbers as n
from fusescout.report import wholemodel
from fusescout.session import Session

MAX_ROWS = 30
ACTIVE = re.compile(r"([\\`*_\[\]<>|#~])")


def render(session: Session) -> str:
    """The report as GitHub-flavoured Markdown."""
    blocks = [f"**{prose(session.verdict)}**", prose(facts.workload(session)), prose(facts.environment(session))]
    blocks += ["### End to end", _whole_model(session)]
    blocks += ["### Candidates", _candidates(session) if session.candidates else "No fusion candidates."]
    if session.rejections:
        blocks += ["### Not worth fusing", _rejections(session)]
    notes = [facts.coverage(session), facts.disturbed(session), facts.host_bound(session)]
    notes += [f"Graph break: {b.reason} {b.where}" for b in session.profile.breaks]
    notes += [f"Warning: {w}" for w in session.warnings]
    blocks += ["### Notes", "\n".join(f"- {prose(note)}" for note in notes[:MAX_ROWS] if note)]
    return "\n\n".join(blocks) + "\n"


def prose(text: str) -> str:
    """A sentence with nothing in it that Markdown acts on; an @name must not notify anyone."""
    return ACTIVE.sub(r"\\\1", facts.clean(text)).replace("@", "@<!-- -->")


def code(text: str) -> str:
    """A code span for a table cell: fenced with more backticks than it holds, pipes escaped."""
    text = re.sub(r"\\+\|", lambda run: run[0][:-1] + " |", facts.clean(text)).replace("|", r"\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith(("`", "\\")) or not text.strip() else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _whole_model(session: Session) -> str:
    rows = []
    for way in wholemodel.ways(session):
        name = f"**{prose(way.name)}** (best)" if way.best else prose(way.name)
        gain = facts.speedup_text(way.speedup) if way.speedup else n.NOTHING
        rows.append([name, n.timing(way.time), gain, prose(way.note)])
    return _table(["", "time of one call", "speed-up", "note"], "lrrl", rows)


def _candidates(session: Session) -> str:
    found = facts.ordered(session.candidates)
    rows = [
        [
            prose(c.id),
            code(facts.chain_text(c.chain)),
            "<br>".join(code(p) for p in facts.places(c.sites)),
            str(len(c.sites)),
            n.percent(c.share),
            n.duration(c.time_us),
            n.duration(c.bound_us),
            prose(c.winner),
            facts.speedup_text(c.speedup),
            f"**{prose(c.status)}**" if c.status == "accepted" else prose(c.status),
            prose(facts.why(c)),
        ]
        for c in found[:MAX_ROWS]
    ]
    heads = [
        "id",
        "chain",
        "where",
        "sites",
        "share of step",
        "time",
        "bound",
        "winner",
        "over the best cheaper",
        "status",
        "why",
    ]
    return _table(heads, "lllrrrrlrll", rows) + _rest(len(found))


def _rejections(session: Session) -> str:
    rows = [
        [code(facts.chain_text(r.chain)), code(r.where), str(r.count), n.duration(r.time_us), prose(r.reason)]
        for r in session.rejections[:MAX_ROWS]
    ]
    return _table(["chain", "where", "sites", "time", "why not"], "llrrl", rows) + _rest(len(session.rejections))


def _table(heads: list[str], align: str, rows: list[list[str]]) -> str:
    rule = ["---:" if a == "r" else "---" for a in align]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])


def _rest(count: int) -> str:
    return f"\n\n… and {count - MAX_ROWS} more." if count > MAX_ROWS else ""
