"""Remembers the best ceilings ever measured on a device: whatever else ran at the time can only have lowered them.

With ceilings of the moment, a CPU's matmul rate came out at half of an earlier run's, and the same model then had three
candidates instead of five.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusescout.device import Device
from fusescout.environment import package_version
from fusescout.session import write_atomic


def best_seen(device: Device, cache_dir: Path) -> Device:
    """The device with each rate at the highest, and each cost at the lowest, that was ever measured with this cache.

    Args:
        device: as just measured.
        cache_dir: where it is remembered; a folder that can't be written costs the memory, nothing else.
    """
    identity = json.dumps([device.kind, device.name, device.arch, device.cores, package_version("torch")])
    file = cache_dir / "ceilings" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # absent or damaged: this measurement is all that is known
        known = json.loads(file.read_bytes())
    try:
        rates = dict(known.get("flops_per_s", {}))
        best = replace(
            device,
            copy_bytes_per_s=max(device.copy_bytes_per_s, float(known.get("copy_bytes_per_s", 0.0))),
            flops_per_s={n: max(r, float(rates.get(n, 0.0))) for n, r in device.flops_per_s.items()},
            launch_us=min(device.launch_us, float(known.get("launch_us", device.launch_us))),
        )
    except (AttributeError, TypeError, ValueError):
        best, rates = device, {}
    found = {
        "copy_bytes_per_s": best.copy_bytes_per_s,
        "flops_per_s": rates | best.flops_per_s,
        "launch_us": best.launch_us,
    }
    if found != known:
        with suppress(OSError):
            write_atomic(file, json.dumps(found).encode())
    return best
