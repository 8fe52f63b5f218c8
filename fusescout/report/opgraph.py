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
    """The deepest level of modules that still makes a readable number of boxes."""
    ops = session.profile.ops
    depth = max((op.module.count(".") + 1 for op in ops if op.module), default=0)
    while True:
        segments = _segments(ops, depth)
        folds = _folds([_signature(s, depth) for s in segments])
        count = sum(period for _, period, _ in folds)
        if count <= GOOD_BOXES or depth == 0 or (count <= MAX_BOXES and depth == 1):
            break
        depth -= 1
    while count > MAX_BOXES:
        segments = [[*a, *b] for a, b in zip(segments[::2], [*segments[1::2], []], strict=False)]
        folds = [(k, 1, 1) for k in range(len(segments))]
        count = len(folds)
    return _boxes(session, segments, folds, depth)


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
            label = _prefix(calls[0][0].module, depth)
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
    """Runs of operators in the same module of this depth, in graph order."""
    runs: list[list[OpRow]] = []
    for op in ops:
        last = runs[-1][-1] if runs else None
        if last and last.graph == op.graph and _prefix(last.module, depth) == _prefix(op.module, depth):
            runs[-1].append(op)
        else:
            runs.append([op])
    return runs


def _prefix(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _signature(segment: list[OpRow], depth: int) -> str:
    """Equal for segments that differ in layer numbers only."""
    return "\n".join([str(segment[0].graph), pattern(_prefix(segment[0].module, depth)), *(op.op for op in segment)])


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
