"""The op graph as a reader wants it: one box per module call, equal layers folded into one, at most 300 boxes.

`collapse(session)` groups operators that run one after another in the same module into boxes, so that the boxes stay
acyclic, and folds repeats such as twelve equal encoder layers. `drawing.py` puts them on a plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusescout.report.facts import pattern
from fusescout.session import OpRow
from fusescout.session import Session

MAX_BOXES, GOOD_BOXES, MAX_PERIOD = 300, 60, 64


@dataclass(frozen=True, slots=True)
class Box:
    """Operators of one module call; of `times` calls where layers are folded.

    Attributes:
        label: the module path, with "*" for the layer number of folded ones.
        ops: the operators of the first call, in order.
        time_us, share: summed over all calls.
        candidates: ids of candidates with nodes in it.
    """

    label: str
    ops: tuple[OpRow, ...]
    time_us: float
    share: float
    times: int
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collapsed:
    """Boxes in topological order, edges between their indices, and folds as (first box, last box, times)."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    folds: tuple[tuple[int, int, int], ...]


Fold = tuple[int, int, int]
"""(first segment, length of one period, number of periods)."""


def collapse(session: Session) -> Collapsed:
    """The deepest level of modules that still makes a readable number of boxes; single operators without modules."""
    ops = session.profile.ops
    depth = max((op.module.count(".") + 1 for op in ops if op.module), default=0)
    segments = _segments(ops, depth)
    folds = _folds([_signature(s, depth) for s in segments])
    while depth > 1 and _count(folds) > GOOD_BOXES:
        depth -= 1
        segments = _segments(ops, depth)
        folds = _folds([_signature(s, depth) for s in segments])
    if _count(folds) > MAX_BOXES:
        size = math.ceil(len(segments) / GOOD_BOXES)
        segments = [[op for s in segments[k : k + size] for op in s] for k in range(0, len(segments), size)]
        folds = [(k, 1, 1) for k in range(len(segments))]
    return _boxes(session, segments, folds, depth)


def _count(folds: list[Fold]) -> int:
    return sum(period for _, period, _ in folds)


def _boxes(session: Session, segments: list[list[OpRow]], folds: list[Fold], depth: int) -> Collapsed:
    candidates: dict[tuple[int, str], list[str]] = {}
    for c in session.candidates:
        for site in c.sites:
            for node in site.nodes:
                candidates.setdefault((site.graph, node), []).append(c.id)
    boxes: list[Box] = []
    frames: list[tuple[int, int, int]] = []
    home: dict[tuple[int, str], tuple[int, int]] = {}
    for start, period, times in folds:
        if times > 1:
            frames.append((len(boxes), len(boxes) + period - 1, times))
        for k in range(period):
            calls = [segments[start + k + turn * period] for turn in range(times)]
            members = [op for call in calls for op in call]
            for turn, call in enumerate(calls):
                home.update({(op.graph, op.node): (len(boxes), turn) for op in call})
            label = _label(calls[0], depth)
            ids = dict.fromkeys(i for op in members for i in candidates.get((op.graph, op.node), ()))
            boxes.append(
                Box(
                    pattern(label) if times > 1 else label,
                    tuple(calls[0]),
                    sum(op.time_us for op in members if math.isfinite(op.time_us)),
                    sum(op.share for op in members if math.isfinite(op.share)),
                    times,
                    tuple(ids),
                )
            )
    edges: dict[tuple[int, int], None] = {}
    for edge in session.profile.edges:
        source, target = home.get((edge.graph, edge.source)), home.get((edge.graph, edge.target))
        if source and target and source[0] < target[0]:
            edges[source[0], target[0]] = None
    return Collapsed(tuple(boxes), tuple(edges), tuple(frames))


def _segments(ops: Sequence[OpRow], depth: int) -> list[list[OpRow]]:
    """Runs of operators in the same module of this depth, in graph order; depth 0 keeps operators single."""
    runs: list[list[OpRow]] = []
    for op in ops:
        last = runs[-1][-1] if runs and depth else None
        if last and last.graph == op.graph and _prefix(last, depth) == _prefix(op, depth):
            runs[-1].append(op)
        else:
            runs.append([op])
    return runs


def _prefix(op: OpRow, depth: int) -> str:
    return ".".join(op.module.split(".")[:depth]) if depth else op.op


def _label(segment: list[OpRow], depth: int) -> str:
    """The module all operators are in, or the first and the last of several."""
    first, last = _prefix(segment[0], depth), _prefix(segment[-1], depth)
    return first if first == last else f"{first} … {last}"


def _signature(segment: list[OpRow], depth: int) -> str:
    """Equal for segments that differ in layer numbers only."""
    return "\n".join([str(segment[0].graph), pattern(_prefix(segment[0], depth)), *(op.op for op in segment)])


def _folds(signatures: list[str]) -> list[Fold]:
    """Cut the sequence into repeats, greedily: at each place the period that covers most."""
    folds: list[Fold] = []
    at = 0
    while at < len(signatures):
        best = (at, 1, 1)
        for period in range(1, min(MAX_PERIOD, (len(signatures) - at) // 2) + 1):
            times = 1
            while signatures[at : at + period] == signatures[at + times * period : at + (times + 1) * period]:
                times += 1
            if times > 1 and period * times > best[1] * best[2]:
                best = (at, period, times)
        folds.append(best)
        at += best[1] * best[2]
    return folds
