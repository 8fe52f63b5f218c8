"""The end-to-end verdict in numbers and in a sentence, from the samples of all ways to run the model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from fusescout.config import Config
from fusescout.errors import in_a_line
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.session import EndToEnd
from fusescout.session import ErrorStats
from fusescout.session import Interval
from fusescout.session import Rival
from fusescout.stats import median_interval
from fusescout.stats import ratio
from fusescout.ways import EAGER
from fusescout.ways import GRAPHED_EAGER
from fusescout.ways import Way

NOTHING_REPLACED = "No planned chain was replaced"
ALONE: dict[str, Composition] = {
    "compile": "inductor",
    "compile + CUDA graphs": "cudagraph",
    GRAPHED_EAGER: "replay",
}
"""The framework's ways that a plan without an entry takes, and how its rest then runs."""
DISTURBED = 0.1
"""Eager's time over its own, measured again in the same rounds, from which the verdict says so."""


def fastest_patched(ways: Sequence[Way], samples: Mapping[str, Sequence[float]]) -> Way | None:
    """The patched way with the smallest median, if there is one."""
    return _fastest([w for w in ways if w.backend is not None], samples)


def conclude(
    plan: Plan,
    ways: Sequence[Way],
    failed: Sequence[Rival],
    samples: Mapping[str, Sequence[float]],
    dropped: Sequence[str],
    config: Config,
    checked: ErrorStats | str,
) -> tuple[EndToEnd, Plan]:
    """The verdict, and the plan that it holds for: an empty one where no patch is worth having.

    Args:
        plan: what was to be replaced.
        ways: those that were measured; eager first.
        failed: those that couldn't be, with reasons.
        samples: µs a call by the name of a way; the numbers at one place were taken in one round.
        dropped: entries that were taken out since they broke the model.
        config: settings; `min_gain` counts here.
        checked: the last check of the fastest patched way; unused where none was measured.
    """
    eager = samples["eager"]
    noise = ratio(eager, samples["eager again"])
    best = fastest_patched(ways, samples)
    rivals = [
        Rival(
            name=w.name,
            time=median_interval(samples[w.name]),
            compile_s=w.compile_s,
            reason=w.note,
            peak_bytes=w.peak_bytes,
        )
        for w in ways
        if w.name not in EAGER
    ] + [*failed]
    baseline = median_interval(eager)
    if best is None:
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
            baseline=baseline, baseline_peak_bytes=ways[0].peak_bytes, noise=noise, rivals=rivals,
            dropped=[*dropped], verdict=verdict,
        )  # fmt: skip
        return unpatched, plan.emptied()
    speedup = ratio(eager, samples[best.name])
    rival = _rival(ways, samples)
    over_rival = ratio(samples[rival.name], samples[best.name])
    error = None if isinstance(checked, str) else checked
    assert best.backend is not None
    assert best.composition is not None
    gains = speedup.low > 1.0 and speedup.mid >= config.min_gain
    accepted = error is not None and gains and over_rival.high >= 1.0
    counters = best.backend.counters
    exact = f", {error.measure}" if error is not None and error.measure else ""
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
        dropped=[*dropped],
        rivals=rivals,
        baseline_peak_bytes=ways[0].peak_bytes,
        rival=rival.name,
        speedup_over_rival=over_rival,
        verdict=verdict,
    )
    final = best.backend.plan if accepted else plan.emptied()
    return result, final


def leave(
    verdict: EndToEnd,
    plan: Plan,
    ways: Sequence[Way],
    samples: Mapping[str, Sequence[float]],
    config: Config,
    check: Callable[[Way], ErrorStats | str],
) -> tuple[EndToEnd, Plan]:
    """Leave the whole model to the framework's fastest way where no patch is worth having and that one is.

    One that is off by the rule for patched models is passed over, and the verdict says so.

    Args:
        verdict: with its plan as `conclude` gave them.
        plan: stays as it is where it replaces anything.
        ways: those that were measured.
        samples: as for `conclude`.
        config: settings; `compose` and `min_gain` count here.
        check: holds a way against the float64 model.
    """
    if not plan.is_empty:
        return verdict, plan
    wrong: list[str] = []
    for way in _faster_alone(ways, samples, config):
        own = samples[way.name]
        times = ratio(samples["eager"], own)
        try:
            exact = check(way)
        except Exception as error:  # isolation boundary: it ran before; the next one's turn comes
            exact = in_a_line(error)
        if isinstance(exact, str):
            wrong.append(f"It is not left to {way.name}, {_times(times)} as fast as eager: {exact.rstrip('.')}.")
            continue
        rival = _rival(ways, samples)
        said = f"The plan leaves the whole model to {way.name}: {_times(times)} as fast as eager."
        left = {
            "patched": median_interval(own),
            "speedup": times,
            "verified": True,
            "error": exact,
            "composition": ALONE[way.name],
            "left_to": way.name,
            "rival": rival.name,
            "speedup_over_rival": ratio(samples[rival.name], own),
            "verdict": " ".join([verdict.verdict, *wrong, said]),
        }
        return verdict.model_copy(update=left), plan.composed(ALONE[way.name])
    return verdict.model_copy(update={"verdict": " ".join([verdict.verdict, *wrong])}), plan


def _faster_alone(ways: Sequence[Way], samples: Mapping[str, Sequence[float]], config: Config) -> list[Way]:
    """The framework's ways that a plan can take, the settings allow and that certainly beat eager; fastest first."""
    allowed = [name for name, composition in ALONE.items() if config.compose in ("auto", composition)]
    found = []
    for way in ways:
        if way.name in allowed:
            over_eager = ratio(samples["eager"], samples[way.name])
            if over_eager.low > 1.0 and over_eager.mid >= config.min_gain:
                found.append(way)
    return sorted(found, key=lambda w: median_interval(samples[w.name]).mid)


def _fastest(ways: Sequence[Way], samples: Mapping[str, Sequence[float]]) -> Way | None:
    return min(ways, key=lambda w: median_interval(samples[w.name]).mid, default=None)


def _rival(ways: Sequence[Way], samples: Mapping[str, Sequence[float]]) -> Way:
    """The fastest way without a patch; eager is one."""
    found = _fastest([w for w in ways if w.backend is None and w.name != EAGER[1]], samples)
    assert found is not None
    return found


def _asked(speedup: Interval, min_gain: float) -> str:
    uncertain = speedup.mid >= min_gain and speedup.mid > 1.0
    return "that is not certain to be faster" if uncertain else f"{max(min_gain, 1.0):.2f} is asked for"


def _times(speedup: Interval) -> str:
    return f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"


def _ms(interval: Interval) -> str:
    return f"{interval.mid / 1e3:.3g} ms [{interval.low / 1e3:.3g}, {interval.high / 1e3:.3g}]"
