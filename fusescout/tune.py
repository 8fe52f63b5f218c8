"""The race of one candidate: every contender under the same rules, and what came of it.

For each contender: its variants by effort, a quick check and a quick time of each, then the full check of the best.
Then the bests of all contenders are timed again, interleaved and on inputs no choice was made on, so that picking the
luckiest of many noisy times wins nothing, and checked once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from statistics import median
from typing import Any

from fusescout.cache import Cache
from fusescout.cache import Key
from fusescout.cache import sources_digest
from fusescout.candidates import lower_bound
from fusescout.config import Config
from fusescout.contenders import NAMES
from fusescout.device import Device
from fusescout.environment import cxx_version
from fusescout.environment import driver_version
from fusescout.environment import nvcc_version
from fusescout.environment import package_version
from fusescout.errors import WorkerDied
from fusescout.heats import FAILURE
from fusescout.heats import Bench
from fusescout.heats import Entry
from fusescout.heats import final
from fusescout.heats import heat
from fusescout.inputs import FRESH
from fusescout.inputs import TIMING
from fusescout.ir import Subgraph
from fusescout.measure import impossible
from fusescout.session import ContenderResult
from fusescout.session import Interval
from fusescout.stats import median_interval
from fusescout.stats import ratio
from fusescout.workerpool import Spare

ROUNDS = {"quick": (15, 1.0), "default": (30, 3.0), "max": (60, 8.0)}
"""Rounds and seconds of the final measurement."""
OnEvent = Callable[[str, int, int, str], None]
_HERE = Path(__file__).parent
YARDSTICKS = ("bare",)
"""Timed with the others, checked by nobody and never a winner: they compute only a part of the chain."""
_SOURCES = (
    "admissible", "heats", "inputs", "measure", "memory", "numerics", "reference", "tolerance", "tune", "verify",
    "worker",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RaceResult:
    """What a race found.

    Attributes:
        contenders: one result for each contender, eager first.
        samples: µs a call per round, by contender name; round k of all belongs together.
        noise: eager against itself in the same rounds, as a ratio that should hold 1.
        policy: how the times were taken.
        sources: generated source by contender name, where there is some.
        scripts: stand-alone repro script by contender name.
        cached: it was stored by an earlier run; its winner was built and verified again.
    """

    contenders: tuple[ContenderResult, ...]
    samples: dict[str, list[float]] = field(default_factory=dict)
    noise: Interval | None = None
    policy: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    cached: bool = False

    @property
    def fastest(self) -> ContenderResult | None:
        """The contender with the smallest median."""
        fit = [c for c in self.contenders if c.status == "ok" and self.samples.get(c.name)]
        return min(fit, key=lambda c: median(self.samples[c.name]), default=None)

    def to_json(self) -> dict[str, Any]:
        raw = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "cached"}
        return raw | {
            "contenders": [c.model_dump() for c in self.contenders],
            "noise": self.noise.model_dump() if self.noise else None,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RaceResult:
        """Read what `to_json` wrote, marked as cached.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        contenders = tuple(ContenderResult.model_validate({**c, "cached": True}) for c in raw["contenders"])
        noise = Interval.model_validate(raw["noise"]) if raw["noise"] else None
        return cls(**{**raw, "contenders": contenders, "noise": noise, "cached": True})


def race(
    subgraph: Subgraph,
    inputs_path: Path | None,
    device: Device,
    config: Config,
    *,
    names: Sequence[str] = NAMES,
    gradients: bool = False,
    spare: Spare | None = None,
    limit_s: float | None = None,
    on_event: OnEvent = lambda stage, done, total, text: None,
) -> RaceResult:
    """Race contenders on one sub-graph.

    Args:
        subgraph: the candidate.
        inputs_path: its captured inputs, as `inputs.save` wrote them; None for random ones only.
        device: where it runs.
        config: effort, deadline_s, jobs, templates, seed, cache_dir and use_cache count here.
        names: contenders to race; eager is always one.
        gradients: hold the gradients to the rule too, and time forward plus backward.
        spare: lends its idle worker, and gets the last one back for the next race.
        limit_s: seconds that the whole race may take.
        on_event: told of progress: ("race", done, total, text).

    Raises:
        CacheUnwritable: results could not be stored; raised before anything is built.
        OutOfTime: it was not done within `limit_s`.
    """
    from fusescout import numerics
    from fusescout.verify import randomness

    names = ("eager", *(n for n in names if n != "eager"))
    if reason := randomness(subgraph):
        return RaceResult(tuple(ContenderResult(name=n, status="unsupported", reason=reason) for n in names))
    settings = numerics.current()
    opening = opened(subgraph, inputs_path, device, config, gradients)
    cache = Cache(config.cache_dir)
    key = race_key(subgraph, device, config, settings, names, gradients)
    if config.use_cache:
        cache.probe()
    with Bench(opening, config.deadline_s, spare, limit_s) as bench:
        if config.use_cache and (stored := _reuse(cache, key, bench)):
            return stored
        result = _run(bench, subgraph, device, config, names, on_event)
    if config.use_cache and result.samples:
        cache.put(key, result.to_json())
    return result


def opened(
    subgraph: Subgraph, inputs_path: Path | None, device: Device, config: Config, gradients: bool = False
) -> dict[str, Any]:
    """Arguments of a worker's "open" request."""
    from fusescout import numerics

    return {
        "subgraph": subgraph.to_json(),
        "device": dataclasses.asdict(device),
        "inputs": str(inputs_path) if inputs_path else None,
        "seed": config.seed,
        "templates": [str(t) for t in config.templates],
        "cache_dir": str(config.cache_dir),
        "numerics": numerics.current(),
        "gradients": gradients,
    }


def _run(
    bench: Bench, subgraph: Subgraph, device: Device, config: Config, names: Sequence[str], on_event: OnEvent
) -> RaceResult:
    total = len(names) + 1
    eager, again = bench.entry("eager", {}), bench.entry("eager", {})
    on_event("race", 0, total, "eager: full check")
    if not _eager_stands(bench, eager):
        rest = [
            _result(bench.entry(n, {}), status="failed", reason="Eager has no verified result to race.")
            for n in names[1:]
        ]
        return RaceResult((_result(eager), *rest))
    entries = [eager, again]
    for k, name in enumerate(names[1:], 1):
        if name in YARDSTICKS:
            entries.append(bench.entry(name, {}))
            continue
        tell = lambda text, k=k, name=name: on_event("race", k, total, f"{name}: {text}")  # noqa: E731
        entries.append(heat(bench, eager, name, config.effort, config.jobs, TIMING, tell))
    on_event("race", total - 1, total, "final measurement of the best variants")
    samples, policy = final(bench, entries, FRESH, *ROUNDS[config.effort])
    for entry in entries[2:]:
        if entry.status == "ok" and samples.get(entry.contender) and entry.contender not in YARDSTICKS:
            bench.check(entry, "quick")  # timing may have met what the first check did not
    _refuse_impossible(entries, samples, subgraph, device)
    bound_us = lower_bound(subgraph, device)[0]
    results, scripts = [], {}
    for entry in (eager, *entries[2:]):
        facts = _facts(bench, entry)
        scripts[entry.contender] = facts.pop("repro", "")
        times = samples.get(entry.contender, []) if entry.status == "ok" else []
        if times:
            facts["time"] = median_interval(times)
            facts["bound_share"] = bound_us / median(times)
        if entry.contender in YARDSTICKS:
            facts["status"] = "yardstick" if times else entry.status
        results.append(_result(entry, **facts))
    noise = ratio(samples["eager"], samples["eager again"]) if samples.get("eager again") else None
    kept = {r.name: samples[r.name] for r in results if r.status in ("ok", "yardstick") and samples.get(r.name)}
    sources = {e.contender: e.source for e in entries[2:] if e.source and e.status == "ok"}
    on_event("race", total, total, "done")
    return RaceResult(tuple(results), kept, noise, policy, sources, {n: s for n, s in scripts.items() if s})


def _eager_stands(bench: Bench, eager: Entry) -> bool:
    """The full check of eager. What kills its worker is hardly eager itself, so it gets one more, and says so."""
    if bench.check(eager, "full"):
        return True
    if eager.status != WorkerDied.kind:
        return False
    lost, eager.status = eager.reason, "ok"
    if passed := bench.check(eager, "full"):
        eager.reason = f"A second worker checked it: {lost}"
    return passed


def _refuse_impossible(
    entries: Sequence[Entry], samples: Mapping[str, list[float]], subgraph: Subgraph, device: Device
) -> None:
    """Refuse times below the physical bound. Where eager's is too, the device's measured ceilings are off instead."""
    if not samples or impossible(median(samples["eager"]), subgraph, device):
        return
    for entry in entries[2:]:
        fit = entry.status == "ok" and entry.contender not in YARDSTICKS
        times = samples.get(entry.contender) if fit else None
        if times and (why := impossible(median(times), subgraph, device)):
            entry.fail("failed", f"Suspiciously fast: {why}.")


def _facts(bench: Bench, entry: Entry) -> dict[str, Any]:
    """Upkeep and repro of a contender that could at least be built."""
    if entry.status == "unsupported" or entry.tried == 0:
        return {}
    try:
        found: dict[str, Any] = bench.call(
            "describe", bench.deadline_s, contender=entry.contender, variant=entry.variant
        )
    except FAILURE:
        return {}  # it can't be described, which takes nothing from what was measured
    return found


def _result(entry: Entry, **facts: Any) -> ContenderResult:
    return ContenderResult(
        **{
            "name": entry.contender,
            "variant": entry.variant,
            "status": entry.status,
            "reason": entry.reason,
            "compile_s": entry.compile_s or 0.0,
            "tried": entry.tried,
            "error": entry.stats,
            **facts,
        }
    )


def _reuse(cache: Cache, key: Key, bench: Bench) -> RaceResult | None:
    """A stored result whose winner builds and passes the quick check here and now; else it is forgotten."""
    raw = cache.get(key)
    if raw is None:
        return None
    stored = _read(raw) or RaceResult(())
    winner = stored.fastest
    if winner is not None and winner.name == "eager":
        return stored  # nothing would be replaced, so there is nothing to verify
    if winner is not None and bench.check(bench.entry(winner.name, winner.variant), "quick"):
        return stored
    cache.drop(key)
    return None


def stored_race(subgraph: Subgraph, device: Device, config: Config) -> RaceResult | None:
    """What an earlier run found, not verified anew: good for chains that stay with the framework."""
    raw = Cache(config.cache_dir).get(_current_key(subgraph, device, config)) if config.use_cache else None
    return _read(raw) if raw is not None else None


def forget_race(subgraph: Subgraph, device: Device, config: Config) -> None:
    """Drop what an earlier run found, so that the next race is run."""
    if config.use_cache:
        Cache(config.cache_dir).drop(_current_key(subgraph, device, config))


def _current_key(subgraph: Subgraph, device: Device, config: Config) -> Key:
    from fusescout import numerics

    return race_key(subgraph, device, config, numerics.current(), NAMES, gradients=False)


def _read(raw: Mapping[str, Any]) -> RaceResult | None:
    """A stored result, or None for a damaged one."""
    try:
        return RaceResult.from_json(raw)
    except (ValueError, KeyError, TypeError):
        return None


def race_key(
    subgraph: Subgraph,
    device: Device,
    config: Config,
    settings: Mapping[str, Any],
    names: Sequence[str],
    gradients: bool,
) -> Key:
    """All that decides a race."""
    from fusescout.registry import load

    # Templates import from their neighbours, so an edit to any file beside one counts.
    origins = [getattr(t, "__file__", None) for t in load(config.templates).templates.values()]
    files = [f for folder in {Path(o).parent for o in origins if o} for f in folder.glob("*.py")]
    files += [*(_HERE / "contenders").rglob("*.py"), *(_HERE / f"{name}.py" for name in _SOURCES)]
    return Key.of(
        subgraph=subgraph.key,
        device=[device.kind, device.name, device.arch, device.cores],
        sources=sources_digest(files),
        tools=_tools(),
        effort=config.effort,
        seed=config.seed,
        settings=dict(settings),
        contenders=list(names),
        gradients=gradients,
    )


def _tools() -> dict[str, str | None]:
    """Versions of what generates and runs code."""
    found = {package: package_version(package) for package in ("torch", "triton", "tilelang")}
    return found | {"g++": cxx_version(), "nvcc": nvcc_version(), "driver": driver_version()}
