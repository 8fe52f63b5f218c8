"""The acceptance rule: which contender a chain gets, and which chains a plan takes.

A contender is accepted when the lower end of its interval beats the best *cheaper* contender by the threshold, where
cheaper means less to maintain: eager, then the framework's fused built-ins, then Inductor, then a TileLang kernel,
then CUDA C++. Framework code that is as fast wins.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

from fusescout.candidates import Candidate
from fusescout.session import ContenderResult
from fusescout.session import Interval
from fusescout.stats import ratio

UPKEEP_ORDER = ("eager", "framework", "inductor", "tilelang", "cuda")
IMPLAUSIBLE = 4.0
"""Eager's race time over its profiled time from which the race is not believed; cold caches alone make 2."""
SMALLEST_US = 20.0
"""Below this the profile's own resolution and a kernel's launch decide, and the ratio says nothing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a race came to.

    `saved_us` is what the winner saves over eager at all sites in one step, `saved_over_inductor_us` over Inductor,
    which may run the rest of the model (over the best cheaper contender where Inductor has no time).
    """

    winner: str
    accepted: bool
    reason: str
    speedup: Interval | None
    speedup_over_eager: Interval | None
    saved_us: float
    pays_back_calls: float | None
    saved_over_inductor_us: float = 0.0


def decide(
    candidate: Candidate,
    results: Sequence[ContenderResult],
    samples: Mapping[str, Sequence[float]],
    threshold: float,
) -> Decision:
    """Pick the winner of one race.

    Args:
        candidate: the chain.
        results: one result for each contender.
        samples: per contender the interleaved rounds, in µs; round k of all contenders belongs together.
        threshold: speed-up that the interval's lower end must reach over every cheaper contender.
    """
    fit = [r.name for r in results if r.status == "ok" and samples.get(r.name)]
    if "eager" not in fit:
        return Decision(
            "eager",
            False,
            "The eager baseline could not be measured, so nothing can be accepted.",
            None,
            None,
            0.0,
            None,
        )
    order = [name for name in UPKEEP_ORDER if name in fit]
    if doubt := implausible(candidate, _median(samples["eager"])):
        return Decision("eager", False, doubt, None, None, 0.0, None)
    medians = {name: _median(samples[name]) for name in order}
    for name in reversed(order[1:]):
        cheaper = order[: order.index(name)]
        best = min(cheaper, key=lambda c: medians[c])
        speedup = ratio(samples[best], samples[name])
        if speedup.low < threshold:
            continue
        over_eager = ratio(samples["eager"], samples[name])
        saved_each = medians["eager"] - medians[name]
        result = next(r for r in results if r.name == name)
        payback = result.compile_s * 1e6 / (saved_each * len(candidate.sites)) if saved_each > 0 else None
        return Decision(
            winner=name,
            accepted=True,
            reason=_accepted(name, best, speedup, order, medians),
            speedup=speedup,
            speedup_over_eager=over_eager,
            saved_us=saved_each * len(candidate.sites),
            pays_back_calls=payback,
            saved_over_inductor_us=(medians.get("inductor", medians[best]) - medians[name]) * len(candidate.sites),
        )
    return _keep(results, samples, order, medians, threshold)


def _accepted(name: str, best: str, speedup: Interval, order: Sequence[str], medians: Mapping[str, float]) -> str:
    """What a winner beat; a contender that costs more upkeep may be faster, though not by enough."""
    fastest = min(order, key=lambda c: medians[c])
    lead = f"{name} is {speedup.mid:.2f} times as fast as {best}"
    if medians[fastest] >= medians[name]:
        return f"{lead}, the best other way (at least {speedup.low:.2f})."
    return (
        f"{lead}, the best cheaper way (at least {speedup.low:.2f}); {fastest} is"
        f" {medians[name] / medians[fastest]:.2f} times as fast again, too little for its upkeep."
    )


def implausible(candidate: Candidate, eager_us: float) -> str:
    """Why the race's baseline can't be the chain that was profiled, or an empty string.

    On a busy machine a race once measured 15 ms for a chain that takes 57 µs in the model: no win over that counts.
    """
    profiled_us = candidate.time_us / len(candidate.sites)
    if eager_us <= IMPLAUSIBLE * max(profiled_us, SMALLEST_US):
        return ""
    return (
        f"Eager took {eager_us:.0f} µs in the race and {profiled_us:.0f} µs in the model's profile, so this race proves"
        " nothing; run it again on a quieter machine."
    )


def _keep(
    results: Sequence[ContenderResult],
    samples: Mapping[str, Sequence[float]],
    order: Sequence[str],
    medians: Mapping[str, float],
    threshold: float,
) -> Decision:
    rivals = order[1:]
    if not rivals:
        failed = "; ".join(f"{r.name}: {r.reason or r.status}" for r in results if r.name != "eager")
        return Decision("eager", False, f"No other contender ran ({failed}).", None, None, 0.0, None)
    best = min(rivals, key=lambda c: medians[c])
    speedup = ratio(samples["eager"], samples[best])
    if speedup.mid <= 1.0:
        reason = f"Eager is the fastest: {best}, the best other way, takes {1 / speedup.mid:.2f} times as long."
    else:
        others = min((c for c in order if c != best), key=lambda c: medians[c])
        lead = ratio(samples[others], samples[best])
        reason = (
            f"{best} leads {others} by {lead.mid:.2f} (at least {lead.low:.2f});"
            f" {threshold:.2f} is needed to be worth owning."
        )
    return Decision("eager", False, reason, None, speedup, 0.0, None)


def select(
    candidates: Sequence[Candidate],
    decisions: Mapping[str, Decision],
    *,
    compiled: bool = False,
    copy_bytes_per_s: float = 0.0,
) -> tuple[tuple[Candidate, int], ...]:
    """Accepted candidates in priority order with the number of sites each keeps; no node is claimed twice.

    Args:
        candidates: the raced ones.
        decisions: by candidate id.
        compiled: the rest of the model will run through Inductor. Then what a winner saves is counted from Inductor's
            time, not from eager's, and a chain that Inductor runs as fast is left to it.
        copy_bytes_per_s: memory bandwidth; prices what a chain leaves over of a longer one that Inductor would have run
            as a whole.
    """

    def saved_us(candidate: Candidate) -> float:
        decision = decisions[candidate.id]
        return decision.saved_over_inductor_us if compiled else decision.saved_us

    accepted = [c for c in candidates if decisions[c.id].accepted]
    if compiled:
        accepted = [c for c in accepted if decisions[c.id].winner != "inductor" and saved_us(c) > 0]
    accepted.sort(key=lambda c: (-saved_us(c), c.key))
    accepted = _longer_first(accepted, saved_us, copy_bytes_per_s if compiled else 0.0)
    used: set[tuple[int, str]] = set()
    chosen = []
    for candidate in accepted:
        free = 0
        for site in candidate.sites:
            names = {(site.graph, n) for n in site.nodes}
            if not names & used:
                used |= names
                free += 1
        if free:
            chosen.append((candidate, free))
    return tuple(chosen)


def _longer_first(
    ordered: Sequence[Candidate], saved_us: Callable[[Candidate], float], copy_bytes_per_s: float
) -> list[Candidate]:
    """The same, with a longer chain moved before one inside it where that saves more at a site.

    The shorter one leaves operators over that Inductor would have run along with it: they then read its result from
    memory. In ResNet-50 convolution + batch norm saves 98 µs over Inductor and with add and relu 82, but alone it
    leaves an add and relu of 73 µs to pay for.
    """
    found: list[Candidate] = []
    for candidate in ordered:
        inside = [k for k, c in enumerate(found) if _is_inside(c, candidate)]
        each = saved_us(candidate) / len(candidate.sites)
        better = [
            k
            for k in inside
            if each > saved_us(found[k]) / len(found[k].sites) - _left_over_us(found[k], candidate, copy_bytes_per_s)
        ]
        found.insert(min(better), candidate) if better else found.append(candidate)
    return found


def _is_inside(inner: Candidate, outer: Candidate) -> bool:
    """Whether a site of one lies inside a larger site of the other."""
    sites = [(s.graph, frozenset(s.nodes)) for s in inner.sites]
    return any(g == s.graph and nodes < frozenset(s.nodes) for s in outer.sites for g, nodes in sites)


def _left_over_us(inner: Candidate, outer: Candidate, copy_bytes_per_s: float) -> float:
    """Least time of what is left of the outer chain: it reads the inner one's results and all that only it reads."""
    results = sum(spec.nbytes for spec in inner.subgraph.output_specs)
    nbytes = outer.bytes / len(outer.sites) - inner.bytes / len(inner.sites) + 2 * results
    return max(nbytes, 0.0) / copy_bytes_per_s * 1e6 if copy_bytes_per_s else 0.0


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
