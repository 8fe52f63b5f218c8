"""The three runs of a profile, never mixed: captured graphs with markers for attribution, the plain model under a
light profiler for kernel times, and the plain model unprofiled for wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fusescout.capture.protect import copy_arguments
from fusescout.capture.protect import protected
from fusescout.flops import op_class
from fusescout.profiling.marked import Replay
from fusescout.profiling.recorder import record
from fusescout.profiling.recorder import refuse_if_busy
from fusescout.profiling.recorder import synchronize
from fusescout.profiling.result import Profile
from fusescout.profiling.sequence import Call
from fusescout.profiling.sequence import Item
from fusescout.profiling.sequence import align
from fusescout.profiling.sequence import cpu_calls
from fusescout.profiling.sequence import gpu_calls
from fusescout.profiling.sequence import kernel_times
from fusescout.profiling.sequence import node_times
from fusescout.profiling.sequence import on_grid
from fusescout.profiling.sequence import typical
from fusescout.session import Interval
from fusescout.stats import median_interval

if TYPE_CHECKING:
    from fusescout.capture import Capture
    from fusescout.workload import Workload

WARM_UP = 3
MAX_SAMPLES = 100
SAMPLE_SECONDS = 0.5
SLOW_S, FEW_RUNS = 0.1, 3
"""Of a step that takes longer, fewer runs are recorded: they scatter less than a fast one's."""
IDLE_SHARE = 0.2
"""A GPU that is idle for more of the step than this, mostly waiting for launches, is host-bound."""
NO_RECORDS = "torch.profiler gave no GPU records, twice: nodes are timed by CUDA events, and what else runs isn't seen."
OUTSIDE = "(outside of the captured graphs)"


def run(workload: Workload, capture: Capture, runs: int, trace_path: Path | None) -> Profile:
    """See `fusescout.profiling.profile`."""
    refuse_if_busy()
    runs = max(runs, 1)
    with protected(workload.model):
        for _ in range(WARM_UP):
            start = time.perf_counter()
            _prepare(workload)()
            synchronize(workload.device)
            warm_s = time.perf_counter() - start
        if warm_s > SLOW_S:
            runs = min(runs, FEW_RUNS)
        replay = Replay(capture.graphs, workload.model, workload.mode == "training")
        warnings = replay.drop_failing()
        synchronize(workload.device)
        if workload.device.startswith("cuda"):
            found = _on_cuda(workload, replay, runs, trace_path)
        else:
            found = _on_cpu(workload, capture, replay, runs, trace_path)
        step = wall_time(workload, runs)
    items, calls, source, notes = found
    attributed = sum(i.us for i in items if i.owner is not None)
    unlinked = sum(i.us for i in items if i.owner is None)
    views = {(g.index, n.name) for g in capture.graphs for n in g.graph.nodes if op_class(n.target) == "view"}
    busy = median(c.busy_us for c in calls) if calls else attributed + unlinked
    idle = max(step.mid - busy, 0.0)
    host, between, other = _idle_split(calls, idle)
    return Profile(
        device=workload.device.partition(":")[0],
        step=step,
        nodes=node_times(items, frozenset() if source == "kernels" else frozenset(views)),
        kernels=kernel_times(items),
        kernel_us=attributed + unlinked,
        attributed_us=attributed,
        unlinked_us=unlinked,
        busy_us=busy,
        launches=int(median(c.launches for c in calls)) if calls else 0,
        idle_host_us=host,
        idle_kernel_us=between,
        idle_other_us=other,
        host_bound=source == "kernels" and idle > IDLE_SHARE * step.mid and host > idle / 2,
        runs=runs,
        source=source,
        trace=str(trace_path) if trace_path else None,
        warnings=tuple(dict.fromkeys((*warnings, *notes))),
    )


def wall_time(workload: Workload, runs: int) -> Interval:
    """Unprofiled wall time of one step in µs, each finished before the next begins."""
    samples: list[float] = []
    deadline = time.perf_counter() + SAMPLE_SECONDS
    while len(samples) < max(runs, FEW_RUNS) or (time.perf_counter() < deadline and len(samples) < MAX_SAMPLES):
        step = _prepare(workload)
        synchronize(workload.device)
        start = time.perf_counter()
        step()
        synchronize(workload.device)
        samples.append((time.perf_counter() - start) * 1e6)
    return median_interval(samples)


Found = tuple[Sequence[Item], Sequence[Call], str, Sequence[str]]
"""Items of one step, the profiled calls of the plain model, where the times come from, warnings."""


def _on_cuda(workload: Workload, replay: Replay, runs: int, trace_path: Path | None) -> Found:
    light, light_notes = _record_kernels(lambda: _prepare(workload), runs, workload.device, trace_path)
    if not light:
        return _by_events(replay, runs), [], "events", [NO_RECORDS]
    theirs, light_note = typical(light)
    notes = [*light_notes, light_note]
    if not replay.graphs:
        return theirs, light, "kernels", [n for n in notes if n]
    marked, marked_notes = _record_kernels(replay.prepare, runs, workload.device, None)
    ours, marked_note = typical(marked)
    items = align(ours, theirs)
    notes += [*marked_notes, marked_note]
    if items is None:
        notes.append(
            f"The captured graphs ran other kernels ({len(ours)}, {sum(i.us for i in ours):.0f} µs) than the model "
            f"({len(theirs)}, {sum(i.us for i in theirs):.0f} µs): times are those of the captured graphs."
        )
        items = ours
    return items, light, "kernels", [n for n in notes if n]


def _record_kernels(
    prepare: Callable[[], Callable[[], object]], runs: int, device: str, keep: Path | None
) -> tuple[list[Call], Sequence[str]]:
    """Profiled calls with their GPU events; none if the profiler recorded none in two attempts."""
    for _ in range(2):
        trace = record(prepare, runs, device, keep)
        calls = gpu_calls(trace)
        if any(c.items for c in calls):
            return calls, trace.warnings
    return [], ()


def _by_events(replay: Replay, runs: int) -> list[Item]:
    targets = {(g.index, n.name): n.op for g in replay.graphs for n in g.graph.nodes}
    return [Item(targets.get(key, key[1]), on_grid(us), key) for key, us in replay.event_times(runs).items()]


def _on_cpu(workload: Workload, capture: Capture, replay: Replay, runs: int, trace_path: Path | None) -> Found:
    """On CPU the markers themselves are timed: operators run inside them."""
    trace = record(lambda: _prepare(workload), runs, workload.device, trace_path)
    plain = cpu_calls(trace)
    if not replay.graphs:
        items, note = typical(plain)
        return items, plain, "operators", [*trace.warnings, note] if note else trace.warnings
    marked = record(replay.prepare, runs, workload.device)
    calls = cpu_calls(marked)
    items, note = typical(calls)
    if capture.breaks or len(capture.graphs) != 1 or len(replay.graphs) != 1:
        # Of the fastest calls, because a difference of two noisy numbers is the noisiest of all.
        excess = min(map(_total, plain)) / max(min(map(_total, calls)), 1e-3) - 1
        items = (*items, Item(OUTSIDE, on_grid(excess * sum(i.us for i in items)))) if excess > 0 else items
    return items, plain, "operators", [n for n in (*trace.warnings, *marked.warnings, note) if n]


def _total(call: Call) -> float:
    return sum(i.us for i in call.items)


def _idle_split(calls: Sequence[Call], idle_us: float) -> tuple[float, float, float]:
    """Unprofiled idle time, split as it splits under the profiler. All of it is the host's where no GPU is watched."""
    splits = [(c.idle_host_us, c.idle_kernel_us, c.idle_other_us) for c in calls]
    sums = [median(s[k] for s in splits) for k in range(3)] if splits else [0.0, 0.0, 0.0]
    total = sum(sums)
    if not total:
        return idle_us, 0.0, 0.0
    return idle_us * sums[0] / total, idle_us * sums[1] / total, idle_us * sums[2] / total


def _prepare(workload: Workload) -> Callable[[], object]:
    """The next step, on copied inputs and with gradients cleared as `zero_grad` would."""
    args, kwargs = copy_arguments(workload.args, workload.kwargs)
    for parameter in workload.model.parameters():
        parameter.grad = None
    return replace(workload, args=args, kwargs=kwargs).step
