"""What the benches found, as files and tables know it. Times are µs unless the name says otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from fusescout.session import ContenderResult
from fusescout.session import Environment
from fusescout.session import Interval
from fusescout.session import Record
from fusescout.session import Rival
from fusescout.session import write_atomic

BENCH_VERSION = 1
OWN = "tilelang"
YARDSTICKS = ("bare",)
"""Timed beside the contenders, but no contender: the matrix products of a chain without the rest of it."""


class KernelRow(Record):
    """One case of `bench kernels`."""

    family: str
    name: str
    inputs: list[str] = Field(default_factory=list)
    outputs: list[str] = Field(default_factory=list)
    region: str = ""
    """Family of the region that the finder makes of the whole chain; "" if it would cut the chain up."""
    bound_us: float = 0.0
    """Physical lower bound on this device."""
    contenders: list[ContenderResult] = Field(default_factory=list)
    ratios: dict[str, Interval] = Field(default_factory=dict)
    """Each other's time over TileLang's, from the paired rounds: above 1 TileLang is faster."""
    noise: Interval | None = None
    guess: int = 0
    """Which guess of the template's cost model the fastest variant was, from 1; 0 where unknown."""
    guesses: int = 0
    policy: str = ""
    seconds: float = 0.0
    """What the whole row took: capture, compilation, checks and timing."""
    reason: str = ""
    """Why it was not measured."""

    def result(self, name: str) -> ContenderResult | None:
        return next((c for c in self.contenders if c.name == name), None)

    @property
    def best_other(self) -> str:
        """The fastest contender besides TileLang; "" if none was timed."""
        timed = [c for c in self.contenders if c.status == "ok" and c.time and c.name != OWN]
        return min(timed, key=lambda c: c.time.mid if c.time else math.inf).name if timed else ""


class KernelBench(Record):
    """One run of `bench kernels`."""

    bench_version: int = BENCH_VERSION
    environment: Environment
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: list[KernelRow] = Field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json(indent=1).encode())


class ModelRow(Record):
    """One model of `bench models` at one dtype, taken from its session."""

    model: str
    dtype: str
    inputs: list[str] = Field(default_factory=list)
    parameters: int = 0
    ways: list[Rival] = Field(default_factory=list)
    """Eager first, then every other way to run the whole model."""
    patched: str = ""
    """Name of the fastest patched way; "" if there is none."""
    speedup: Interval | None = None
    """Over eager."""
    speedup_over_rival: Interval | None = None
    rival: str = ""
    verified: bool = False
    coverage: float = 0.0
    raced: int = 0
    accepted: dict[str, int] = Field(default_factory=dict)
    """Accepted sites by family."""
    rejected: int = 0
    analysis_s: float = 0.0
    compile_s: float = 0.0
    """What the slowest framework way took to compile."""
    verdict: str = ""
    reason: str = ""
    """Why there is nothing else here: it crashed, or was late."""

    def way(self, name: str) -> Rival | None:
        return next((w for w in self.ways if w.name == name and w.time), None)


class ModelBench(Record):
    """One run of `bench models`."""

    bench_version: int = BENCH_VERSION
    environment: Environment | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: list[ModelRow] = Field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json(indent=1).encode())


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
