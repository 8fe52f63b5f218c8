"""The main job, stage by stage: capture, profile, rank, race, decide, patch, measure, and the session that tells it.

Every stage is a function of its own module over plain data; this one only carries their results along and keeps the
time. It prints nothing: `on_event` hears of progress.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from fusescout import rivals
from fusescout.candidates import Candidate
from fusescout.candidates import rank
from fusescout.capture import Capture
from fusescout.capture import capture
from fusescout.ceilings import ceilings
from fusescout.config import Config
from fusescout.contenders import all_contenders
from fusescout.decide import Decision
from fusescout.decide import decide
from fusescout.decide import select
from fusescout.device import Device
from fusescout.endtoend import BUDGET_S
from fusescout.endtoend import SAMPLE_S
from fusescout.endtoend import OnEvent
from fusescout.endtoend import compare
from fusescout.endtoend import compositions
from fusescout.environment import describe
from fusescout.errors import in_a_line
from fusescout.graph import OpGraph
from fusescout.inserted import copy_times
from fusescout.ir import Subgraph
from fusescout.layout import Layout
from fusescout.layout import choose
from fusescout.numerics import tf32
from fusescout.once import Once
from fusescout.plan import COMPILED
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.precompute import describe as describe_once
from fusescout.precompute import precompute
from fusescout.probe import describe_device
from fusescout.profiling import profile
from fusescout.races import race_all
from fusescout.recall import Recall
from fusescout.rivals import Rivals
from fusescout.scaled import scaled_dtypes
from fusescout.session import CandidateResult
from fusescout.session import EndToEnd
from fusescout.session import Environment
from fusescout.session import Session
from fusescout.tune import RaceResult
from fusescout.ways import compiling
from fusescout.workerpool import Spare
from fusescout.workload import Workload

BESIDE = (
    "The other ways' compile seconds were taken while chains' kernels were compiled beside them, at low priority: alone"
    " they may be shorter."
)
SHARE_OF_RACES, MAX_BUDGET_S = 0.25, 15.0
"""After races that took long, the whole model may be measured longer than `BUDGET_S` too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an analysis gives: the session for reports, the plan for patching."""

    session: Session
    plan: Plan


@dataclass
class _Clock:
    """Seconds by stage, in order; a stage inside of another one stops the other's clock."""

    seconds: dict[str, float] = field(default_factory=dict)
    _running: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._read()
        self._running.append(name)
        try:
            yield
        finally:
            self._read()
            self._running.pop()

    def _read(self) -> None:
        now = time.perf_counter()
        if self._running:
            name = self._running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def run(
    workload: Workload, config: Config, on_event: OnEvent, folder: Path | None = None, spare: Spare | None = None
) -> Outcome:
    """Analyse one workload.

    Args:
        workload: model and inputs; it is left as it was found.
        config: all settings.
        on_event: hears (stage, done, total, detail).
        folder: where the trace and the kernels' repro scripts go; None keeps neither.
        spare: lends a worker that may have been started already; the caller closes it.

    Raises:
        CompositionUnavailable: the rest can't be run here in the way that is asked for.
    """
    compositions(config, workload)  # what is asked for and can't be is told before anything is measured
    with tf32(config.allow_tf32), nullcontext(spare) if spare else Spare() as lender, ExitStack() as whole_model:
        return _run(workload, config, on_event, folder, lender, whole_model)


def _run(
    workload: Workload, config: Config, on_event: OnEvent, folder: Path | None, spare: Spare, whole_model: ExitStack
) -> Outcome:
    clock = _Clock()
    kind = workload.device.split(":")[0]
    spare.start()
    on_event("capture", 0, 0, workload.name)
    with clock.stage("capture"):
        captured = capture(workload)
        if kind == "cpu":
            spare.settle()  # what is measured next must have the cores to itself
    on_event("device", 0, 0, "measuring its ceilings")
    with clock.stage("device"):
        dtypes = (workload.dtype, *scaled_dtypes([g.graph for g in captured.graphs]))
        device, probed = _ceilings(kind, dtypes, config)
    on_event("profile", 0, 0, f"{len(captured.graphs)} graphs")
    with clock.stage("profile"):
        trace = folder / "trace.json.gz" if folder else None
        measured = profile(workload, captured, runs=config.runs, trace_path=trace)
    ops = OpGraph.build([g.graph for g in captured.graphs], measured, device)
    on_event("layout", 0, 0, "comparing memory formats")
    with clock.stage("layout"):
        step_us = max(measured.busy_us, measured.kernel_us)
        captured, once, stopped = _precomputed(captured)
        layout = choose(workload, captured, measured.time_us, step_us, device.copy_bytes_per_s)
        added = _added(captured, layout, workload.device)
        captured = layout.capture

    def node_time_us(graph: int, node: str) -> float:
        return added.get((graph, node)) or measured.time_us(graph, node)

    graphs = [g.graph for g in captured.graphs]
    on_event("rank", 0, 0, f"{sum(len(g.nodes) for g in graphs)} nodes")
    with clock.stage("rank"):
        recall = Recall.of(graphs, device, config.top, config.cache_dir if config.use_cache else None)
        ranking = rank(
            graphs,
            node_time_us,
            step_us,
            device,
            _refusal(device, config),
            config.top,
            recall.weight,
        )
    ahead: list[Rivals] = []

    def build_rivals() -> None:
        """While the races' kernels are compiled, when nothing is timed and the GPU has nothing else to do."""
        with clock.stage("end to end"), spare.getting_ready(kind):
            ahead.append(rivals.build(workload, config, on_event))

    if early := rivals.have_room(workload):
        whole_model.enter_context(compiling(workload))
    with clock.stage("race"):
        races = race_all(
            ranking.candidates, captured, device, config, on_event, folder, spare, build_rivals if early else None
        )
    recall.keep((c.key for c in ranking.candidates), ranking.left)
    with clock.stage("device"):
        _ceilings(kind, dtypes, config)  # for the next analysis
    decisions = {
        c.id: decide(c, races[c.id].contenders, races[c.id].samples, config.threshold) for c in ranking.candidates
    }
    environment = describe(device)
    chosen = [
        select(ranking.candidates, decisions, compiled=c, copy_bytes_per_s=device.copy_bytes_per_s)
        for c in (False, True)
    ]
    plans = [
        _plan(workload, device, environment, config, c, races, decisions).model_copy(
            update={
                "memory_format": layout.memory_format,
                "constant_masks": captured.constant_masks > 0,
                "computed_once": bool(once),
            }
        )
        for c in chosen
    ]
    notes = (describe_once(once), layout.note, _masks(captured.constant_masks), BESIDE if ahead else "")
    budget_s = min(max(BUDGET_S, clock.seconds["race"] * SHARE_OF_RACES), MAX_BUDGET_S)
    with clock.stage("end to end"):
        built = ahead[0] if ahead else None
        verdict, plan = compare(workload, plans[0], config, on_event, plans[1], budget_s, built)
    session = Session(
        verdict=verdict.verdict,
        environment=environment,
        workload=workload.info(),
        settings=_settings(config, races, folder, [n for n in notes if n]),
        profile=measured.info(ops, len(graphs), captured.breaks),
        candidates=[_result(c, races[c.id], decisions[c.id], plan, verdict) for c in ranking.candidates],
        rejections=list(ranking.rejections),
        end_to_end=verdict,
        stages_s=clock.seconds,
        cache_hits=sum(r.cached for r in races.values()),
        cache_misses=sum(not r.cached for r in races.values()),
        warnings=[w for w in (*captured.warnings, *measured.warnings, probed, stopped, *layout.warnings) if w],
    )
    return Outcome(session, plan)


def _ceilings(kind: str, dtypes: tuple[str, ...], config: Config) -> tuple[Device, str]:
    """The device with its ceilings; without them, and why, where they can't be measured."""
    try:
        return ceilings(kind, dtypes, config.cache_dir), ""
    except Exception as error:  # isolation boundary: without ceilings a chain's bound is 0, and more chains are raced
        return describe_device(kind), f"The device's ceilings could not be measured: {in_a_line(error)}."


def _precomputed(captured: Capture) -> tuple[Capture, tuple[Once, ...], str]:
    """The capture with what no input decides computed once; as it was, and why, where that fails."""
    try:
        return *precompute(captured), ""
    except Exception as error:  # isolation boundary: the model is analysed with these operators in it
        return captured, (), f"What no input decides could not be computed once: {in_a_line(error)}."


def _added(captured: Capture, layout: Layout, device: str) -> Mapping[tuple[int, str], float]:
    """Times of the copies that a layout needs, in µs a step; none where that fails: they are no candidates then."""
    if layout.memory_format == "preserved":
        return {}
    try:
        return copy_times(captured, layout.capture, device)
    except Exception:  # isolation boundary: for want of memory, say
        return {}


def _refusal(device: Device, config: Config) -> Any:
    known = all_contenders([str(t) for t in config.templates])
    contenders = {name: c for name, c in known.items() if name not in ("eager", "inductor")}

    def refusal(family: str, subgraph: Subgraph) -> str | None:
        """Inductor alone makes no candidate: it is a way to run the whole model, and is measured as that."""
        reasons = []
        for name, contender in contenders.items():
            try:
                found = contender if isinstance(contender, str) else contender.variants(subgraph, device, config.effort)
            except Exception as error:  # isolation boundary: what fails here would fail in the race too
                found = f"it failed with {in_a_line(error)}."
            if not isinstance(found, str):
                return None
            reasons.append(f"{name}: {found}")
        return " ".join(reasons)

    return refusal


def _plan(
    workload: Workload,
    device: Device,
    environment: Environment,
    config: Config,
    chosen: tuple[tuple[Candidate, int], ...],
    races: dict[str, RaceResult],
    decisions: dict[str, Decision],
) -> Plan:
    entries = []
    for candidate, sites in chosen:
        decision = decisions[candidate.id]
        won = next(r for r in races[candidate.id].contenders if r.name == decision.winner)
        entries.append(
            Entry(
                id=candidate.id,
                family=candidate.family,
                chain=list(candidate.subgraph.chain),
                subgraph=candidate.subgraph.to_json(),
                contender=decision.winner,
                variant=won.variant,
                sites=sites,
                speedup=decision.speedup,
            )
        )
    return Plan(
        target=workload.name,
        mode=workload.mode,
        device_kind=device.kind,
        device_name=device.name,
        torch=environment.torch,
        tilelang=environment.tilelang,
        entries=entries,
        templates=[str(Path(t).resolve()) for t in config.templates],
    )


def _result(
    candidate: Candidate,
    raced: RaceResult,
    decision: Decision,
    plan: Plan,
    verdict: EndToEnd,
) -> CandidateResult:
    status, reason = "kept", decision.reason
    if decision.accepted and candidate.id in {e.id for e in plan.entries}:
        status = "accepted"
    elif decision.accepted and candidate.id in verdict.dropped:
        status, reason = "dropped", reason + " In the whole model it gave a wrong result, so it was taken out."
    elif decision.accepted and plan.is_empty:
        status, reason = "dropped", reason + " The whole model gains nothing from it."
    elif decision.accepted and decision.winner == "inductor" and plan.composition in COMPILED:
        reason += " Inductor runs the rest of the patched model, so this chain is left to it."
    elif decision.accepted:
        reason += " Another accepted chain saves more on the same operators."
    return CandidateResult(
        id=candidate.id,
        key=candidate.key,
        family=candidate.family,
        chain=list(candidate.subgraph.chain),
        sites=list(candidate.sites),
        inputs=[str(s) for s in candidate.subgraph.inputs],
        outputs=[str(s) for s in candidate.subgraph.output_specs],
        time_us=candidate.time_us,
        share=candidate.share,
        bound_us=candidate.bound_us,
        gain_bound_us=candidate.gain_us,
        launches_removed=candidate.launches_removed,
        flops=candidate.flops,
        bytes=candidate.bytes,
        status=status,
        reason=reason,
        winner=decision.winner,
        speedup=decision.speedup,
        speedup_over_eager=decision.speedup_over_eager,
        pays_back_calls=decision.pays_back_calls,
        contenders=list(raced.contenders),
    )


def _masks(count: int) -> str:
    if not count:
        return ""
    subject = f"{count} attentions get their masks" if count > 1 else "One attention gets its mask"
    return (
        f"{subject} another way in the patched model: a constant one is left out (is_causal or nothing), and one that"
        " fused kernels can't read is made dense."
    )


def _settings(config: Config, races: Mapping[str, RaceResult], folder: Path | None, notes: list[str]) -> dict[str, Any]:
    """What a reader needs to judge the numbers: the configuration and how it was measured."""
    policy = [
        "A chain's contenders run in child processes on the captured activations and on fresh inputs.",
        "Each is held against the chain in float64: its error may be twice eager's own plus one rounding step; where"
        " it says so, twice that of another evaluation the framework may make.",
        *notes,
        *dict.fromkeys(f"Chains: {r.policy}." for r in races.values() if r.policy),
        "The whole model is timed unprofiled in interleaved rounds, each second one in reverse order;"
        f" a sample lasts at least {SAMPLE_S * 1e3:.0f} ms."
        " Intervals are 95 % bootstrap intervals of the paired rounds.",
        f"A chain is accepted if its interval's lower end beats every cheaper contender {config.threshold:.2f} times.",
    ]
    settings = config.model_dump(mode="json", exclude={"cache_dir", "output"})
    return settings | {"policy": policy, "run_dir": str(folder) if folder else ""}
