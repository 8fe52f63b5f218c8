"""The benches' tables as Markdown, which a terminal shows as well as a README does."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusescout.bench.records import OWN
from fusescout.bench.records import YARDSTICKS
from fusescout.bench.records import KernelBench
from fusescout.bench.records import KernelRow
from fusescout.bench.records import ModelBench
from fusescout.bench.records import ModelRow
from fusescout.bench.records import geometric_mean
from fusescout.report import numbers as n
from fusescout.session import ContenderResult
from fusescout.session import Interval

NAMES = {
    "eager": "eager",
    "framework": "framework",
    "inductor": "Inductor",
    "inductor-default": "Inductor",
    "inductor-autotune": "max-autotune",
    "liger": "liger",
    "bare": "bare products",
    OWN: "TileLang",
}
DISTURBED = 1.1
"""Where eager's interval against itself leaves this factor, something else ran on the machine."""
TILE = ("template", "schedule", "BM", "BN", "BK", "stages")


def kernels(bench: KernelBench) -> str:
    """One table for each family, its geometric means under it, and why some cells are empty."""
    families = dict.fromkeys(row.family for row in bench.rows)
    parts = [_family(name, [r for r in bench.rows if r.family == name]) for name in families]
    about = bench.environment
    head = (
        f"{about.device_name}, torch {about.torch}, TileLang {about.tilelang or 'none'},"
        f" {bench.settings.get('dtype', '')}, effort {bench.settings.get('effort', '')}, {about.date[:10]};"
        " µs, medians of interleaved rounds; ratio: the best other contender's time over TileLang's."
    )
    return "\n\n".join([head, *parts, f"{bench.seconds:.0f} s in all."])


def _family(family: str, rows: Sequence[KernelRow]) -> str:
    notes = [note for row in rows if (note := _note(row))]
    rows = [row for row in rows if not row.reason]
    if not rows:
        return "\n".join([f"### {family}", "", *notes])
    named = [c for c in NAMES if any(r.result(c) and c != OWN for r in rows)]
    shown = [c for c in named if any((f := r.result(c)) and f.status != "unsupported" for r in rows)]
    over_bare = ["over bare"] if "bare" in shown else []
    head = ["case", *(NAMES[c] for c in shown), "TileLang", *over_bare, "of bound", "ratio", "error", "compile s",
            "schedule"]  # fmt: skip
    body = [_kernel(row, shown) for row in rows]
    lines = [f"### {family}", "", _table(head, body)]
    if means := _means(rows):
        lines += ["", means]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _kernel(row: KernelRow, shown: Sequence[str]) -> list[str]:
    own = row.result(OWN)
    others = [_time(row.result(c)) for c in shown]
    best = row.best_other
    if best in shown and not _leads(row):
        others[shown.index(best)] = f"**{others[shown.index(best)]}**"
    time = _time(own)
    ratio = row.ratios.get(best)
    return [
        row.name,
        *others,
        f"**{time}**" if _leads(row) else time,
        *([_over_bare(row)] if "bare" in shown else []),
        n.percent(own.bound_share) if own and own.time else n.NOTHING,
        f"{_ratio(ratio)} {NAMES.get(best, best)}" if ratio else n.NOTHING,
        _error(own),
        _compile_s(row),
        f"{schedule(own)} (guess {row.guess} of {row.guesses})" if own and own.time and row.guess else schedule(own),
    ]


def _over_bare(row: KernelRow) -> str:
    """TileLang's time over that of the matrix products alone."""
    ratio = row.ratios.get("bare")
    return f"{1 / ratio.mid:.2f}" if ratio else n.NOTHING


def _leads(row: KernelRow) -> bool:
    ratio = row.ratios.get(row.best_other)
    return ratio is not None and ratio.mid >= 1.0


def _time(found: ContenderResult | None) -> str:
    if found is None or found.status == "unsupported":
        return n.NOTHING
    return n.significant(found.time.mid) if found.time else found.status


def _ratio(ratio: Interval) -> str:
    return f"{ratio.mid:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]"


def _error(found: ContenderResult | None) -> str:
    """Largest error against float64 over eager's own."""
    if found is None or found.error is None:
        return n.NOTHING
    return f"{found.error.contender_max:.1e} (eager {found.error.eager_max:.1e})"


def _compile_s(row: KernelRow) -> str:
    """What the user pays once: TileLang's winner, and Inductor beside it."""
    own, other = row.result(OWN), row.result("inductor-autotune") or row.result("inductor")
    parts = [n.significant(own.compile_s, 2) if own and own.time else n.NOTHING]
    return " / ".join([*parts, f"{other.compile_s:.1f}"] if other and other.compile_s else parts)


def schedule(found: ContenderResult | None) -> str:
    """The chosen variant in a few words: "pingpong 128x128x64 st4", "rows 2 threads 128"."""
    if found is None or not found.time:
        return n.NOTHING
    known = found.variant
    words = [str(known["schedule"])] if "schedule" in known else []
    if {"BM", "BN", "BK"} <= set(known):
        words.append("x".join(str(known[k]) for k in ("BM", "BN", "BK")))
    if "stages" in known:
        words.append(f"st{known['stages']}")
    plain = {"ctas": 1, "cluster": 1, "split": 1}
    words += [f"{k} {v}" for k, v in known.items() if k not in TILE and v not in (None, False) and v != plain.get(k)]
    return " ".join(words)


def _means(rows: Sequence[KernelRow]) -> str:
    parts = []
    names = dict.fromkeys(name for row in rows for name in row.ratios)
    for name in names:
        values = [r.ratios[name].mid for r in rows if name in r.ratios]
        over = 1 / (geometric_mean(values) or 1.0) if name in YARDSTICKS else geometric_mean(values)
        what = "TileLang over bare products" if name in YARDSTICKS else f"{NAMES.get(name, name)} over TileLang"
        parts.append(f"{what} {over:.2f} ({len(values)})")
    best = [r.ratios[r.best_other].mid for r in rows if r.best_other in r.ratios]
    if best:
        parts.append(f"best other over TileLang {geometric_mean(best):.2f} ({len(best)})")
    return f"Geometric means (cases): {', '.join(parts)}." if parts else ""


def _note(row: KernelRow) -> str:
    """Why a cell is empty where something was tried."""
    if row.reason:
        return f"- {row.name}: {row.reason}"
    failed = [c for c in row.contenders if c.reason and (c.status != "unsupported" or c.name == OWN)]
    parts = [f"{NAMES.get(c.name, c.name)} {c.status}: {' '.join(c.reason.split())[:200]}" for c in failed]
    if row.noise and not (row.noise.low > 1 / DISTURBED and row.noise.high < DISTURBED):
        parts.append(f"disturbed: eager over itself is {_ratio(row.noise)}")
    if not row.region:
        parts.append("the finder would cut this chain up")
    return f"- {row.name}: {'; '.join(parts)}" if parts else ""


def models(bench: ModelBench) -> str:
    """The whole-model table: ms with intervals, then what the tool did for it."""
    head = ["model", "eager", "compile", "CUDA graphs", "max-autotune", "FuseScout, rest eager", "FuseScout, best rest",
            "× eager", "× best other"]  # fmt: skip
    facts = ["model", "working memory eager / patched", "analysis / compile s", "coverage", "raced / rejected",
             "accepted sites", "verdict"]  # fmt: skip
    measured = [r for r in bench.rows if not r.reason]
    lines = []
    if bench.environment:
        about = bench.environment
        lines = [f"{about.device_name}, torch {about.torch}, {about.date[:10]}; ms, medians with 95 % intervals.", ""]
    lines += [_table(head, [_model(r) for r in measured]), "", _table(facts, [_model_facts(r) for r in measured])]
    over_eager = geometric_mean(r.speedup.mid for r in measured if r.speedup)
    over_rival = geometric_mean(r.speedup_over_rival.mid for r in measured if r.speedup_over_rival)
    if over_eager:
        rest = f", against the best other way {over_rival:.2f}" if over_rival else ""
        lines += ["", f"Geometric mean against eager {over_eager:.2f}{rest}."]
    lines += ["", *(f"- {_title(r)}: {why}" for r in bench.rows for why in _why_missing(r))]
    return "\n".join([*lines, f"{bench.seconds:.0f} s in all."])


def _why_missing(row: ModelRow) -> list[str]:
    return [row.reason] if row.reason else [f"{w.name}: {w.reason}" for w in row.ways if w.reason and not w.time]


def _model(row: ModelRow) -> list[str]:
    patched = row.patched.removeprefix("patched, rest ")
    best = _way(row, row.patched)
    return [
        _title(row),
        *(_way(row, name) for name in ("eager", "compile", "compile + CUDA graphs", "compile max-autotune")),
        _way(row, "patched, rest eager"),
        f"{best} {patched}" if row.patched else n.NOTHING,
        _ratio(row.speedup) if row.speedup else n.NOTHING,
        f"{_ratio(row.speedup_over_rival)} {row.rival}" if row.speedup_over_rival else n.NOTHING,
    ]


def _model_facts(row: ModelRow) -> list[str]:
    eager, best, compiled = (row.way(name) for name in ("eager", row.patched, "patched, rest inductor"))
    memory = [n.nbytes(w.peak_bytes) if w and w.peak_bytes else n.NOTHING for w in (eager, best)]
    if best and not best.peak_bytes and compiled and compiled.peak_bytes:
        memory[1] = f"{n.nbytes(compiled.peak_bytes)} compiled"  # a CUDA graph's pool is held all the time and shared
    accepted = ", ".join(f"{family} {sites}" for family, sites in row.accepted.items())
    checked = "" if row.verified or not row.patched else " Not verified."
    return [
        _title(row),
        " / ".join(memory),
        f"{row.analysis_s:.0f} / {row.compile_s:.0f}",
        n.percent(row.coverage),
        f"{row.raced} / {row.rejected}",
        accepted or "none",
        re.split(r"[:(]|\. ", row.verdict)[0].strip() + checked,
    ]


def _title(row: ModelRow) -> str:
    return f"{row.model} {row.dtype}"


def _way(row: ModelRow, name: str) -> str:
    found = row.way(name)
    return n.Unit("ms", 1e3).interval(found.time) if found else n.NOTHING


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns padded, so that it is a table to the eye too."""
    cells = [[c.replace("|", "/") for c in row] for row in (head, *body)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
