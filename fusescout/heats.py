"""The heats of a race, run in child processes: variants against eager, then the contenders' bests against each other.

Whatever dies, hangs or fails in a child becomes a status with a reason here, and the next request gets a new child.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from fusescout.errors import OutOfTime
from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout
from fusescout.session import ErrorStats
from fusescout.workerpool import STARTUP_S
from fusescout.workerpool import Spare
from fusescout.workerpool import Worker
from fusescout.workerpool import compile_many

FAILURE = (WorkerRefused, WorkerTimeout, WorkerDied)
VARIANTS = {"quick": 8, "default": 16, "max": 1 << 30}
COMPILE_S = 600.0
"""Inductor's max-autotune takes minutes; the caller's deadline is for a single kernel."""
MAX_DEATHS = 8
PARALLEL_FROM = 8
"""Variants from which extra compiling children pay for their start."""
FULL_CHECKS = 3
"""Variants of one contender that get the full check, fastest first, until one passes."""
_WORST_FIRST = ("wrong", "crashed", "timeout", "failed", "unsupported")


@dataclass(slots=True)
class Entry:
    """One variant on its way through the race. `relative` is its time over eager's in the heat."""

    contender: str
    variant: dict[str, Any]
    handle: int
    status: str = "ok"
    reason: str = ""
    compile_s: float | None = None
    source: str = ""
    relative: float = float("inf")
    stats: ErrorStats | None = None
    tried: int = 1

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason


class Bench:
    """A worker that is replaced when it's gone; what was built in it is built again where it's needed.

    Args:
        opening: arguments of the worker's "open" request.
        deadline_s: for a single kernel to be compiled, and to be tried.
        spare: gives the first worker and takes the last one back.
        limit_s: for everything together; what is not answered by then raises `OutOfTime`.
    """

    def __init__(
        self,
        opening: Mapping[str, Any],
        deadline_s: float,
        spare: Spare | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.opening, self.deadline_s = opening, deadline_s
        self._until = math.inf if limit_s is None else time.monotonic() + limit_s
        self._spare = spare or Spare()
        self._keep = spare is not None
        self.check_s = 0.0
        self._worker: Worker | None = None
        self._built: set[int] = set()
        self._handles = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._spare.give(self._worker)
        if not self._keep:
            self._spare.close()

    def call(self, request: str, deadline_s: float, **arguments: Any) -> Any:
        if self._worker is None or not self._worker.alive:
            self._built = set()
            self._worker = self._spare.take()
            self._ask(self._worker, "open", STARTUP_S, **self.opening)
        return self._ask(self._worker, request, deadline_s, **arguments)

    def _ask(self, worker: Worker, request: str, deadline_s: float, **arguments: Any) -> Any:
        left = self._until - time.monotonic()
        if left <= 0:
            raise OutOfTime
        try:
            return worker.call(request, min(deadline_s, left), **arguments)
        except WorkerTimeout as error:
            if left < deadline_s:
                raise OutOfTime from error
            raise

    def entry(self, contender: str, variant: Mapping[str, Any]) -> Entry:
        self._handles += 1
        return Entry(contender, dict(variant), self._handles)

    def build(self, entry: Entry) -> None:
        """Have the entry ready in the current worker."""
        if self._worker is not None and self._worker.alive and entry.handle in self._built:
            return
        limit = COMPILE_S if entry.contender.startswith("inductor") else self.deadline_s + 30
        found = self.call("build", limit, contender=entry.contender, variant=entry.variant, handle=entry.handle)
        self._built.add(entry.handle)
        entry.source = found["source"]
        if entry.compile_s is None:
            entry.compile_s = found["compile_s"]

    def check(self, entry: Entry, level: str) -> bool:
        """Build and check; what goes wrong is noted in the entry."""
        start = time.perf_counter()
        try:
            self.build(entry)
            # The check runs eager and the truth too, and how long those take is known from eager's own check.
            found = self.call("check", 2 * self.deadline_s + 5 * self.check_s, handle=entry.handle, level=level)
        except FAILURE as error:
            entry.fail(error.kind, str(error))
            return False
        if entry.contender == "eager":
            self.check_s = time.perf_counter() - start
        stats = ErrorStats.model_validate(found["stats"])
        if found["reason"] or entry.stats is None or level == "full":
            entry.stats = stats
        if found["reason"]:
            entry.fail(found["status"], found["reason"])
        return not found["reason"]

    def time(self, entries: Sequence[Entry], case: str, rounds: int, budget_s: float) -> dict[str, Any]:
        """Interleaved samples by position; entries that are far too slow are marked and have none."""
        for entry in entries:
            self.build(entry)
        found: dict[str, Any] = self.call(
            "time",
            self.deadline_s + 5 * budget_s,
            handles=[e.handle for e in entries],
            case=case,
            rounds=rounds,
            budget_s=budget_s,
        )
        for entry in entries:
            if why := found["dropped"].get(str(entry.handle)):
                entry.fail("timeout", f"It was dropped at its first sample: {why}.")
        return found

    def drop(self, entries: Sequence[Entry]) -> None:
        if self._worker is not None and self._worker.alive:
            self.call("drop", self.deadline_s, handles=[e.handle for e in entries])


def heat(
    bench: Bench, eager: Entry, name: str, effort: str, jobs: int, case: str, tell: Callable[[str], None]
) -> Entry:
    """The best verified variant of one contender, or an entry that says why there is none."""
    try:
        variants = bench.call("variants", bench.deadline_s, contender=name, effort=effort)
    except FAILURE as error:
        entry = bench.entry(name, {})
        entry.fail(error.kind, str(error))
        entry.tried = 0
        return entry
    entries = [bench.entry(name, v) for v in variants[: VARIANTS[effort]]]
    if len(entries) >= PARALLEL_FROM and jobs > 1 and name == "tilelang":
        tell(f"compiling {len(entries)} variants")
        _compile(bench, entries, jobs)
    deaths = 0
    for k, entry in enumerate(entries):
        tell(f"checking variant {k + 1} of {len(entries)}")
        if entry.status == "ok" and not bench.check(entry, "quick"):
            deaths += entry.status in ("crashed", "timeout")
        if deaths >= MAX_DEATHS:
            for rest in entries[k + 1 :]:
                rest.fail("failed", f"It was not tried: {deaths} other variants had crashed or hung.")
            break
    fit = [e for e in entries if e.status == "ok"]
    if len(fit) > 1:
        tell(f"timing {len(fit)} variants")
        _times(bench, eager, fit, case)
        fit = sorted((e for e in fit if e.status == "ok"), key=lambda e: e.relative)
    tell("full check of the best variant")
    best = next((e for e in fit[:FULL_CHECKS] if bench.check(e, "full")), None)
    if best is None:
        best = min(
            entries, key=lambda e: _WORST_FIRST.index(e.status) if e.status in _WORST_FIRST else len(_WORST_FIRST)
        )
    best.tried = len(entries)
    with suppress(*FAILURE):  # a dead worker has dropped everything
        bench.drop([e for e in entries if e is not best])
    return best


def final(
    bench: Bench, entries: list[Entry], case: str, rounds: int, budget_s: float
) -> tuple[dict[str, list[float]], str]:
    """Interleaved samples of all entries that are fit, and how they were taken. The first two entries are eager, twice.

    If the worker dies or hangs, each entry is timed beside eager alone to find the one to blame.
    """
    for attempt in range(2):
        fit = [e for e in entries if e.status == "ok"]
        try:
            found = bench.time(fit, case, rounds, budget_s)
        except FAILURE as error:
            if attempt or len(fit) <= 2:
                for entry in fit[2:] or fit:
                    entry.fail(error.kind, str(error))
                continue
            for entry in fit[2:]:
                _time_alone(bench, fit[0], entry, case)
            continue
        names = [e.contender for e in fit]
        names[1] = "eager again"
        return {n: s for n, s in zip(names, found["samples"], strict=True) if s}, found["policy"]
    return {}, ""


def _compile(bench: Bench, entries: list[Entry], jobs: int) -> None:
    results = compile_many(bench.opening, [(e.contender, e.variant) for e in entries], jobs, bench.deadline_s + 30)
    for entry, result in zip(entries, results, strict=True):
        if "compile_s" in result:
            entry.compile_s = result["compile_s"]
        else:
            entry.fail(result["kind"], result["reason"])


def _times(bench: Bench, eager: Entry, fit: list[Entry], case: str) -> None:
    """Time variants against eager in one go, or one by one if that kills the worker."""
    try:
        found = bench.time([eager, *fit], case, rounds=8, budget_s=0.5 + 0.2 * len(fit))
    except FAILURE:
        for entry in fit:
            _time_alone(bench, eager, entry, case)
        return
    _, *samples = found["samples"]
    for entry, times in zip(fit, samples, strict=True):
        if times:
            entry.relative = median(times) / median(found["samples"][0])


def _time_alone(bench: Bench, eager: Entry, entry: Entry, case: str) -> None:
    try:
        found = bench.time([eager, entry], case, rounds=8, budget_s=0.7)
    except FAILURE as error:
        entry.fail(error.kind, str(error))
        return
    if found["samples"][1]:
        entry.relative = median(found["samples"][1]) / median(found["samples"][0])
