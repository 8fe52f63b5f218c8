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
from fusescout.probe import describe_device
from fusescout.probe import measure_device
from fusescout.session import write_atomic

ENOUGH = 2
"""Measurements after which what is remembered stands: one takes 1.4 s of a CPU, which a warm analysis feels.

An analysis that races takes both, the second one after the races: a disturbance seldom lasts so long.
"""


def ceilings(kind: str, dtypes: tuple[str, ...], cache_dir: Path) -> Device:
    """The current device with each rate at the highest, and each cost at the lowest, ever measured with this cache.

    Args:
        kind: "cpu" or "cuda".
        dtypes: dtype names whose matmul rate is wanted.
        cache_dir: where it is remembered; a folder that can't be written costs the memory, nothing else.
    """
    from fusescout.numerics import matmul_precision

    device, rules = describe_device(kind), matmul_precision()  # TF32 is another ceiling
    known = _read(_file(device, cache_dir, rules))
    if known and known["count"] >= ENOUGH and set(dtypes) <= set(known["flops_per_s"]):
        return replace(
            device,
            copy_bytes_per_s=known["copy_bytes_per_s"],
            flops_per_s=known["flops_per_s"],
            launch_us=known["launch_us"],
        )
    return best_seen(measure_device(kind, dtypes), cache_dir, rules)


def best_seen(device: Device, cache_dir: Path, rules: str = "") -> Device:
    """The device as just measured, or better where it was seen to be under the same numerical rules; remembered."""
    file = _file(device, cache_dir, rules)
    known = _read(file) or {"count": 0, "copy_bytes_per_s": 0.0, "flops_per_s": {}, "launch_us": device.launch_us}
    rates = known["flops_per_s"]
    best = replace(
        device,
        copy_bytes_per_s=max(device.copy_bytes_per_s, known["copy_bytes_per_s"]),
        flops_per_s={n: max(r, rates.get(n, 0.0)) for n, r in device.flops_per_s.items()},
        launch_us=min(device.launch_us, known["launch_us"]),
    )
    found = {
        "count": known["count"] + 1,
        "copy_bytes_per_s": best.copy_bytes_per_s,
        "flops_per_s": rates | best.flops_per_s,
        "launch_us": best.launch_us,
    }
    with suppress(OSError):
        write_atomic(file, json.dumps(found).encode())
    return best


def _file(device: Device, cache_dir: Path, rules: str) -> Path:
    identity = json.dumps([device.kind, device.name, device.arch, device.cores, package_version("torch"), rules])
    return cache_dir / "ceilings" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> dict[str, Any] | None:
    """What is remembered; None where nothing is, or nothing that makes sense."""
    try:
        raw = json.loads(file.read_bytes())
        return {
            "count": int(raw["count"]),
            "copy_bytes_per_s": float(raw["copy_bytes_per_s"]),
            "flops_per_s": {str(n): float(r) for n, r in raw["flops_per_s"].items()},
            "launch_us": float(raw["launch_us"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
