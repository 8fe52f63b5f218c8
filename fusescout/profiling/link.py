"""Joins the tables of a trace: GPU event → launch → operator, marker and, for backward, the forward marker.

A GPU event belongs to the launch with its correlation id; a launch belongs to the innermost operator and marker that
contain it on its thread. Backward operators carry the sequence number of the forward operator that made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from fusescout.profiling.trace import RESOLUTION_US
from fusescout.profiling.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Ints = npt.NDArray[np.int64]


def link_gpu(trace: Trace) -> pd.DataFrame:
    """Where each row of `trace.gpu` comes from.

    Returns:
        A frame of as many rows: launch, op, marker (row numbers, -1 for none), is_backward, launch_ts, launch_end (µs).
    """
    import numpy as np
    import pandas as pd

    launch = _launch_of(trace)
    op = _take(enclosing(trace.ops, trace.launches), launch)
    # An event whose launch record was lost may still name its operator.
    by_external = _first_row(trace.ops["external"])
    external = trace.gpu["external"].tolist()
    for row in np.flatnonzero(op < 0).tolist():
        op[row] = by_external.get(external[row], -1)
    marker_of_op, is_backward_op = link_ops(trace)
    direct = _take(enclosing(trace.markers, trace.launches), launch)
    launch_end = (trace.launches["ts"] + trace.launches["dur"]).to_numpy()
    own_ts = trace.gpu["ts"].to_numpy()
    return pd.DataFrame(
        {
            "launch": launch,
            "op": op,
            "marker": np.where(direct >= 0, direct, _take(marker_of_op, op)),
            "is_backward": (direct < 0) & _take(is_backward_op, op, False),
            "launch_ts": np.where(launch >= 0, _take(trace.launches["ts"].to_numpy(), launch), own_ts),
            "launch_end": np.where(launch >= 0, _take(launch_end, launch), own_ts),
        }
    )


def link_ops(trace: Trace) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each row of `trace.ops`: the marker it belongs to (-1 for none), and whether it ran in backward."""
    import numpy as np

    ops = trace.ops
    inside = enclosing(trace.markers, ops)
    backward = np.flatnonzero(_is_backward(ops))
    anchor = enclosing(ops.iloc[backward], ops)
    marker_of_anchor = _take(inside, _forward_of(trace, backward))
    marker = np.where((anchor >= 0) & (inside < 0), _take(marker_of_anchor, anchor), inside)
    return marker, anchor >= 0


def enclosing(outer: pd.DataFrame, inner: pd.DataFrame) -> Ints:
    """Row number in `outer` of the innermost interval that contains the start of each `inner` row on its track, or -1.

    Both are ordered by start. Intervals may cross: of those that are open, the one that started last counts. An
    interval contains itself.
    """
    import numpy as np

    found = np.full(len(inner), -1, dtype=np.int64)
    if not len(outer) or not len(inner):
        return found
    groups = inner.groupby("track", sort=False).indices
    for track, rows in outer.groupby("track", sort=False).indices.items():
        asked = groups.get(track)
        if asked is not None:
            starts = outer["ts"].to_numpy()[rows]
            ends = starts + outer["dur"].to_numpy()[rows]
            _sweep(
                starts.tolist(),
                ends.tolist(),
                rows.tolist(),
                inner["ts"].to_numpy()[asked].tolist(),
                asked.tolist(),
                found,
            )
    return found


def _sweep(
    starts: list[float], ends: list[float], rows: list[int], times: list[float], asked: list[int], found: Any
) -> None:
    stack: list[int] = []
    k, count = 0, len(starts)
    for time, target in zip(times, asked, strict=True):
        while k < count and starts[k] <= time:
            while stack and ends[stack[-1]] <= starts[k]:
                stack.pop()
            stack.append(k)
            k += 1
        while stack and ends[stack[-1]] + RESOLUTION_US < time:
            stack.pop()
        if stack:
            found[target] = rows[stack[-1]]


def _launch_of(trace: Trace) -> Ints:
    import numpy as np

    rows = _first_row(trace.launches["correlation"])
    return np.array([rows.get(c, -1) for c in trace.gpu["correlation"].tolist()], dtype=np.int64)


def _first_row(ids: pd.Series) -> dict[int, int]:
    """Row number by id; ids below 1 mean none."""
    rows: dict[int, int] = {}
    for row, value in enumerate(ids.tolist()):
        if value > 0:
            rows.setdefault(value, row)
    return rows


def _is_backward(ops: pd.DataFrame) -> npt.NDArray[np.bool_]:
    import numpy as np

    return np.asarray((ops["forward_thread"] > 0) & (ops["sequence"] >= 0), dtype=bool)


def _forward_of(trace: Trace, backward: Ints) -> Ints:
    """The forward operator (row number) of each backward operator, by arrow or by sequence number.

    Sequence numbers count per thread, so where several threads ran forward only the arrows are certain.
    """
    import numpy as np

    ops = trace.ops
    sequence = ops["sequence"].tolist()
    thread = ops["forward_thread"].tolist()
    # Operators that make no gradient don't use their number up: the last one to bear it is the one that did.
    last = {sequence[r]: r for r in np.flatnonzero((ops["sequence"] >= 0) & (ops["forward_thread"] <= 0)).tolist()}
    row_at = {key: r for r, key in enumerate(zip(ops["track"].tolist(), ops["ts"].tolist(), strict=True))}
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for ts, track, arrow, is_end in trace.flows[["ts", "track", "id", "is_end"]].itertuples(index=False, name=None):
        if (row := row_at.get((track, ts))) is not None:
            (ends if is_end else starts)[arrow] = row
    drawn = {(sequence[end], thread[end]): starts[arrow] for arrow, end in ends.items() if arrow in starts}
    pairs = [(sequence[r], thread[r]) for r in backward.tolist()]
    return np.array([drawn.get(pair, last.get(pair[0], -1)) for pair in pairs], dtype=np.int64)


def _take(values: Any, index: Ints, missing: Any = -1) -> Any:
    """values[index], and `missing` where the index is negative."""
    import numpy as np

    if not len(values):
        return np.full(len(index), missing)
    return np.where(index >= 0, np.asarray(values)[np.maximum(index, 0)], missing)
