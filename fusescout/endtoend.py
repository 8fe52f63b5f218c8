"""The end-to-end verdict: the whole model, unpatched against patched and against its rivals, interleaved, unprofiled.

Rivals are eager, `torch.compile` and, on CUDA, `torch.compile` with CUDA graphs. The patched model is tried with the
rest run each way the settings allow; every way is checked against the float64 model before its time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from fusescout.config import Config
from fusescout.modelcheck import ModelJudge
from fusescout.patching import Backend
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.session import EndToEnd
from fusescout.session import Interval
from fusescout.session import Rival
from fusescout.stats import median_interval
from fusescout.stats import ratio
from fusescout.workload import Workload

SAMPLE_S = 0.02
"""One sample lasts at least this long: clock and launch jitter stay below 1 % of it."""
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


def compare(workload: Workload, plan: Plan, config: Config, on_event: OnEvent) -> tuple[EndToEnd, Plan]:
    """Measure the plan on the whole model, and drop what fails there.

    Gives the verdict, and the plan that it holds for: entries that break the model are dropped by bisection, and the
    composition is the fastest measured one. If nothing beats eager the plan comes back empty.
    """
    limits: Any = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}
    with torch._dynamo.config.patch(**limits):
        judge = ModelJudge(workload)
        plan, dropped, trial = _without_culprits(workload, plan, config, judge, on_event)
        ways, rivals = _build(workload, plan, trial, config, judge, on_event)
        samples = measure(ways, config.rounds, workload.device, on_event)
        return _conclude(plan, ways, rivals, samples, judge, dropped, config)


def _build(
    workload: Workload, plan: Plan, trial: Way | None, config: Config, judge: ModelJudge, on_event: OnEvent
) -> tuple[list[Way], list[Rival]]:
    """All ways that run and, for the patched ones, compute the right thing; and the rivals that could not run."""
    cuda = workload.device.startswith("cuda")
    ways = [Way(name, workload.model, _stepper(workload), 0.0) for name in ("eager", "eager again")]
    failed: list[Rival] = []
    rivals: list[tuple[str, dict[str, Any]]] = [("compile", {})]
    if cuda:
        rivals.append(("compile + CUDA graphs", {"mode": "reduce-overhead"}))
    if config.effort == "max":
        rivals.append(("compile max-autotune", {"mode": "max-autotune" if cuda else "max-autotune-no-cudagraphs"}))
    for name, options in rivals:
        on_event("end to end", 0, 0, f"building {name}")
        try:
            ways.append(_warm(name, workload, torch.compile(workload.model, dynamic=False, **options)))
        except Exception as error:  # isolation boundary: a rival that can't run is a fact to report, not our failure
            failed.append(Rival(name=name, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))
    if trial is None:
        return ways, failed
    for composition in _compositions(config, cuda):
        if composition == trial.composition:
            ways.append(trial)
            continue
        name = f"patched, rest {composition}"
        on_event("end to end", 0, 0, f"building {name}")
        try:
            way = _patched(workload, plan, composition, config)
            verdict = judge.check(way.model)
        except Exception as error:  # isolation boundary: the framework code stays where a composition can't run
            failed.append(Rival(name=name, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))
            continue
        if isinstance(verdict, str):
            failed.append(Rival(name=name, reason=verdict))
        else:
            ways.append(way)
    return ways, failed


def _compositions(config: Config, cuda: bool) -> tuple[Composition, ...]:
    if config.compose == "auto":
        return ("eager", "inductor", "cudagraph") if cuda and config.mode == "inference" else ("eager", "inductor")
    return (config.compose,)


def _patched(workload: Workload, plan: Plan, composition: Composition, config: Config) -> Way:
    backend = Backend(plan.composed(composition), cache_dir=config.cache_dir)
    way = _warm(f"patched, rest {composition}", workload, torch.compile(workload.model, backend=backend, dynamic=False))
    return replace(way, backend=backend, composition=composition)


def _warm(name: str, workload: Workload, model: Any) -> Way:
    """Call it until it is compiled; the first two calls are its compile time."""

    step = _stepper(replace(workload, model=model))
    start = time.perf_counter()
    step()
    step()
    _synchronize(workload.device)
    compile_s = time.perf_counter() - start
    step()
    return Way(name, model, step, compile_s)


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


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(ways: list[Way], rounds: int, device: str, on_event: OnEvent) -> dict[str, list[float]]:
    """Interleaved samples of every way, in µs a call: each round runs all of them, every second round backwards."""
    repeats = {}
    for way in ways:
        _synchronize(device)
        start = time.perf_counter()
        way.step()
        _synchronize(device)
        repeats[way.name] = max(1, round(SAMPLE_S / max(time.perf_counter() - start, 1e-6)))
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        on_event("end to end", number, rounds, "measuring")
        for way in ways if number % 2 == 0 else reversed(ways):
            count = repeats[way.name]
            way.step()  # the way before it left other data in the caches
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                way.step()
            _synchronize(device)
            samples[way.name].append((time.perf_counter() - start) / count * 1e6)
    return samples


def _without_culprits(
    workload: Workload, plan: Plan, config: Config, judge: ModelJudge, on_event: OnEvent
) -> tuple[Plan, list[str], Way | None]:
    """Drop the entries that break the whole model, found by bisection; also gives the way that works, rest eager."""
    dropped: list[str] = []

    def works(entries: Plan) -> Way | None:
        try:
            way = _patched(workload, entries, "eager", config)
            return None if isinstance(judge.check(way.model), str) else way
        except Exception:  # isolation boundary: an entry that raises in the model is dropped like one that is wrong
            return None

    while plan.entries:
        on_event("end to end", 0, 0, "building patched, rest eager")
        if way := works(plan):
            return plan, dropped, way
        on_event("end to end", 0, 0, "the patched model is wrong: looking for the guilty site")
        suspects = [e.id for e in plan.entries]
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            alone = plan.without({e.id for e in plan.entries} - set(half))
            suspects = suspects[len(suspects) // 2 :] if works(alone) else half
        dropped.append(suspects[0])
        plan = plan.without({suspects[0]})
    return plan, dropped, None


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
        Rival(name=w.name, time=median_interval(samples[w.name]), compile_s=w.compile_s)
        for w in ways
        if w.name not in ("eager", "eager again")
    ] + failed
    baseline = median_interval(eager)
    if not patched:
        why = (
            "No chain was accepted"
            if not plan.entries and not dropped
            else "No patched form of the model passed its check"
        )
        verdict = f"Keep the framework code. {why}; eager takes {_ms(baseline)}."
        return (
            EndToEnd(baseline=baseline, noise=noise, rivals=rivals, dropped=dropped, verdict=verdict),
            plan.model_copy(update={"entries": []}),
        )
    best = min(patched, key=lambda w: median_interval(samples[w.name]).mid)
    speedup = ratio(eager, samples[best.name])
    others = [w for w in ways if w.backend is None and w.name != "eager again"]
    rival = min(others, key=lambda w: median_interval(samples[w.name]).mid)
    over_rival = ratio(samples[rival.name], samples[best.name])
    checked = judge.check(best.model)
    error = None if isinstance(checked, str) else checked
    accepted = error is not None and speedup.low > 1.0 and speedup.mid >= config.min_gain
    assert best.backend is not None and best.composition is not None
    if accepted:
        over_best = (
            f" and {_times(over_rival)} as fast as {rival.name}, the best other way."
            if rival.name != "eager"
            else ", which is the best other way."
        )
        verdict = (
            f"Patch it: {best.backend.counters.sites} sites, the rest run by {best.composition}:"
            f" {_times(speedup)} as fast as eager{over_best}"
        )
    elif isinstance(checked, str):
        verdict = f"Keep the framework code: the patched model is wrong in the end ({checked})."
    else:
        verdict = (
            f"Keep the framework code: patched, the model is {_times(speedup)} as fast as eager,"
            f" and {max(config.min_gain, 1.0):.2f} is asked for."
        )
    if accepted and over_rival.high < 1.0:
        verdict += f" {rival.name} alone is faster: prefer it."
    result = EndToEnd(
        baseline=baseline,
        patched=median_interval(samples[best.name]),
        speedup=speedup,
        noise=noise,
        verified=error is not None,
        error=error,
        composition=best.composition,
        sites_patched=best.backend.counters.sites if accepted else 0,
        dropped=dropped,
        rivals=rivals,
        verdict=verdict,
    )
    final = plan.composed(best.composition) if accepted else plan.model_copy(update={"entries": []})
    return result, final


def _times(speedup: Interval) -> str:
    return f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"


def _ms(interval: Interval) -> str:
    return f"{interval.mid / 1e3:.3g} ms [{interval.low / 1e3:.3g}, {interval.high / 1e3:.3g}]"
