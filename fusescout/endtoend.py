"""The end-to-end verdict: the whole model, unpatched against patched and against its rivals, interleaved, unprofiled.

Rivals are eager, `torch.compile` and, on CUDA, `torch.compile` with CUDA graphs. The patched model is tried with the
rest run each way the settings allow; every way is checked against the float64 model before its time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fusescout import rivals
from fusescout.config import Config
from fusescout.errors import CompositionUnavailable
from fusescout.modelcheck import ModelJudge
from fusescout.nest import tensors
from fusescout.onetrace import OneTrace
from fusescout.patching import Backend
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.rivals import Rivals
from fusescout.session import EndToEnd
from fusescout.session import Interval
from fusescout.session import Rival
from fusescout.stats import median_interval
from fusescout.stats import ratio
from fusescout.ways import Way
from fusescout.ways import compiling
from fusescout.ways import failure
from fusescout.ways import most_bytes
from fusescout.ways import seconds
from fusescout.ways import stepper
from fusescout.ways import untouched
from fusescout.ways import warm
from fusescout.workload import Workload

SAMPLE_S = 0.02
"""One sample lasts at least this long: clock and launch jitter stay below 1 % of it."""
ENOUGH_ROUNDS, BUDGET_S = 6, 5.5
"""After so many rounds and seconds the measurement ends: a slow model's rounds scatter less than a fast one's."""
NOTHING_REPLACED = "No planned chain was replaced"
DISTURBED = 0.1
"""Eager's time over its own, measured again in the same rounds, from which the verdict says so."""
COPIED_BYTES_PER_S, COPIED_SHARE = 1e12, 0.01
"""A CUDA graph copies the inputs of each call. Up to this share of a step, at this rate, that decides nothing."""
REPLAYED = "Not built: with CUDA graphs the same code is replayed without its launches"
OnEvent = Callable[[str, int, int, str], None]


def compare(
    workload: Workload,
    plan: Plan,
    config: Config,
    on_event: OnEvent,
    compiled: Plan | None = None,
    budget_s: float = BUDGET_S,
    built: Rivals | None = None,
) -> tuple[EndToEnd, Plan]:
    """Measure a plan on the whole model, and drop what fails there.

    Args:
        workload: model and inputs.
        plan: what to replace where the rest runs as it is.
        config: settings; `compose` says which ways to run the rest are tried.
        on_event: hears of progress.
        compiled: what to replace where Inductor runs the rest; the same plan by default.
        budget_s: seconds from which no further round begins, once there are a few.
        built: the framework's ways, if they are built already; the caller is inside of the `compiling` they were
            built in.

    Returns:
        The verdict, and the plan that it holds for: entries that break the model are dropped by bisection, and the
        composition is the fastest measured one. If nothing beats eager the plan comes back empty.
    """
    with compiling(workload):
        bench = _Bench(workload, config, ModelJudge(workload), on_event)
        bench.add_framework(built or rivals.build(workload, config, on_event))
        for composition in compositions(config, workload):
            bench.add_patched(plan if composition == "eager" or compiled is None else compiled, composition)
        with untouched(workload):
            samples = measure(bench.ways, config.rounds, workload.device, on_event, budget_s)
        return _conclude(plan, bench.ways, bench.failed, samples, bench.judge, bench.dropped, config)


class _Bench:
    """Collects the ways that run and compute the right thing, and why others don't."""

    def __init__(self, workload: Workload, config: Config, judge: ModelJudge, on_event: OnEvent) -> None:
        self.workload, self.config, self.judge, self.on_event = workload, config, judge, on_event
        self.trace, self.traced_s = OneTrace(workload.model), 0.0
        step = stepper(workload)
        with untouched(workload):
            peak_bytes = most_bytes(step, workload.device)
        eager = Way("eager", workload.model, step, 0.0, peak_bytes=peak_bytes)
        self.ways = [eager, replace(eager, name="eager again")]
        self.failed: list[Rival] = []
        self.dropped: list[str] = []

    def add_framework(self, built: Rivals) -> None:
        """The framework's own ways; whether each is as exact as eager is noted."""
        self.failed += built.failed
        for way in built.ways:
            try:
                off = self.judge.hear(way.name, way.model)
            except Exception as error:  # isolation boundary: a rival that can't run is a fact to report
                self.failed.append(Rival(name=way.name, reason=failure(way.name, self.workload, error)))
                continue
            self.ways.append(replace(way, note=f"By the rule for patched models it is off: {off}" if off else ""))

    def add_patched(self, plan: Plan, composition: Composition) -> None:
        """The patched model; entries that make it wrong are dropped first."""
        plan = plan.composed(composition).without(set(self.dropped))
        name = f"patched, rest {composition}"
        if composition == "inductor" and not plan.is_empty and any(map(self._replays, self.ways)):
            self.failed.append(Rival(name=name, reason=REPLAYED))
            return
        while not plan.is_empty:
            self.on_event("end to end", 0, 0, f"building {name}")
            way = self._try(plan)
            if isinstance(way, Way) and way.backend is not None and not way.backend.counters.changed:
                self.failed.append(Rival(name=name, reason=f"{NOTHING_REPLACED}: {_why(way.backend)}."))
                return
            if isinstance(way, Way):
                self.ways.append(way)
                return
            culprit = self._culprit(plan) if plan.entries else None
            if culprit is None:
                self.failed.append(Rival(name=name, reason=way))
                return
            self.dropped.append(culprit)
            plan = plan.without({culprit})

    def _replays(self, way: Way) -> bool:
        """Whether a way's CUDA graphs replay all that Inductor made, and copy too little to lose by it."""
        if way.backend is None or way.composition != "cudagraph" or way.backend.counters.fallbacks:
            return False
        nbytes = sum(t.nbytes for t in tensors((self.workload.args, self.workload.kwargs)))
        with untouched(self.workload):
            step_s = seconds(way.step, self.workload.device, 3)
        return nbytes / COPIED_BYTES_PER_S <= COPIED_SHARE * step_s

    def _try(self, plan: Plan) -> Way | str:
        """The patched model ready to be timed, or what is wrong with it."""
        backend, skipped = Backend(plan, cache_dir=self.config.cache_dir), _graphs_skipped()
        name, model = f"patched, rest {plan.composition}", self.workload.model
        try:
            if not self.traced_s:
                self.traced_s = self._seconds_to_trace()
            way = warm(name, self.workload, self.trace.carried_out(model, backend))
            if plan.composition == "cudagraph" and _graphs_skipped() > skipped:
                return "Inductor refuses to capture it: it writes its inputs, or some of it runs on the CPU"
            verdict = self.judge.check(way.model)
        except Exception as error:  # isolation boundary: the framework's code stays where the patch can't run
            return failure(name, self.workload, error)
        if isinstance(verdict, str):
            return verdict
        compile_s = way.compile_s + self.traced_s  # what the way alone would have taken
        return replace(way, compile_s=compile_s, backend=backend, composition=plan.composition)

    def _seconds_to_trace(self) -> float:
        """Trace the model for all patched ways."""
        traced = stepper(replace(self.workload, model=self.trace.carried_out(self.workload.model, None)))
        with untouched(self.workload):
            return seconds(traced, self.workload.device)

    def _culprit(self, plan: Plan) -> str | None:
        """The entry that alone makes the model wrong with an eager rest, by bisection; None if it is not an entry."""
        suspects = [e.id for e in plan.entries]
        plan = plan.composed("eager")
        if not (bare := plan.without(set(suspects))).is_empty and not isinstance(self._try(bare), Way):
            return None
        self.on_event("end to end", 0, 0, "the patched model is wrong: looking for the guilty site")
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            alone = self._try(plan.without({e.id for e in plan.entries} - set(half)))
            suspects = suspects[len(suspects) // 2 :] if isinstance(alone, Way) else half
        alone = self._try(plan.without({e.id for e in plan.entries} - set(suspects)))
        return None if isinstance(alone, Way) else suspects[0]


def _why(backend: Backend) -> str:
    return "; ".join(dict.fromkeys(backend.counters.fallbacks.values())) or "the model made no graph"


def compositions(config: Config, workload: Workload) -> tuple[Composition, ...]:
    """The ways to run the rest that the settings allow here, in the order they are tried.

    Raises:
        CompositionUnavailable: CUDA graphs are asked for and the model is not on a GPU.
    """
    if config.compose == "cudagraph" and not workload.device.startswith("cuda"):
        raise CompositionUnavailable("cudagraph", f"CUDA graphs need a GPU, and the model is on {workload.device}")
    if config.compose != "auto":
        return (config.compose,)
    graphs = workload.device.startswith("cuda") and workload.mode == "inference"
    return ("eager", "cudagraph", "inductor") if graphs else ("eager", "inductor")


def _graphs_skipped() -> int:
    """How many graphs Inductor has declined to capture in a CUDA graph so far; it then runs them without one."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def measure(
    ways: list[Way], rounds: int, device: str, on_event: OnEvent, budget_s: float = BUDGET_S
) -> dict[str, list[float]]:
    """Interleaved samples of every way, in µs a call: each round runs all of them, every second round backwards."""
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= ENOUGH_ROUNDS and time.perf_counter() - begin > budget_s:
            break
        on_event("end to end", number, rounds, "measuring")
        for way in ways if number % 2 == 0 else reversed(ways):
            first_s = seconds(way.step, device)
            count = repeats.setdefault(way.name, max(1, round(SAMPLE_S / max(first_s, 1e-6))))
            # The way before it left other data in the caches: in a call of 20 ms that is not noticed, so it counts.
            sample_s = first_s if count == 1 else seconds(way.step, device, count)
            samples[way.name].append(sample_s * 1e6)
    return samples


def _conclude(
    plan: Plan,
    ways: list[Way],
    failed: list[Rival],
    samples: dict[str, list[float]],
    judge: ModelJudge,
    dropped: list[str],
    config: Config,
) -> tuple[EndToEnd, Plan]:
    eager = samples["eager"]
    noise = ratio(eager, samples["eager again"])
    patched = [w for w in ways if w.backend is not None]
    rivals = [
        Rival(
            name=w.name,
            time=median_interval(samples[w.name]),
            compile_s=w.compile_s,
            reason=w.note,
            peak_bytes=w.peak_bytes,
        )
        for w in ways
        if w.name not in ("eager", "eager again")
    ] + failed
    baseline = median_interval(eager)
    if not patched:
        tried = [r.reason for r in failed if r.name.startswith("patched")]
        why = (
            "No chain was accepted"
            if plan.is_empty and not dropped
            else "No chain of the plan is in this model"
            if tried and all(reason.startswith(NOTHING_REPLACED) for reason in tried)
            else "No patched form of the model passed its check"
        )
        verdict = f"Keep the framework code. {why}; eager takes {_ms(baseline)}."
        unpatched = EndToEnd(
            baseline=baseline, baseline_peak_bytes=ways[0].peak_bytes, noise=noise, rivals=rivals, dropped=dropped,
            verdict=verdict,
        )  # fmt: skip
        return unpatched, plan.emptied()
    best = min(patched, key=lambda w: median_interval(samples[w.name]).mid)
    speedup = ratio(eager, samples[best.name])
    others = [w for w in ways if w.backend is None and w.name != "eager again"]
    rival = min(others, key=lambda w: median_interval(samples[w.name]).mid)
    over_rival = ratio(samples[rival.name], samples[best.name])
    checked = judge.check(best.model)
    error = None if isinstance(checked, str) else checked
    assert best.backend is not None
    assert best.composition is not None
    gains = speedup.low > 1.0 and speedup.mid >= config.min_gain
    accepted = error is not None and gains and over_rival.high >= 1.0
    counters = best.backend.counters
    exact = "" if error is None or error.against == "eager" else f", no more exact than {error.against}"
    sites = f"{counters.described}, the rest run by {best.composition}{exact}"
    if isinstance(checked, str):
        verdict = f"Keep the framework code: the patched model is wrong in the end ({checked})."
    elif not gains:
        verdict = (
            f"Keep the framework code: patched ({sites}), the model is {_times(speedup)} as fast as eager,"
            f" and {_asked(speedup, config.min_gain)}."
        )
    elif rival.name == "eager":
        verdict = f"Patch it: {sites}: {_times(speedup)} as fast as eager, which is the best other way."
    elif over_rival.low > 1.0:
        verdict = (
            f"Patch it: {sites}: {_times(speedup)} as fast as eager and {_times(over_rival)} as fast as {rival.name},"
            " the best other way."
        )
    elif accepted:
        verdict = (
            f"Patched ({sites}), the model is {_times(speedup)} as fast as eager, but that is no difference to"
            f" {rival.name} ({_times(over_rival)}): the framework's way is the simpler one."
        )
    else:
        verdict = (
            f"Keep the framework code: {rival.name} is faster than the patched model"
            f" ({_times(over_rival)}), which is {_times(speedup)} as fast as eager."
        )
    if max(abs(noise.low - 1.0), abs(noise.high - 1.0)) > DISTURBED:
        verdict += f" The machine was disturbed: eager against itself gave {_times(noise)}."
    result = EndToEnd(
        baseline=baseline,
        patched=median_interval(samples[best.name]),
        speedup=speedup,
        noise=noise,
        verified=error is not None,
        error=error,
        composition=best.composition,
        memory_format=best.backend.plan.memory_format if accepted else "preserved",
        sites_patched=best.backend.counters.sites if accepted else 0,
        dropped=dropped,
        rivals=rivals,
        baseline_peak_bytes=ways[0].peak_bytes,
        rival=rival.name,
        speedup_over_rival=over_rival,
        verdict=verdict,
    )
    final = best.backend.plan if accepted else plan.emptied()
    return result, final


def _asked(speedup: Interval, min_gain: float) -> str:
    uncertain = speedup.mid >= min_gain and speedup.mid > 1.0
    return "that is not certain to be faster" if uncertain else f"{max(min_gain, 1.0):.2f} is asked for"


def _times(speedup: Interval) -> str:
    return f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"


def _ms(interval: Interval) -> str:
    return f"{interval.mid / 1e3:.3g} ms [{interval.low / 1e3:.3g}, {interval.high / 1e3:.3g}]"
