"""Remembers what a kernel cost to compile: with a warm compiler cache the clock alone would flatter every payback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusescout.device import Device
from fusescout.session import write_atomic


def cold_seconds(cache_dir: Path, what: Sequence[Any], device: Device, measured_s: float) -> float:
    """The longest time that compiling this was ever seen to take with this cache, in seconds.

    Args:
        cache_dir: where it is remembered.
        what: all that tells this code from other code, as plain data.
        device: the device it was compiled for.
        measured_s: what it took now.
    """
    text = json.dumps([*what, device.name, device.arch], sort_keys=True, default=str)
    file = cache_dir / "compile_seconds" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    known_s = 0.0
    with suppress(OSError, ValueError, TypeError):  # absent or damaged: this compilation is all that is known
        known_s = float(json.loads(file.read_bytes()))
    if measured_s > known_s:
        with suppress(OSError):  # a full disk costs the memory of it, not the kernel
            write_atomic(file, json.dumps(measured_s).encode())
    return max(known_s, measured_s)
