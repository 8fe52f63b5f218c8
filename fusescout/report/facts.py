"""What the reports say, as plain rows and sentences: every format words and groups the session the same way.

No format writes a sentence or sums a column by itself; it takes it from here and only lays it out.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

from fusescout.report import numbers as n
from fusescout.session import CandidateResult
from fusescout.session import ContenderResult
from fusescout.session import Interval
from fusescout.session import KernelRow
from fusescout.session import OpRow
from fusescout.session import Session
from fusescout.session import Site

SMALL = 0.01
"""Rows below this share of the total are folded into one."""
MAX_OP = 60
STATUS_ORDER = ("accepted", "dropped", "kept", "not raced")
INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the whole model. `best` only where its interval overlaps no other's."""

    name: str
    time: Interval | None
    speedup: Interval | None = None
    compile_s: float = 0.0
    note: str = ""
    paired: bool = False
    best: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Equal rows summed: operators of one name, modules of one path pattern, kernels of one name."""

    name: str
    count: int
    time_us: float
    share: float
    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = ""
    folded: bool = False


def clean(text: str) -> str:
    """One line without control, direction or other invisible characters: a name can't move a cursor or hide text."""
    return "".join(" " if c.isspace() else "\ufffd" if unicodedata.category(c) in INVISIBLE else c for c in text)


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a long name: kernels differ at both ends."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - limit :]}"


def chain_text(chain: Sequence[str], limit: int = 12) -> str:
    """ "linear → add → gelu", with runs counted and very long chains cut in the middle."""
    runs: list[tuple[str, int]] = []
    for op in chain:
        if runs and runs[-1][0] == op:
            runs[-1] = (op, runs[-1][1] + 1)
        else:
            runs.append((op, 1))
    words = [shorten(clean(op), MAX_OP) + (f" ×{count}" if count > 1 else "") for op, count in runs]
    if len(words) > limit:
        head = limit // 2
        words = [*words[:head], f"… {len(words) - 2 * head} more …", *words[-head:]]
    return " → ".join(words) or n.NOTHING


def pattern(module: str) -> str:
    """ "encoder.layer.3.output" → "encoder.layer.*.output"."""
    return INDEX.sub("*", module)


def places(sites: Sequence[Site], limit: int = 4) -> list[str]:
    """Where the sites are: module paths, equal layers as one line with a count."""
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(pattern(site.module), []).append(site.module)
    lines = [
        f"{clean(key)} (×{len(modules)})" if len(modules) > 1 else clean(modules[0]) or "(top level)"
        for key, modules in groups.items()
    ]
    return [*lines[:limit], f"… {len(lines) - limit} more places"] if len(lines) > limit else lines


def sources(sites: Sequence[Site], limit: int = 3) -> list[str]:
    """Distinct source lines of the sites, if the session has them."""
    return list(dict.fromkeys(clean(site.source) for site in sites if site.source))[:limit]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the header strip, with what it means."""

    name: str
    value: str
    note: str


def figures(session: Session) -> list[Figure]:
    """The numbers to see first."""
    p, end = session.profile, session.end_to_end
    device = "GPU" if session.environment.device_kind == "cuda" else "operators"
    found = []
    if end is not None and end.speedup is not None:
        note = "no difference" if n.undecided(end.speedup) else f"over {clean(end.composition)}, the unpatched model"
        found.append(Figure("Patched, end to end", n.speedup(end.speedup), note))
    found.append(Figure("One step", n.timing(p.step), f"{p.launches:,} launches" if p.launches else "unprofiled"))
    found.append(
        Figure(
            "Idle", n.percent(p.idle_share), "host-bound" if p.host_bound else f"{device} busy {n.duration(p.busy_us)}"
        )
    )
    found.append(Figure("Attributed", n.percent(p.coverage), f"of {device} time to captured operators"))
    statuses = [c.status for c in session.candidates]
    rest = ", ".join(f"{statuses.count(s)} {s}" for s in STATUS_ORDER[1:] if s in statuses)
    found.append(Figure("Candidates accepted", f"{statuses.count('accepted')} of {len(statuses)}", rest))
    return found


def ways(session: Session) -> list[Way]:
    """The whole-model table: the baseline, each rival, the patched model."""
    end = session.end_to_end
    if end is None:
        return [Way("eager", session.profile.step)]
    found = [Way(end.composition or "eager", end.baseline)]
    found += [Way(r.name, r.time, n.ratio(end.baseline, r.time), r.compile_s, r.reason) for r in end.rivals]
    patched = "patched" if end.composition in ("", "eager") else f"patched + {end.composition}"
    if end.patched is not None:
        note = f"{end.sites_patched} site{'s' if end.sites_patched != 1 else ''}" + (
            "" if end.verified else ", not verified"
        )
        found.append(Way(patched, end.patched, end.speedup, note=note, paired=end.speedup is not None))
    timed = [w for w in found if w.time is not None and math.isfinite(w.time.mid)]
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


def speedup_text(interval: Interval | None) -> str:
    """ "1.23× [1.20–1.26]", plus "no difference" where 1.0 lies inside."""
    return n.speedup(interval) + (", no difference" if n.undecided(interval) else "")


def ordered(candidates: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Accepted first, then by the share of the step."""
    rank = {status: k for k, status in enumerate(STATUS_ORDER)}
    return sorted(candidates, key=lambda c: (rank.get(c.status, len(rank)), -_finite(c.share)))


def raced(candidate: CandidateResult) -> list[ContenderResult]:
    """Contenders, fastest first, those without a time last."""
    return sorted(candidate.contenders, key=lambda c: c.time.mid if c.time and c.time.mid == c.time.mid else math.inf)


def why(candidate: CandidateResult) -> str:
    """The reason for the decision, in one sentence."""
    if candidate.reason:
        return clean(candidate.reason)
    if candidate.status == "accepted":
        return f"{clean(candidate.winner)} is {n.speedup(candidate.speedup)} over the best other contender."
    return {
        "kept": "No contender beat the framework's own code by enough.",
        "dropped": "It lost its gain, or its check, in the whole model.",
        "not raced": "It was not raced.",
    }.get(candidate.status, "")


def variant_text(contender: ContenderResult) -> str:
    return clean(" ".join(f"{k}={v}" for k, v in contender.variant.items()))


def error_text(contender: ContenderResult) -> str:
    """Worst error as a share of what is allowed."""
    return n.NOTHING if contender.error is None else n.percent(contender.error.worst)


def environment(session: Session) -> str:
    """One line: device, versions, date."""
    e, w = session.environment, session.workload
    cores = f"{e.cores} {'SMs' if e.device_kind == 'cuda' else 'threads'}"
    versions = [f"torch {e.torch}"]
    versions += [
        f"{name} {value}" for name, value in (("TileLang", e.tilelang), ("nvcc", e.nvcc), ("driver", e.driver)) if value
    ]
    parts = [f"{e.device_name} ({cores})", *versions, f"Python {e.python}", e.os, f"FuseScout {e.fusescout}", e.date]
    return clean(" · ".join(p for p in [f"{w.dtype} {w.mode}", *parts] if p))


def workload(session: Session) -> str:
    """One line: model, size, inputs."""
    w = session.workload
    size = f"{n.significant(w.parameters / 1e6)} M parameters" if w.parameters else ""
    return clean(" · ".join(p for p in [w.model, size, ", ".join(w.inputs[:4])] if p))


def coverage(session: Session) -> str:
    """How much of the measured time the tables below explain."""
    p = session.profile
    total = p.attributed_us + p.unlinked_us
    if not total:
        return "No kernel time was recorded, so nothing can be attributed."
    what = "GPU" if session.environment.device_kind == "cuda" else "operator"
    unlinked = f"; {n.duration(p.unlinked_us)} unlinked" if p.unlinked_us else ""
    attributed = f"{n.duration(p.attributed_us)}{unlinked}"
    return f"{n.percent(p.coverage)} of {what} time attributed to captured operators ({attributed})."


def host_bound(session: Session) -> str:
    """What to do about a step that waits for Python, or "" if it doesn't."""
    p = session.profile
    if not p.host_bound:
        return ""
    launches = f" for {p.launches:,} launches" if p.launches else ""
    if session.environment.device_kind != "cuda":
        return f"Host-bound: {n.percent(p.idle_share)} of the step is spent outside operators{launches}."
    return (
        f"Host-bound: the GPU idles {n.percent(p.idle_share)} of the step, waiting{launches}. CUDA graphs are the cure "
        '(torch.compile(mode="reduce-overhead")); fusing kernels helps only as far as it removes launches.'
    )


def breaks(session: Session) -> str:
    """How many graph breaks there were, and the first, or ""."""
    found = session.profile.breaks
    if not found:
        return ""
    count = "1 graph break" if len(found) == 1 else f"{len(found)} graph breaks, first"
    return clean(f"{count}: {found[0].reason}" + (f" ({found[0].where})" if found[0].where else ""))


def next_commands(session: Session) -> list[tuple[str, str]]:
    """(command, what it does): what to type next."""
    folder = session.settings.get("run_dir")
    where = shlex.quote(clean(f"{folder}/session.json" if isinstance(folder, str) and folder else "session.json"))
    commands = [(f"fusescout report {where} -o report.html", "the full report, one offline file")]
    if any(c.status == "accepted" for c in session.candidates):
        commands.append((f"fusescout apply {where}", "patch the model with the accepted candidates"))
    return commands


def policy(session: Session) -> list[str]:
    """How it was measured, in the words of whoever measured: `settings["policy"]`, text or a list of texts."""
    text = session.settings.get("policy", [])
    return [str(t) for t in text] if isinstance(text, list) else [str(text)]


def by_op(session: Session) -> list[Group]:
    return fold(_grouped(session.profile.ops, lambda row: row.op))


def by_module(session: Session) -> list[Group]:
    """Innermost modules; equal layers are one row."""
    return fold(_grouped(session.profile.ops, lambda row: pattern(row.module) or "(top level)"))


def kernels(session: Session) -> list[Group]:
    rows: Sequence[KernelRow] = session.profile.kernels
    return fold([Group(r.name, r.calls, r.time_us, r.share, kernels=len(r.nodes)) for r in rows])


def fold(groups: list[Group]) -> list[Group]:
    """Sort by time; what is below 1 % becomes one row at the end."""
    groups = sorted(groups, key=lambda g: -_finite(g.time_us))
    small = [g for g in groups if not _finite(g.share) >= SMALL]
    if len(small) < 2:
        return groups
    other = Group(
        f"other ({len(small)} rows below 1 %)",
        sum(g.count for g in small),
        sum(_finite(g.time_us) for g in small),
        sum(_finite(g.share) for g in small),
        sum(g.kernels for g in small),
        sum(g.flops for g in small),
        sum(g.bytes for g in small),
        folded=True,
    )
    return [*(g for g in groups if _finite(g.share) >= SMALL), other]


def _grouped(rows: Iterable[OpRow], name: Callable[[OpRow], str]) -> list[Group]:
    groups: dict[str, list[OpRow]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return [
        Group(
            key,
            len(members),
            sum(_finite(m.time_us) for m in members),
            sum(_finite(m.share) for m in members),
            sum(m.kernels for m in members),
            sum(_finite(m.flops) for m in members),
            sum(_finite(m.bytes) for m in members),
            _main_bound(members),
        )
        for key, members in groups.items()
    ]


def _main_bound(rows: Sequence[OpRow]) -> str:
    """The bound that holds for most of the rows' time."""
    weight: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        weight[row.bound] += _finite(row.time_us) + 1e-9
    return max(weight, key=lambda k: weight[k], default="")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
