"""A copy of the kept Chrome trace that TensorBoard's profiler plugin (torch-tb-profiler 0.4.3) reads correctly.

The plugin is unmaintained and misreads current traces: it knows the launch category `Runtime` only, so every operator's
device time is 0; it expects `forward_backward` flows; it counts GPU step annotations as steps; an event without a
category drops the whole run. No number in a FuseScout report comes from it.
"""

from __future__ import annotations

import gzip
import time
import zlib
from pathlib import Path
from typing import Any

import orjson

from fusescout.errors import TraceUnreadable

LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime"})


def write_for_tensorboard(trace: Path, folder: Path, worker: str = "fusescout") -> Path:
    """Write the copy under the only kind of name that the plugin looks at; gives its path.

    Args:
        trace: a Chrome trace, .json or .json.gz.
        folder: TensorBoard's log folder.
        worker: shown as the worker's name.

    Raises:
        TraceUnreadable: it is missing or no Chrome trace.
    """
    try:
        data = trace.read_bytes()
        raw = orjson.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceUnreadable(str(trace), str(error)) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("traceEvents"), list):
        raise TraceUnreadable(str(trace), "it has no list of traceEvents")
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{worker}.{time.time_ns()}.pt.trace.json.gz"
    place.write_bytes(gzip.compress(orjson.dumps(rewritten(raw)), compresslevel=5))
    return place


def rewritten(raw: dict[str, Any]) -> dict[str, Any]:
    """The trace in the plugin's terms; `traceEvents` comes last, since it splices counters in at the last bracket."""
    events = [_event(e) for e in raw["traceEvents"] if isinstance(e, dict) and not _is_gpu_step(e)]
    return {k: v for k, v in raw.items() if k != "traceEvents"} | {"traceEvents": events}


def _is_gpu_step(event: dict[str, Any]) -> bool:
    return event.get("cat") == "gpu_user_annotation" and str(event.get("name", "")).startswith("ProfilerStep#")


def _event(event: dict[str, Any]) -> dict[str, Any]:
    category = event.get("cat")
    if category in LAUNCHES:
        return event | {"cat": "Runtime"}
    if category == "fwdbwd":
        return event | {"cat": "forward_backward"}
    if category is None and event.get("ph") == "X":
        return event | {"cat": "unknown"}
    return event
