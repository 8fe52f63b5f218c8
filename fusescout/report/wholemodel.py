"""The whole model in numbers: the ways to run it, one against another, and the figures a reader sees first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.report import numbers as n
from fusescout.report.facts import STATUS_ORDER
from fusescout.session import Interval
from fusescout.session import Session


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the whole model. `best` only where its interval overlaps no other's."""

    name: str
    time: Interval | None
    speedup: Interval | None = None
    compile_s: float = 0.0
    note: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the header strip, with what it means."""

    name: str
    value: str
    note: str


def figures(session: Session) -> list[Figure]:
    """The numbers to see first."""
    p, end = session.profile, session.end_to_end
    device, what = ("GPU", "GPU") if session.environment.device_kind == "cuda" else ("operators", "operator")
    found = []
    if end is not None and end.speedup is not None:
        note = "no difference" if n.undecided(end.speedup) else "over eager, the unpatched model"
        name = f"Left to {end.left_to}" if end.left_to else "Patched, end to end"
        found.append(Figure(name, n.speedup(end.speedup), note))
    found.append(Figure("One step", n.timing(p.step), f"{p.launches:,} launches" if p.launches else "unprofiled"))
    busy = "host-bound" if p.host_bound else f"{device} busy {n.duration(p.busy_us)}"
    found.append(Figure("Idle", n.percent(p.idle_share), busy))
    found.append(Figure("Attributed", n.percent(p.coverage), f"of {what} time to captured operators"))
    statuses = [c.status for c in session.candidates]
    rest = ", ".join(f"{statuses.count(s)} {s}" for s in STATUS_ORDER[1:] if s in statuses)
    found.append(Figure("Candidates accepted", f"{statuses.count('accepted')} of {len(statuses)}", rest))
    return found


def ways(session: Session) -> list[Way]:
    """The whole-model table: the baseline, each rival, the patched model."""
    end = session.end_to_end
    if end is None:
        return [Way("eager", session.profile.step)]
    name = end.left_to or f"patched, rest {end.composition}"
    found = [Way("eager", end.baseline)]
    rivals = [r for r in end.rivals if end.patched is None or r.name != name]
    found += [Way(r.name, r.time, n.ratio(end.baseline, r.time), r.compile_s, r.reason) for r in rivals]
    if end.patched is not None:
        plural = "" if end.sites_patched == 1 else "s"
        sites = f"{end.sites_patched} site{plural}" if end.sites_patched else "not adopted"
        note = "adopted, nothing is patched" if end.left_to else sites
        compile_s = next((r.compile_s for r in end.rivals if r.name == name), 0.0)
        found.append(Way(name, end.patched, end.speedup, compile_s, note + ("" if end.verified else ", not verified")))
    wrong = name if end.patched is not None and not end.verified else None
    timed = [w for w in found if w.time is not None and math.isfinite(w.time.mid) and w.name != wrong]
    first = min(timed, key=lambda w: w.time.mid if w.time else math.inf, default=None)
    if first is None or first.time is None:
        return found
    high = first.time.high
    clear = len(timed) > 1 and all(w is first or (w.time is not None and w.time.low > high) for w in timed)
    return [replace(w, best=clear and w is first) for w in found]


def noise(session: Session) -> str:
    """How far the same model is from itself, or "" if that was not measured."""
    floor = session.end_to_end.noise if session.end_to_end else None
    if floor is None or math.isnan(floor.low + floor.high):
        return ""
    return f"Noise floor, the model against itself: {n.percent(max(abs(floor.low - 1), abs(floor.high - 1)))}."
