"""What the reports say about a session in words: every format takes its sentences and names from here.

All text that a user's model can choose passes `clean`, so that no name can act on a terminal or hide another.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterable
from collections.abc import Sequence

from fusescout.report import numbers as n
from fusescout.session import CandidateResult
from fusescout.session import ContenderResult
from fusescout.session import Interval
from fusescout.session import Session
from fusescout.session import Site

MAX_OP = 60
DISTURBED = 1.5
"""Operators that take this much longer than the whole unprofiled step were not measured on a quiet machine."""
STATUS_ORDER = ("accepted", "dropped", "kept", "not raced")
INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def clean(text: str) -> str:
    """One line without control, direction or other invisible characters: a name can't move a cursor or hide text."""
    return "".join(" " if c.isspace() else "\ufffd" if unicodedata.category(c) in INVISIBLE else c for c in text)


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a long name: kernels differ at both ends."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - limit :]}"


def cut(text: str, limit: int) -> str:
    """Cut the end off a long sentence."""
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


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


def speedup_text(interval: Interval | None) -> str:
    """ "1.23× [1.20–1.26]", plus "no difference" where 1.0 lies inside."""
    return n.speedup(interval) + (", no difference" if n.undecided(interval) else "")


def ordered(candidates: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Accepted first, then by the share of the step."""
    rank = {status: k for k, status in enumerate(STATUS_ORDER)}
    return sorted(candidates, key=lambda c: (rank.get(c.status, len(rank)), -finite(c.share)))


def raced(candidate: CandidateResult) -> list[ContenderResult]:
    """Contenders, fastest first, those without a time last."""
    return sorted(candidate.contenders, key=lambda c: c.time.mid if c.time and c.time.mid == c.time.mid else math.inf)


def why(candidate: CandidateResult) -> str:
    """The reason for the decision, in one sentence."""
    if candidate.reason:
        return clean(candidate.reason)
    if candidate.status == "accepted":
        return f"{clean(candidate.winner)} is {n.speedup(candidate.speedup)} over the best cheaper contender."
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
    parts = [
        f"{e.device_name} ({cores})",
        *versions,
        f"Python {e.python}",
        e.os,
        f"FuseScout {e.fusescout}",
        e.date[:16].replace("T", " "),
    ]
    return clean(" · ".join(p for p in [f"{w.dtype} {w.mode}", *parts] if p))


def workload(session: Session) -> str:
    """One line: model, size, inputs."""
    w = session.workload
    size = f"{n.quantity(w.parameters)} parameters" if w.parameters else ""
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


def disturbed(session: Session) -> str:
    """A word of caution if the profiled run can't have been a normal one, or ""."""
    p = session.profile
    if not p.attributed_us > DISTURBED * p.step.high > 0:
        return ""
    return (
        f"The operators of the profiled run add up to {n.duration(p.attributed_us)}, the unprofiled step takes "
        f"{n.timing(p.step)}: the profiled run was slowed down, so read times and shares by operator with care."
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
    known = isinstance(folder, str) and folder
    run, plan = (str(folder), str(folder)) if known else ("session.json", "plan.json")
    commands = [(f"fusescout report {_quoted(run)} -o report.html", "the full report, one offline file")]
    if session.end_to_end is not None and session.end_to_end.sites_patched:
        target = _quoted(session.workload.target)
        commands.append((f"fusescout apply {_quoted(plan)} {target}", "patch, check and measure again"))
    return commands


def _quoted(text: str) -> str:
    return shlex.quote(clean(text))


def policy(session: Session) -> list[str]:
    """How it was measured, in the words of whoever measured: `settings["policy"]`, text or a list of texts."""
    text = session.settings.get("policy", [])
    return [str(t) for t in text] if isinstance(text, list) else [str(text)]


def finite(value: float) -> float:
    """0 for what is not a number that can be summed."""
    return value if math.isfinite(value) else 0.0
