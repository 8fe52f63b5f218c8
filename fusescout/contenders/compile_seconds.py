"""Remembers what a kernel cost to compile: with a warm compiler cache the clock alone would flatter every payback."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from fusescout.device import Device
from fusescout.session import write_atomic
from fusescout.template import Kernel


def cold_seconds(cache_dir: Path, kernel: Kernel, device: Device, measured_s: float) -> float:
    """The longest time that compiling this kernel was ever seen to take with this cache, in seconds."""
    text = json.dumps([kernel.source, dict(kernel.pass_configs), device.name, device.arch], sort_keys=True, default=str)
    file = cache_dir / "compile_seconds" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    known_s = 0.0
    with suppress(OSError, ValueError, TypeError):  # absent or damaged: this compilation is all that is known
        known_s = float(json.loads(file.read_bytes()))
    if measured_s > known_s:
        with suppress(OSError):  # a full disk costs the memory of it, not the kernel
            write_atomic(file, json.dumps(measured_s).encode())
    return max(known_s, measured_s)
