"""The terminal report: the verdict and what supports it, in about forty lines. Reads the same without colour."""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusescout.report import facts
from fusescout.report import numbers as n
from fusescout.report import wholemodel
from fusescout.session import CandidateResult
from fusescout.session import Session

MAX_CANDIDATES, MAX_CARDS, MAX_KEPT, MAX_REJECTIONS, MAX_WARNINGS = 8, 3, 1, 3, 3
BEST, DIM = "bold green", "dim"


def render(session: Session, width: int = 100, color: bool = False) -> str:
    """The report as lines of at most `width` columns; `color` adds ANSI codes."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Text(facts.clean(session.verdict), "bold"))
    console.print(Text(facts.workload(session), DIM))
    console.print(Text(facts.environment(session), DIM))
    console.print(_whole_model(session))
    found = facts.ordered(session.candidates)
    console.print(_candidates(found) if found else Text("No fusion candidates.\n"))
    _rest(console, len(found), MAX_CANDIDATES, "candidates")
    accepted = [c for c in found if c.status == "accepted"]
    for number, candidate in enumerate(accepted[:MAX_CARDS], 1):
        console.print(_hanging(f"{number}  ", _contenders(candidate)))
    _rest(console, len(accepted), MAX_CARDS, "accepted candidates")
    others = [(number, c) for number, c in enumerate(found, 1) if c.status != "accepted" and c.reason]
    for number, candidate in others[:MAX_KEPT]:
        console.print(_hanging(f"{number}  ", Text(facts.cut(facts.clean(candidate.reason), 180), DIM)))
    _rejections(console, session)
    for line in (facts.coverage(session), facts.disturbed(session), facts.host_bound(session)):
        if line:
            console.print(Text(line))
    if session.profile.breaks:
        console.print(_line(facts.breaks(session), 160))
    for warning in session.warnings[:MAX_WARNINGS]:
        console.print(_hanging("Warning: ", Text(facts.cut(facts.clean(warning), 180))))
    _rest(console, len(session.warnings), MAX_WARNINGS, "warnings")
    for command, what in facts.next_commands(session):
        fits = len(command) + len(what) + 4 <= width
        console.print(Text.assemble((command, "bold"), (f"  # {what}" if fits else "", DIM)), soft_wrap=True)
    return _single_spaced(out.getvalue())


def _whole_model(session: Session) -> Table:
    table = _table("End to end")
    for head in ("time of one call", "speed-up"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for way in wholemodel.ways(session):
        notes = [way.note, f"{n.significant(way.compile_s)} s to compile" if way.time and way.compile_s else ""]
        note = ", ".join(part for part in ["no difference" if n.undecided(way.speedup) else "", *notes] if part)
        gain = n.speedup(way.speedup) if way.speedup else ""
        name, style = facts.clean(way.name), BEST if way.best else ""
        table.add_row(
            _soft(f"{name} (best)" if way.best else name, style),
            Text(n.timing(way.time)),
            Text(gain, style),
            _soft(facts.clean(note), DIM),
        )
    return table


def _candidates(found: list[CandidateResult]) -> Table:
    table = _table("")
    table.add_column("chain")
    for head in ("sites", "share", "time", "bound"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("winner", max_width=10)
    table.add_column("over cheaper", justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for number, c in enumerate(found[:MAX_CANDIDATES], 1):
        style = BEST if c.status == "accepted" else ""
        gain = n.speedup(c.speedup) if c.speedup else n.NOTHING
        table.add_row(
            Text(str(number)),
            Text(facts.shorten(facts.chain_text(c.chain, 6), 56)),
            Text(f"×{len(c.sites)}"),
            Text(n.percent(c.share)),
            Text(n.duration(c.time_us)),
            Text(n.duration(c.bound_us)),
            _soft(facts.clean(c.winner)),
            Text(gain, style),
            Text(facts.clean(c.status), style),
        )
    return table


def _contenders(candidate: CandidateResult) -> Text:
    """ "tilelang 61.8 µs [61.5–62.1] · inductor 70.1 µs [69.8–70.5] · …"."""
    line = Text(f"{facts.shorten(facts.clean(candidate.id), 40)}: ")
    for contender in facts.raced(candidate):
        if not line.plain.endswith(": "):
            line.append(" · ", DIM)
        style = BEST if contender.name == candidate.winner else ""
        state = n.timing(contender.time) if contender.status == "ok" else facts.clean(contender.status)
        line.append(f"{facts.clean(contender.name)} {state}", style)
    if candidate.pays_back_calls is not None:
        line.append(f" · {n.payback(candidate.pays_back_calls)}")
    return line


def _rejections(console: Console, session: Session) -> None:
    ranked = sorted(session.rejections, key=lambda r: -r.time_us if r.time_us == r.time_us else 0.0)
    if ranked:
        console.print(Text("Not worth fusing", "bold"))
    for r in ranked[:MAX_REJECTIONS]:
        sites = f", {r.count} sites" if r.count > 1 else ""
        head = f"{facts.chain_text(r.chain, 6)}{sites}, {n.duration(r.time_us)}: "
        console.print(_line(f"  {facts.shorten(head, 70)}{r.reason}", 190))
    _rest(console, len(ranked), MAX_REJECTIONS, "rejected chains")


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, max_width=30)
    return table


def _soft(text: str, style: str = "") -> Text:
    """A cell that gives way when the line is too narrow; numbers never do."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _single_spaced(text: str) -> str:
    """No trailing blanks, no two empty lines in a row."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _hanging(head: str, body: Text) -> Table:
    """A paragraph whose further lines start under its first word."""
    grid = Table.grid()
    grid.add_column(no_wrap=True, max_width=20)
    grid.add_column()
    grid.add_row(Text(facts.clean(head)), body)
    return grid


def _line(text: str, limit: int) -> Padding:
    return Padding(Text(facts.cut(facts.clean(text), limit)), 0, expand=False)


def _rest(console: Console, count: int, shown: int, what: str) -> None:
    if count > shown:
        console.print(Text(f"… and {count - shown} more {what} in the full report.", DIM))
