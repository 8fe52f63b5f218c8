"""Facts of the device that runs the model, measured where a number decides something."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Rates are measured ceilings, not datasheet values.

    Attributes:
        kind: "cpu" or "cuda".
        name: marketing name, part of every cache key.
        arch: "sm_90a", "sm_80", … or the CPU architecture.
        cores: multiprocessors, or CPU threads torch uses.
        copy_bytes_per_s: device-to-device copy, bytes read plus bytes written.
        flops_per_s: dense matmul rate by dtype name.
        launch_us: host cost of one small operator or kernel launch.
        cache_bytes: last-level cache.
    """

    kind: str
    name: str
    arch: str
    cores: int
    copy_bytes_per_s: float = 0.0
    flops_per_s: dict[str, float] = field(default_factory=dict)
    launch_us: float = 0.0
    cache_bytes: int = 0
