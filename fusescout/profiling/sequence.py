"""What ran in each profiled call, in launch order; and how several calls, and two runs, become one. Pure."""

from __future__ import annotations

from collections import Counter
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from difflib import SequenceMatcher
from statistics import median
from typing import TYPE_CHECKING

from fusescout.profiling.link import enclosing
from fusescout.profiling.link import link_gpu
from fusescout.profiling.link import link_ops
from fusescout.profiling.result import KernelTime
from fusescout.profiling.result import NodeTime
from fusescout.profiling.trace import MARKER
from fusescout.profiling.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

CALL = "fs-call:"
"""Annotation around each profiled call that counts."""
MAX_MATCH = 2000
"""Longest stretch of differing kernels that is worth aligning: the matcher takes quadratic time."""
MIN_MATCHED = 0.95
_BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True)
class Item:
    """One kernel (on CPU: one operator) of a call. `owner` is the (graph, node) that caused it, if known."""

    name: str
    us: float
    owner: tuple[int, str] | None = None
    is_backward: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One profiled call: its items in launch order, and how the time of the device splits (µs)."""

    items: tuple[Item, ...]
    busy_us: float
    launches: int
    idle_host_us: float = 0.0
    idle_kernel_us: float = 0.0
    idle_other_us: float = 0.0


def gpu_calls(trace: Trace) -> list[Call]:
    """The profiled calls of a trace, by their GPU events. An event belongs to the call in which it was launched."""
    gpu = trace.gpu.join(link_gpu(trace))
    gpu = gpu.iloc[gpu["launch_ts"].argsort(kind="stable").to_numpy()]
    owners = _owners(trace)
    calls = []
    for start, end in _windows(trace):
        rows = gpu[(gpu["launch_ts"] >= start) & (gpu["launch_ts"] <= end)]
        items = _items(rows, rows["marker"], owners)
        kernels = rows[rows["kind"] == "kernel"]
        linked = kernels[kernels["launch"] >= 0]["launch"]
        launches = int(linked.nunique()) + int((kernels["launch"] < 0).sum())
        calls.append(Call(items, union_us(rows["ts"], rows["dur"]), launches, *_idle(rows, start, end)))
    return calls


def cpu_calls(trace: Trace) -> list[Call]:
    """The profiled calls of a trace, by their outermost markers and operators."""
    import numpy as np
    import pandas as pd

    marker_of_op, backward = link_ops(trace)
    names = _marker_names(trace)
    owners = _owners(trace)
    markers = trace.markers.assign(name=names, owner=np.arange(len(trace.markers)), is_backward=False)
    ops = trace.ops.assign(owner=np.where(backward, marker_of_op, -1), is_backward=backward)
    columns = ["ts", "dur", "track", "name", "owner", "is_backward"]
    both = pd.concat([markers[columns], ops[columns]], ignore_index=True)
    both = both.iloc[np.lexsort((-both["dur"].to_numpy(), both["ts"].to_numpy()))].reset_index(drop=True)
    outer = both[_is_outermost(both)]
    calls = []
    for start, end in _windows(trace):
        rows = outer[(outer["ts"] >= start) & (outer["ts"] <= end)]
        items = _items(rows, rows["owner"], owners)
        calls.append(Call(items, union_us(rows["ts"], rows["dur"]), len(items)))
    return calls


def _items(rows: pd.DataFrame, marker: pd.Series, owners: Sequence[tuple[int, str]]) -> tuple[Item, ...]:
    columns = (rows["name"].tolist(), rows["dur"].tolist(), marker.tolist(), rows["is_backward"].tolist())
    return tuple(
        Item(name.removeprefix(_BACKWARD), us, owners[m] if m >= 0 else None, bool(backward))
        for name, us, m, backward in zip(*columns, strict=True)
    )


def typical(calls: Sequence[Call]) -> tuple[tuple[Item, ...], str]:
    """One call that stands for all: the median time of each item over the calls that ran the most common sequence.

    Times are kept on a grid of 2⁻¹⁰ µs, about the resolution of a trace, so that sums are exact in any order.

    Returns:
        The items, and a warning or "".
    """
    if not calls:
        return (), "A profiled run left no records of its calls."
    groups: dict[tuple[object, ...], list[Call]] = defaultdict(list)
    for call in calls:
        groups[tuple((i.name, i.owner, i.is_backward) for i in call.items)].append(call)
    chosen = max(groups.values(), key=lambda g: (len(g), len(g[0].items)))
    items = tuple(
        replace(item, us=on_grid(median(c.items[k].us for c in chosen))) for k, item in enumerate(chosen[0].items)
    )
    odd = len(calls) - len(chosen)
    counts = sorted({len(c.items) for c in calls})
    span = f"{counts[0]} to {counts[-1]} kernels each"
    return (
        items,
        f"{odd} of {len(calls)} profiled calls ran another sequence ({span}) and were left out." if odd else "",
    )


def on_grid(us: float) -> float:
    """The nearest multiple of 2⁻¹⁰ µs."""
    return round(us * 1024) / 1024


def align(structural: Sequence[Item], light: Sequence[Item]) -> tuple[Item, ...] | None:
    """The light run's kernels with the structural run's owners, or None if the two ran different kernels.

    Kernels of the light run that the structural run hasn't (Python between captured graphs, the loss) keep no owner.
    The two are held to be the same if nearly all of the time of one of them finds its place in the other.
    """
    ours, theirs = [i.name for i in structural], [i.name for i in light]
    head = 0
    while head < min(len(ours), len(theirs)) and ours[head] == theirs[head]:
        head += 1
    tail = 0
    while tail < min(len(ours), len(theirs)) - head and ours[-1 - tail] == theirs[-1 - tail]:
        tail += 1
    pairs = [(k, k) for k in range(head)]
    pairs += [(len(ours) - 1 - k, len(theirs) - 1 - k) for k in range(tail)]
    a, b = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    if a and b:
        if max(len(a), len(b)) > MAX_MATCH:
            return None
        for tag, i0, i1, j0, j1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if tag == "equal" or (tag == "replace" and i1 - i0 == j1 - j0):
                here = [(head + i, head + j) for i, j in zip(range(i0, i1), range(j0, j1), strict=True)]
                pairs += [(i, j) for i, j in here if ours[i] == theirs[j] or _are_variants(ours[i], theirs[j])]
    if not pairs and structural:
        return None
    of_ours = sum(structural[i].us for i, _ in pairs) / max(sum(i.us for i in structural), 1e-9)
    of_theirs = sum(light[j].us for _, j in pairs) / max(sum(i.us for i in light), 1e-9)
    if structural and max(of_ours, of_theirs) < MIN_MATCHED:
        return None
    twin = {j: structural[i] for i, j in pairs}
    nobody = Item("", 0.0)
    merged = ((item, twin.get(j, nobody)) for j, item in enumerate(light))
    return tuple(replace(item, owner=other.owner, is_backward=other.is_backward) for item, other in merged)


def _are_variants(a: str, b: str) -> bool:
    """Whether two kernels in one place may be one operator: libraries pick among variants, torch itself doesn't."""
    return "at::native" not in a and "at::native" not in b


def node_times(items: Iterable[Item], uncounted: frozenset[tuple[int, str]] = frozenset()) -> tuple[NodeTime, ...]:
    """Sums per owner, in order of first appearance. Items of `uncounted` owners count as no kernel (views on CPU)."""
    sums: dict[tuple[int, str], list[float]] = {}
    for item in items:
        if item.owner is not None:
            entry = sums.setdefault(item.owner, [0.0, 0, 0.0, 0])
            side = 2 if item.is_backward else 0
            entry[side] += item.us
            entry[side + 1] += item.owner not in uncounted
    return tuple(NodeTime(g, n, f, int(fk), b, int(bk)) for (g, n), (f, fk, b, bk) in sums.items())


def kernel_times(items: Iterable[Item]) -> tuple[KernelTime, ...]:
    """Sums per name, longest first."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.name].append(item)
    rows = [
        KernelTime(
            name,
            len(members),
            sum(i.us for i in members),
            tuple(dict.fromkeys(f"{i.owner[0]}:{i.owner[1]}" for i in members if i.owner)),
        )
        for name, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda k: (-k.time_us, k.name)))


def union_us(ts: pd.Series, dur: pd.Series) -> float:
    """Length of the union of intervals in µs."""
    return sum(end - start for start, end in _merged(ts, dur))


def _merged(ts: pd.Series, dur: pd.Series) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(zip(ts.tolist(), (ts + dur).tolist(), strict=True)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _idle(rows: pd.DataFrame, start: float, end: float) -> tuple[float, float, float]:
    """Idle µs in a call's window: before launches came, between launched kernels, and after the last one."""
    host = kernel = 0.0
    reached = start
    by_start = rows.sort_values("ts", kind="stable")
    for ts, dur, launch_end in by_start[["ts", "dur", "launch_end"]].itertuples(index=False, name=None):
        gap = ts - reached
        if gap > 0:
            waited = min(max(launch_end - reached, 0.0), gap)
            host += waited
            kernel += gap - waited
        reached = max(reached, ts + dur)
    return host, kernel, max(end - reached, 0.0)


def _windows(trace: Trace) -> list[tuple[float, float]]:
    rows = trace.annotations[["name", "ts", "dur"]].itertuples(index=False, name=None)
    return [(ts, ts + dur) for name, ts, dur in rows if name.startswith(CALL)]


def _owners(trace: Trace) -> list[tuple[int, str]]:
    found = []
    for name in trace.markers["name"].tolist():
        graph, _, node = name.removeprefix(MARKER).partition(":")
        found.append((int(graph), node))
    return found


def _marker_names(trace: Trace) -> list[str]:
    """The first operator inside each marker, as the name of what ran there; the marker's own name if there is none."""
    names: list[str] = trace.markers["name"].tolist()
    inside = enclosing(trace.markers, trace.ops).tolist()
    seen: Counter[int] = Counter()
    for marker, name in zip(inside, trace.ops["name"].tolist(), strict=True):
        if marker >= 0 and not seen[marker]:
            seen[marker] += 1
            names[marker] = name
    return names


def _is_outermost(intervals: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which intervals start outside of every earlier one on their track. They are ordered by start."""
    import numpy as np

    result = np.zeros(len(intervals), dtype=bool)
    reached: dict[int, float] = {}
    for row, (ts, dur, track) in enumerate(intervals[["ts", "dur", "track"]].itertuples(index=False, name=None)):
        if ts >= reached.get(track, float("-inf")):
            result[row] = True
            reached[track] = ts + dur
    return result
