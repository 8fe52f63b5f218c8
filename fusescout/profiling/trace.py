"""Reads Chrome traces, from torch.profiler or elsewhere, into flat tables. Pure: no torch, nothing is run.

Times are float µs. Real traces are untidy: launches come as runtime or driver calls, categories are missing,
timestamps coincide, one graph launch owns many kernels, a duration can be nonsense. What can be repaired is repaired
and said in `warnings`; what is not understood is left out.
"""

from __future__ import annotations

import gc
import gzip
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from fusescout.errors import TraceUnreadable

if TYPE_CHECKING:
    import pandas as pd

RESOLUTION_US = 0.002
"""Timestamps are rounded to ns and kept in floats: ends that differ by less than this are the same."""
MARKER = "fs:"
"""Markers that a structural run puts around captured nodes are named "fs:graph:node"."""

CUT_SHARE = 0.01
"""More overlap on a stream than this share of GPU time is no longer kernels that start a little early, but nonsense."""

_GPU = {"kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset"}
_KINDS = ("kernel", "memcpy", "memset")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = b"\n  },\n  {"
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Trace:
    """Tables of one trace, each ordered by start time. `ts` and `dur` are µs, `track` numbers a (pid, tid).

    Attributes:
        gpu: ts, dur, name, kind ("kernel", "memcpy", "memset"), device, stream, correlation, external.
        launches: runtime and driver calls: ts, dur, name, track, correlation, external.
        ops: framework operators: ts, dur, name, track, external, sequence, forward_thread (0 in forward).
        markers: ts, dur, name, track of the "fs:graph:node" markers.
        annotations: ts, dur, name, track of all other user annotations.
        flows: forward-to-backward arrows: ts, track, id, is_end.
        tracks: (pid, tid) texts by track number.
    """

    gpu: pd.DataFrame
    launches: pd.DataFrame
    ops: pd.DataFrame
    markers: pd.DataFrame
    annotations: pd.DataFrame
    flows: pd.DataFrame
    tracks: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def kernels(self) -> pd.DataFrame:
        """The kernels among `gpu`."""
        return self.gpu[self.gpu["kind"] == "kernel"]


def read(source: Path | str | bytes) -> Trace:
    """Read a Chrome trace: a path to .json or .json.gz, or the bytes of one.

    Raises:
        TraceUnreadable: no such file, not gzip or JSON, or no list of events in it.
    """
    label = "<bytes>" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceUnreadable(label, f"{error}") from error
    was_enabled = gc.isenabled()
    gc.disable()  # Millions of young dicts that all die at once: the collector would only slow this down.
    try:
        return _tables(data, label)
    finally:
        if was_enabled:
            gc.enable()


def _tables(data: bytes, label: str) -> Trace:
    import orjson

    for in_pieces in (True, False):  # A file laid out in another way may not come apart where torch.profiler's does.
        tables = _Tables()
        try:
            for event in _events(data, label, in_pieces):
                tables.add(event)
            return tables.finish()
        except orjson.JSONDecodeError as error:
            failure = error
    raise TraceUnreadable(label, f"it is not valid JSON ({failure})") from failure


def _events(data: bytes, label: str, in_pieces: bool) -> Iterator[Any]:
    """Events one by one. A file laid out as torch.profiler writes it is parsed in pieces, so memory stays flat."""
    import orjson

    head = _EVENTS.search(data) if in_pieces else None
    start = head.end() if head else 0
    pieces: list[tuple[int, int]] = []
    position = start
    while head and (cut := data.find(_BETWEEN, position + _CHUNK)) >= 0:
        pieces.append((position, cut + 4))
        position = cut + 5
    # The last piece holds what follows the list too, so it is parsed as an object of its own.
    rest = orjson.loads(b'{"traceEvents":[' + data[position:] if pieces else data)
    for begin, end in pieces:
        yield from orjson.loads(b"[" + data[begin:end] + b"]")
    events = rest.get("traceEvents") if isinstance(rest, dict) else rest
    if not isinstance(events, list):
        raise TraceUnreadable(label, 'it has no "traceEvents" list')
    yield from events


class _Table:
    """Columns under construction: arrays of numbers, and one list of shared name strings."""

    def __init__(self, **numbers: str) -> None:
        self.numbers = {name: array(code) for name, code in numbers.items()}
        self.names: list[str] = []

    def frame(self) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        columns: dict[str, Any] = {k: np.array(v) for k, v in self.numbers.items()}
        columns["name"] = pd.Series(self.names, dtype=object)
        frame = pd.DataFrame(columns)
        # Of events that start together the longer one is the outer one.
        length = columns.get("dur", columns["ts"])
        order = np.lexsort((-length, columns["ts"]))
        return frame.iloc[order].reset_index(drop=True)


class _Tables:
    def __init__(self) -> None:
        timed = {"ts": "d", "dur": "d"}
        self.gpu = _Table(**timed, kind="b", device="q", stream="q", correlation="q", external="q")
        self.launches = _Table(**timed, track="q", correlation="q", external="q")
        self.ops = _Table(**timed, track="q", external="q", sequence="q", forward_thread="q")
        self.markers = _Table(**timed, track="q")
        self.annotations = _Table(**timed, track="q")
        self.flows = _Table(ts="d", track="q", id="q", is_end="b")
        self.tracks: dict[tuple[str, str], int] = {}
        self.names: dict[str, str] = {}
        self.uncategorised = self.odd = 0

    def add(self, event: Any) -> None:
        if not isinstance(event, dict):
            self.odd += 1
            return
        phase, category = event.get("ph"), event.get("cat")
        if phase == "X":
            if not isinstance(category, str):
                self.uncategorised += 1
                return
            self._add_timed(event, category.lower())
        elif phase in ("s", "f") and category in ("fwdbwd", "forward_backward"):
            row = (_number(event.get("ts")), self._track(event), _integer(event.get("id")), phase == "f")
            if row[0] is not None:
                self._put(self.flows, "", *row)

    def _add_timed(self, event: dict[str, Any], category: str) -> None:
        ts, dur = _number(event.get("ts")), _number(event.get("dur", 0.0))
        if ts is None or dur is None or dur < 0:
            self.odd += 1
            return
        name = str(event.get("name", ""))
        name = self.names.setdefault(name, name)
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in _GPU:
            kind = _KINDS.index(_GPU[category])
            device = _integer(args.get("device"), event.get("pid"))
            stream = _integer(args.get("stream"), event.get("tid"))
            self._put(self.gpu, name, ts, dur, kind, device, stream, *_ids(args))
        elif category.endswith(("runtime", "driver")):
            self._put(self.launches, name, ts, dur, self._track(event), *_ids(args))
        elif name.startswith(MARKER):
            if category in ("cpu_op", "user_annotation"):
                self._put(self.markers, name, ts, dur, self._track(event))
        elif category == "user_annotation" or (category == "cpu_op" and name.startswith("## ")):
            self._put(self.annotations, name, ts, dur, self._track(event))
        elif category in ("cpu_op", "operator"):
            sequence, thread = _integer(args.get("Sequence number")), _integer(args.get("Fwd thread id", 0))
            self._put(self.ops, name, ts, dur, self._track(event), _external(args), sequence, thread)

    def _put(self, table: _Table, name: str, *row: Any) -> None:
        table.names.append(name)
        for column, value in zip(table.numbers.values(), row, strict=True):
            column.append(value)

    def _track(self, event: dict[str, Any]) -> int:
        return self.tracks.setdefault((str(event.get("pid")), str(event.get("tid"))), len(self.tracks))

    def finish(self) -> Trace:
        import pandas as pd

        warnings = []
        gpu = self.gpu.frame()
        gpu["kind"] = pd.Categorical.from_codes(gpu["kind"], _KINDS)
        gpu, clipped, removed_us = clip_overlaps(gpu)
        if removed_us > CUT_SHARE * (gpu["dur"].sum() + removed_us):
            warnings.append(
                f"{clipped} GPU events ran into the next one on their stream; {removed_us:.1f} µs were cut off."
            )
        if self.uncategorised:
            warnings.append(f"{self.uncategorised} events without a category were left out.")
        if self.odd:
            warnings.append(f"{self.odd} events with no usable time or duration were left out.")
        flows = self.flows.frame().drop(columns="name")
        flows["is_end"] = flows["is_end"].astype(bool)
        return Trace(
            gpu=gpu,
            launches=self.launches.frame(),
            ops=self.ops.frame(),
            markers=self.markers.frame(),
            annotations=self.annotations.frame(),
            flows=flows,
            tracks=tuple(self.tracks),
            warnings=tuple(warnings),
        )


def clip_overlaps(gpu: pd.DataFrame) -> tuple[pd.DataFrame, int, float]:
    """Cut GPU events that last beyond the start of a later one on their stream: a stream runs one at a time.

    Returns:
        The frame, how many events were cut, and by how many µs in all.
    """
    import numpy as np

    dur = gpu["dur"].to_numpy(copy=True)
    ts = gpu["ts"].to_numpy()
    for rows in gpu.groupby(["device", "stream"], sort=False).indices.values():
        starts = ts[rows]
        after = np.searchsorted(starts, starts, side="right")
        has_next = after < len(rows)
        room = starts[np.minimum(after, len(rows) - 1)] - starts
        over = has_next & (dur[rows] > room + RESOLUTION_US)
        dur[rows[over]] = room[over]
    removed = gpu["dur"].to_numpy() - dur
    return gpu.assign(dur=dur), int((removed > 0).sum()), float(removed.sum())


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < 1e18 else None


def _integer(value: Any, fallback: Any = -1) -> int:
    for candidate in (value, fallback):
        if isinstance(candidate, int) and -(2**63) <= candidate < 2**63:
            return int(candidate)
        if isinstance(candidate, (str, float)):
            try:
                return int(candidate)
            except (ValueError, OverflowError):
                continue
    return -1


def _ids(args: dict[str, Any]) -> tuple[int, int]:
    return _integer(args.get("correlation")), _external(args)


def _external(args: dict[str, Any]) -> int:
    return _integer(args.get("External id", args.get("external id")))
