"""The end-to-end verdict: the whole model, unpatched against patched and against its rivals, interleaved, unprofiled.

Rivals are eager, `torch.compile` and, on CUDA, `torch.compile` with CUDA graphs; where that is slower than eager, or
can't be had, eager in a CUDA graph too. The patched model is tried with the rest run each way the settings allow; every
way is checked against the float64 model before its time counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace

import torch

from fusescout import rivals
from fusescout.conclusion import NOTHING_REPLACED
from fusescout.conclusion import conclude
from fusescout.conclusion import fastest_patched
from fusescout.conclusion import leave
from fusescout.config import Config
from fusescout.errors import CompositionUnavailable
from fusescout.modelcheck import ModelJudge
from fusescout.nest import tensors
from fusescout.onetrace import OneTrace
from fusescout.patching import NOT_PLANNED
from fusescout.patching import Backend
from fusescout.plan import COMPILED
from fusescout.plan import GRAPHED
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.rivals import Rivals
from fusescout.session import EndToEnd
from fusescout.session import ErrorStats
from fusescout.session import Rival
from fusescout.ways import EAGER
from fusescout.ways import GRAPHED_EAGER
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
COPIED_BYTES_PER_S, COPIED_SHARE = 1e12, 0.01
"""A CUDA graph copies the inputs of each call. Up to this share of a step, at this rate, that decides nothing."""
REPLAYED = "Not built: with CUDA graphs the same code is replayed without its launches"
PATCHED = ("patched, rest eager", "patched, rest cudagraph")
SLOWER = 1.05
"""From how many times eager's time on, with CUDA graphs, Inductor's code leaves room for eager operators in them."""
AS_TORCH = "The unpatched model's own operators in a CUDA graph, as torch.cuda.make_graphed_callables makes one."
OnEvent = Callable[[str, int, int, str], None]


def compare(
    workload: Workload,
    plan: Plan,
    config: Config,
    on_event: OnEvent,
    compiled: Plan | None = None,
    budget_s: float = BUDGET_S,
    built: Rivals | None = None,
    may_leave: bool = True,
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
        may_leave: whether the plan that comes back may leave the model to one of those ways: not where it is asked
            whether this plan holds.

    Returns:
        The verdict, and the plan that it holds for: entries that break the model are dropped by bisection, and the
        composition is the fastest measured one. If no patched form beats the framework's ways the plan comes back
        without entries; how the rest runs, which is all of the model, is then the fastest of those.
    """
    with compiling(workload):
        bench = _Bench(workload, config, ModelJudge(workload), on_event)
        bench.add_framework(built or rivals.build(workload, config, on_event))
        for composition in compositions(config, workload):
            bench.add_patched(compiled if compiled is not None and composition in COMPILED else plan, composition)
        with untouched(workload):
            samples = measure(bench.ways, config.rounds, workload.device, on_event, budget_s, bench.lose)
        checked = bench.check_fastest(samples)
        found = conclude(plan, bench.ways, bench.failed, samples, bench.dropped, config, checked)
        return leave(*found, bench.ways, samples, config, lambda w: bench.judge.check(w.model)) if may_leave else found


class _Bench:
    """Collects the ways that run and compute the right thing, and why others don't."""

    def __init__(self, workload: Workload, config: Config, judge: ModelJudge, on_event: OnEvent) -> None:
        self.workload, self.config, self.judge, self.on_event = workload, config, judge, on_event
        self.trace, self.traced_s = OneTrace(workload.model), 0.0
        step = stepper(workload)
        with untouched(workload):
            peak_bytes = most_bytes(step, workload.device)
        eager = Way("", workload.model, step, 0.0, peak_bytes=peak_bytes)
        self.ways = [replace(eager, name=name) for name in EAGER]
        self.step_s: dict[str, float] = {}
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
            say = "Not checked" if self.judge.unknown else "By the rule for patched models it is off"
            self.ways.append(replace(way, note=f"{say}: {off}" if off else ""))

    def add_patched(self, plan: Plan, composition: Composition) -> None:
        """The patched model; entries that make it wrong are dropped first."""
        plan = plan.composed(composition).without(set(self.dropped))
        name = f"patched, rest {composition}"
        if self.judge.unknown and not plan.is_empty:
            self.failed.append(Rival(name=name, reason=self.judge.unknown))
            return
        if composition == "replay" and not self._replays_eager(plan):
            return
        if composition == "inductor" and not plan.is_empty and any(map(self._replays, [*self.ways])):
            self.failed.append(Rival(name=name, reason=REPLAYED))
            return
        wrong = ""
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
            wrong = way
            self.dropped.append(culprit)
            plan = plan.without({culprit})
        if wrong:
            self.failed.append(Rival(name=name, reason=f"Without {self.dropped[-1]} nothing is left of it: {wrong}"))

    def _replays_eager(self, plan: Plan) -> bool:
        """Whether eager operators are worth a CUDA graph: then the unpatched ones are in the running too.

        They are where Inductor's code, replayed, takes longer than they do launched one by one, or can't be had.
        """
        launched, graphs = (EAGER[0], "compile + CUDA graphs") if plan.is_empty else PATCHED
        ways = {way.name: way for way in self.ways}
        if self.config.compose == "auto":
            launched_s = self._seconds(ways[launched]) if launched in ways else None
            graphs_s = self._seconds(ways[graphs]) if graphs in ways else math.inf
            if launched_s is None or (graphs_s is not None and graphs_s <= SLOWER * launched_s):
                return False
        self.on_event("end to end", 0, 0, f"building {GRAPHED_EAGER}")
        way = self._try(plan.emptied())
        if isinstance(way, str):
            self.failed.append(Rival(name=GRAPHED_EAGER, reason=way))
        else:
            self.ways.append(replace(way, name=GRAPHED_EAGER, backend=None, composition=None, note=AS_TORCH))
        return True

    def _replays(self, way: Way) -> bool:
        """Whether a way's CUDA graphs replay all that Inductor made, and copy too little to lose by it."""
        if way.backend is None or way.composition != "cudagraph" or way.backend.counters.fallbacks:
            return False
        nbytes = sum(t.nbytes for t in tensors((self.workload.args, self.workload.kwargs)))
        step_s = self._seconds(way)
        return step_s is not None and nbytes / COPIED_BYTES_PER_S <= COPIED_SHARE * step_s

    def _seconds(self, way: Way) -> float | None:
        """Of a step, roughly; a way that fails now is lost."""
        if way.name in self.step_s:
            return self.step_s[way.name]
        try:
            with untouched(self.workload):
                self.step_s[way.name] = seconds(way.step, self.workload.device, 3)
            return self.step_s[way.name]
        except Exception as error:  # isolation boundary: it ran before, and others go on
            self.lose(way, error)
            return None

    def lose(self, way: Way, error: Exception) -> None:
        """Take out a way that ran before and now fails. Only eager's own failure ends the comparison."""
        if way.name in EAGER:
            raise error
        self.ways.remove(way)
        self.failed.append(
            Rival(name=way.name, compile_s=way.compile_s, reason=failure(way.name, self.workload, error))
        )

    def check_fastest(self, samples: Mapping[str, Sequence[float]]) -> ErrorStats | str:
        """Check the fastest patched way once more; one that fails is lost, and the next one's turn comes."""
        while (best := fastest_patched(self.ways, samples)) is not None:
            try:
                return self.judge.check(best.model)
            except Exception as error:  # isolation boundary: it ran before, and others go on
                self.lose(best, error)
        return ""

    def _try(self, plan: Plan) -> Way | str:
        """The patched model ready to be timed, or what is wrong with it."""
        backend, skipped = Backend(plan, cache_dir=self.config.cache_dir), _graphs_skipped()
        name, model = f"patched, rest {plan.composition}", self.workload.model
        try:
            if not self.traced_s:
                self.traced_s = self._seconds_to_trace()
            way = warm(name, self.workload, self.trace.carried_out(model, backend))
            if plan.composition in GRAPHED and _graphs_skipped() > skipped:
                return "torch refuses to capture it: it writes its inputs, or some of it runs on the CPU"
            if plan.composition == "replay" and (reason := _nothing_replayed(backend)):
                return reason
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


def _nothing_replayed(backend: Backend) -> str:
    """Why all graphs of a model run eagerly instead; empty if one is replayed."""
    eagerly = [r for name, r in backend.counters.fallbacks.items() if name.startswith("graph ") and r != NOT_PLANNED]
    return eagerly[0] if eagerly and len(eagerly) == backend.counters.captures else ""


def _why(backend: Backend) -> str:
    return "; ".join(dict.fromkeys(backend.counters.fallbacks.values())) or "the model made no graph"


def compositions(config: Config, workload: Workload) -> tuple[Composition, ...]:
    """The ways to run the rest that the settings allow here, in the order they are tried.

    Raises:
        CompositionUnavailable: CUDA graphs are asked for and the model is not on a GPU, or eager ones for a training.
    """
    if config.compose in GRAPHED and not workload.device.startswith("cuda"):
        raise CompositionUnavailable(config.compose, f"CUDA graphs need a GPU, and the model is on {workload.device}")
    if config.compose == "replay" and workload.mode == "training":
        raise CompositionUnavailable("replay", "It records no gradients, and a training step needs them")
    if config.compose != "auto":
        return (config.compose,)
    graphs = workload.device.startswith("cuda") and workload.mode == "inference"
    return ("eager", "cudagraph", "replay", "inductor") if graphs else ("eager", "inductor")


def _graphs_skipped() -> int:
    """How many graphs Inductor has declined to capture in a CUDA graph so far; it then runs them without one."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def measure(
    ways: Sequence[Way],
    rounds: int,
    device: str,
    on_event: OnEvent,
    budget_s: float = BUDGET_S,
    lose: Callable[[Way, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Interleaved samples of every way, in µs a call: each round runs all of them, every second round backwards.

    A way that raises is left out, with its samples: `lose` hears of it, and raises the error where it was eager's.
    """
    repeats: dict[str, int] = {}
    ways = [*ways]
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= ENOUGH_ROUNDS and time.perf_counter() - begin > budget_s:
            break
        on_event("end to end", number, rounds, "measuring")
        for way in [*ways] if number % 2 == 0 else [*reversed(ways)]:
            try:
                first_s = seconds(way.step, device)
                count = repeats.setdefault(way.name, max(1, round(SAMPLE_S / max(first_s, 1e-6))))
                # The way before it left other data in the caches: in a call of 20 ms that is not noticed, so it counts.
                sample_s = first_s if count == 1 else seconds(way.step, device, count)
            except Exception as error:  # isolation boundary: it ran before, and others go on
                if lose is None:
                    raise
                lose(way, error)
                ways.remove(way)
                del samples[way.name]
                continue
            samples[way.name].append(sample_s * 1e6)
    return samples
