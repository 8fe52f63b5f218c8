"""The end-to-end verdict: the whole model, unpatched against patched and against its rivals, interleaved, unprofiled.

Rivals are eager, `torch.compile` and, on CUDA, `torch.compile` with CUDA graphs. The patched model is tried with the
rest run each way the settings allow; every way is checked against the float64 model before its time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from fusescout.capture.dynamo import forgotten
from fusescout.capture.protect import protected
from fusescout.config import Config
from fusescout.errors import NO_SPACE
from fusescout.errors import CompositionUnavailable
from fusescout.errors import DiskFull
from fusescout.errors import in_a_line
from fusescout.modelcheck import ModelJudge
from fusescout.patching import Backend
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.rng import leave_capture
from fusescout.session import EndToEnd
from fusescout.session import Interval
from fusescout.session import Rival
from fusescout.stats import median_interval
from fusescout.stats import ratio
from fusescout.workload import Workload

SAMPLE_S = 0.02
"""One sample lasts at least this long: clock and launch jitter stay below 1 % of it."""
ENOUGH_ROUNDS, BUDGET_S = 6, 5.5
"""After so many rounds and seconds the measurement ends: a slow model's rounds scatter less than a fast one's."""
NOTHING_REPLACED = "No planned chain was replaced"
DISTURBED = 0.1
"""Eager's time over its own, measured again in the same rounds, from which the verdict says so."""
OnEvent = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the whole model, built and warmed up."""

    name: str
    model: Callable[..., Any]
    step: Callable[[], Any]
    compile_s: float
    backend: Backend | None = None
    composition: Composition | None = None
    peak_bytes: int | None = None
    note: str = ""


def compare(
    workload: Workload,
    plan: Plan,
    config: Config,
    on_event: OnEvent,
    compiled: Plan | None = None,
    budget_s: float = BUDGET_S,
) -> tuple[EndToEnd, Plan]:
    """Measure a plan on the whole model, and drop what fails there.

    Args:
        workload: model and inputs.
        plan: what to replace where the rest runs as it is.
        config: settings; `compose` says which ways to run the rest are tried.
        on_event: hears of progress.
        compiled: what to replace where Inductor runs the rest; the same plan by default.
        budget_s: seconds from which no further round begins, once there are a few.

    Returns:
        The verdict, and the plan that it holds for: entries that break the model are dropped by bisection, and the
        composition is the fastest measured one. If nothing beats eager the plan comes back empty.
    """
    limits: Any = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}
    with torch._dynamo.config.patch(**limits), forgotten(), _untouched(workload):
        judge = ModelJudge(workload)
        bench = _Bench(workload, config, judge, on_event)
        bench.add_framework()
        for composition in compositions(config, workload):
            bench.add_patched(plan if composition == "eager" or compiled is None else compiled, composition)
        with _untouched(workload):
            samples = measure(bench.ways, config.rounds, workload.device, on_event, budget_s)
        return _conclude(plan, bench.ways, bench.failed, samples, judge, bench.dropped, config)


class _Bench:
    """Collects the ways that run and compute the right thing, and why others don't."""

    def __init__(self, workload: Workload, config: Config, judge: ModelJudge, on_event: OnEvent) -> None:
        self.workload, self.config, self.judge, self.on_event = workload, config, judge, on_event
        step = _stepper(workload)
        with _untouched(workload):
            peak_bytes = _peak_bytes(step, workload.device)
        eager = Way("eager", workload.model, step, 0.0, peak_bytes=peak_bytes)
        self.ways = [eager, replace(eager, name="eager again")]
        self.failed: list[Rival] = []
        self.dropped: list[str] = []

    def add_framework(self) -> None:
        """The framework's own ways."""
        cuda = self.workload.device.startswith("cuda")
        rivals: list[tuple[str, dict[str, Any]]] = [("compile", {})]
        if cuda:
            rivals.append(("compile + CUDA graphs", {"mode": "reduce-overhead"}))
        if self.config.effort == "max":
            rivals.append(("compile max-autotune", {"mode": "max-autotune" if cuda else "max-autotune-no-cudagraphs"}))
        for name, options in rivals:
            self.on_event("end to end", 0, 0, f"building {name}")
            try:
                way = _warm(name, self.workload, torch.compile(self.workload.model, dynamic=False, **options))
                off = self.judge.hear(name, way.model)
                self.ways.append(replace(way, note=f"By the rule for patched models it is off: {off}" if off else ""))
            except Exception as error:  # isolation boundary: a rival that can't run is a fact to report
                self.failed.append(Rival(name=name, reason=self._failure(name, error)))

    def add_patched(self, plan: Plan, composition: Composition) -> None:
        """The patched model; entries that make it wrong are dropped first."""
        plan = plan.composed(composition).without(set(self.dropped))
        name = f"patched, rest {composition}"
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

    def _try(self, plan: Plan) -> Way | str:
        """The patched model ready to be timed, or what is wrong with it."""
        backend, skipped = Backend(plan, cache_dir=self.config.cache_dir), _graphs_skipped()
        name = f"patched, rest {plan.composition}"
        try:
            compiled = torch.compile(self.workload.model, backend=backend, dynamic=False)
            way = _warm(name, self.workload, compiled)
            if plan.composition == "cudagraph" and _graphs_skipped() > skipped:
                return "Inductor refuses to capture it: it writes its inputs, or some of it runs on the CPU"
            verdict = self.judge.check(way.model)
        except Exception as error:  # isolation boundary: the framework's code stays where the patch can't run
            return self._failure(name, error)
        return verdict if isinstance(verdict, str) else replace(way, backend=backend, composition=plan.composition)

    def _failure(self, name: str, error: Exception) -> str:
        """Why a way can't run; a full disk says nothing about it."""
        leave_capture(self.workload.device)
        if NO_SPACE in str(error):
            raise DiskFull(name, str(error)) from error
        return in_a_line(error)

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
    """The ways to run the rest that the settings allow here.

    Raises:
        CompositionUnavailable: CUDA graphs are asked for and the model is not on a GPU.
    """
    if config.compose == "cudagraph" and not workload.device.startswith("cuda"):
        raise CompositionUnavailable("cudagraph", f"CUDA graphs need a GPU, and the model is on {workload.device}")
    if config.compose != "auto":
        return (config.compose,)
    graphs = workload.device.startswith("cuda") and workload.mode == "inference"
    return ("eager", "inductor", "cudagraph") if graphs else ("eager", "inductor")


def _warm(name: str, workload: Workload, model: Any) -> Way:
    """Call it until it is compiled: once, and on CUDA twice, since CUDA graphs are captured in a second call."""

    step = _stepper(replace(workload, model=model))
    with _untouched(workload):
        start = time.perf_counter()
        for _ in range(2 if workload.device.startswith("cuda") else 1):
            step()
        _synchronize(workload.device)
        compile_s = time.perf_counter() - start
        peak_bytes = _peak_bytes(step, workload.device)
    return Way(name, model, step, compile_s, peak_bytes=peak_bytes)


def _peak_bytes(step: Callable[[], Any], device: str) -> int | None:
    """Most memory one step holds beyond what is held before it; None where that isn't known.

    A step that takes none replays a CUDA graph, whose pool is held all the time and shared with other graphs.
    """
    if not device.startswith("cuda"):
        return None
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    _synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) or None


def _untouched(workload: Workload) -> AbstractContextManager[None]:
    """Buffers, gradients and random state are put back after: each check and each way starts from the same model."""
    return protected(getattr(workload.model, "_orig_mod", workload.model))


def _stepper(workload: Workload) -> Callable[[], Any]:
    """One step; in training the gradients are dropped first, as an optimizer's zero_grad does."""
    if workload.mode != "training":
        return workload.step
    parameters = list(workload.model.parameters())

    def step() -> Any:
        for parameter in parameters:
            parameter.grad = None
        return workload.step()

    return step


def _graphs_skipped() -> int:
    """How many graphs Inductor has declined to capture in a CUDA graph so far; it then runs them without one."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(step: Callable[[], Any], device: str, count: int) -> float:
    """Of one step, in a sample of several."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize(device)
    return (time.perf_counter() - start) / count


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
            first_s = _seconds(way.step, device, 1)
            count = repeats.setdefault(way.name, max(1, round(SAMPLE_S / max(first_s, 1e-6))))
            # The way before it left other data in the caches: in a call of 20 ms that is not noticed, so it counts.
            sample_s = first_s if count == 1 else _seconds(way.step, device, count)
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
