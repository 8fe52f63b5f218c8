"""Takes up a planned chain at a new shape: by the nearest shape's kernel, or by a race of its own.

There are no captured values at hand, so verification uses fresh inputs only: normal, scaled, constant, NaN, infinite.
"""

from __future__ import annotations

from statistics import median

from fusescout.candidates import Candidate
from fusescout.config import Config
from fusescout.decide import decide
from fusescout.device import Device
from fusescout.heats import Bench
from fusescout.ir import Subgraph
from fusescout.plan import COMPILED
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.session import Interval
from fusescout.session import Site
from fusescout.tune import opened
from fusescout.tune import race
from fusescout.workerpool import Spare

Adopted = tuple[Entry, str]
"""A new entry, and on what grounds."""


def adopt_nearest(
    entry: Entry, subgraph: Subgraph, device: Device, config: Config, composition: Composition, spare: Spare
) -> Adopted | str:
    """The entry's kernel built for other sizes, if it passes the full check; else the reason why not.

    Where its contender doesn't offer the very schedule at these sizes, it is that contender's first guess there.

    Raises:
        WorkerRefused, WorkerTimeout, WorkerDied: the child process could not say what it offers.
    """
    with Bench(opened(subgraph, None, device, config), config.deadline_s, spare) as bench:
        eager = bench.entry("eager", {})
        if not bench.check(eager, "quick"):
            return f"eager could not be checked at this shape: {eager.reason}"
        offered = bench.call("variants", config.deadline_s, contender=entry.contender, effort="max")
        alike = [v for v in offered if v.get("template") == entry.variant.get("template")]
        if not alike:
            return f"{entry.contender} has nothing like the kernel of {entry.id} at this shape"
        variant = entry.variant if entry.variant in alike else alike[0]
        tried = bench.entry(entry.contender, variant)
        if not bench.check(tried, "full"):
            return tried.reason
    which = "the schedule" if variant == entry.variant else "the template"
    grounds = f"{which} of {entry.id}, verified at this shape, not timed"
    return _entry(entry, subgraph, entry.contender, variant), grounds


def adopt_winner(
    entry: Entry, subgraph: Subgraph, device: Device, config: Config, composition: Composition, spare: Spare
) -> Adopted | str:
    """The winner of a race at these sizes, if there is one; else the reason why not."""
    raced = race(subgraph, None, device, config, spare=spare)
    samples = raced.samples.get("eager", [])
    each_us = median(samples) if samples else 0.0
    decision = decide(_candidate(entry, subgraph, each_us), raced.contenders, raced.samples, config.threshold)
    if not decision.accepted:
        return decision.reason
    if decision.winner == "inductor" and composition in COMPILED:
        return f"{decision.reason} Inductor runs the rest of the model, so this chain is left to it."
    variant = next(c.variant for c in raced.contenders if c.name == decision.winner)
    return _entry(entry, subgraph, decision.winner, variant, decision.speedup), decision.reason


def _entry(
    like: Entry, subgraph: Subgraph, contender: str, variant: dict[str, object], speedup: Interval | None = None
) -> Entry:
    return like.model_copy(
        update={
            "id": f"{like.family}-{subgraph.key[:8]}",
            "subgraph": subgraph.to_json(),
            "contender": contender,
            "variant": variant,
            "speedup": speedup,
            "source_hash": "",
        }
    )


def _candidate(entry: Entry, subgraph: Subgraph, each_us: float) -> Candidate:
    """The chain as a decision takes it; nobody profiled it, so its time is eager's in the race."""
    sites = (Site(graph=0, nodes=[]),) * max(1, entry.sites)
    return Candidate(
        id=entry.id,
        family=entry.family,
        subgraph=subgraph,
        sites=sites,
        inputs=(),
        time_us=each_us * len(sites),
        bound_us=0.0,
        gain_us=0.0,
        share=0.0,
        launches_removed=0,
        flops=0.0,
        bytes=0.0,
    )
