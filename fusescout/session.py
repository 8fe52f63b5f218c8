"""The data model and file format of one analysis: everything a report shows, and nothing else.

A report is rendered from a `Session` alone, so any report can be made again from `session.json` on a machine without
torch. Times are µs unless the name says otherwise; `share` and `coverage` are fractions of 1; a speed-up is old/new.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import ValidationError

from fusescout.errors import SessionUnreadable

SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)
"""Version 1 lacks fields that have defaults: what the ways to run the model hold in memory, and the best rival."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Interval(Record):
    """A measured quantity: median and a 95 % interval of it, over `samples` measurements."""

    mid: float
    low: float
    high: float
    samples: int = 0


class Environment(Record):
    fusescout: str
    date: str
    python: str
    torch: str
    tilelang: str | None = None
    nvcc: str | None = None
    driver: str | None = None
    os: str = ""
    device_kind: str
    device_name: str
    cores: int
    copy_gb_per_s: float = 0.0
    tflops: dict[str, float] = {}
    launch_us: float = 0.0


class WorkloadInfo(Record):
    """What was analysed."""

    target: str
    model: str
    mode: str
    device: str
    dtype: str
    inputs: list[str]
    parameters: int
    command: str = ""


class GraphBreak(Record):
    reason: str
    where: str = ""


class OpRow(Record):
    """One node of a captured graph with its cost."""

    graph: int
    node: str
    op: str
    module: str = ""
    source: str = ""
    shapes: str = ""
    time_us: float
    share: float
    kernels: int
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = ""
    """"memory" | "compute" | "launch" | "free", or "" where nothing is known."""
    bound_share: float = 0.0
    """Physical bound over time: 1 is perfect."""


class KernelRow(Record):
    name: str
    calls: int
    time_us: float
    share: float
    nodes: list[str] = []


class EdgeRow(Record):
    """Node `source` feeds node `target` of the same captured graph."""

    source: str
    target: str
    graph: int = 0


class ProfileInfo(Record):
    """One step of the model as the framework runs it."""

    step: Interval
    """Unprofiled wall time of one call."""
    busy_us: float
    """Union of the kernels' (on CPU: ops') intervals in one call."""
    attributed_us: float
    unlinked_us: float
    coverage: float
    """Share of kernel time attributed to captured nodes."""
    launches: int
    host_bound: bool
    idle_share: float
    runs: int
    graphs: int
    breaks: list[GraphBreak] = []
    ops: list[OpRow] = []
    kernels: list[KernelRow] = []
    edges: list[EdgeRow] = []
    trace: str | None = None


_MEASURES = {
    "TF32": "TF32, which torch.backends.cudnn.allow_tf32 or float32_matmul_precision permits",
    "float32 moments": "group norms in float32, as autocast has them",
    "unrounded": "eager's products and convolutions with nothing between them rounded to 16 bits",
}
"""The evaluations of `admissible` in words; other names are of ways to run a whole model."""


class ErrorStats(Record):
    """Worst error over all checked inputs, against the float64 truth, of this contender and of eager."""

    worst: float
    """Largest (contender error) / (allowed error); at most 1 passes."""
    contender_max: float
    eager_max: float
    cases: int
    deterministic: bool = True
    against: str = "eager"
    """Whose error is the measure: eager's, unless another evaluation that the framework may make errs as much."""

    @property
    def measure(self) -> str:
        """The measure in words, to go on a sentence with; empty where it is eager's error."""
        names = self.against.split(" and ")
        return "" if names == ["eager"] else f"no more exact than {' and '.join(_MEASURES.get(n, n) for n in names)}"


class ContenderResult(Record):
    """One way to run a candidate, after the race."""

    name: str
    variant: dict[str, Any] = {}
    status: str
    """"ok" | "wrong" | "failed" | "unsupported" | "timeout" | "crashed"."""
    reason: str = ""
    time: Interval | None = None
    bound_share: float = 0.0
    compile_s: float = 0.0
    tried: int = 0
    """Variants tried before this one was picked."""
    error: ErrorStats | None = None
    lines: int = 0
    rests_on: list[str] = []
    backends: list[str] = []
    cached: bool = False
    repro: str | None = None


class Site(Record):
    graph: int
    nodes: list[str]
    module: str = ""
    source: str = ""


class CandidateResult(Record):
    """A chain worth looking at, what was measured for it and what was decided."""

    id: str
    key: str
    family: str
    chain: list[str]
    sites: list[Site]
    inputs: list[str]
    outputs: list[str]
    time_us: float
    """Time of all sites in one step as the framework runs them."""
    share: float
    bound_us: float
    """Physical lower bound of the same."""
    gain_bound_us: float
    """Upper bound on what fusing can give, all sites."""
    launches_removed: int
    flops: float = 0.0
    bytes: float = 0.0
    status: str
    """"accepted" | "kept" (a race was run; framework code stays) | "not raced" | "dropped" (end to end)."""
    reason: str
    winner: str = "eager"
    speedup: Interval | None = None
    """Winner over the best contender that costs less upkeep."""
    speedup_over_eager: Interval | None = None
    pays_back_calls: float | None = None
    contenders: list[ContenderResult] = []


class Rejection(Record):
    """A chain that is no candidate, and why.

    Codes: one-op, escapes, gemm-bound, below-threshold, unsupported, overlaps.
    """

    chain: list[str]
    where: str
    count: int = 1
    time_us: float = 0.0
    code: str
    reason: str


class Rival(Record):
    """One way to run the whole model."""

    name: str
    time: Interval | None = None
    compile_s: float = 0.0
    reason: str = ""
    peak_bytes: int | None = None
    """Most device memory that a step held beyond what was held before, with CUDA graphs of a step before its capture;
    None where that is unknown, as on the CPU."""


class EndToEnd(Record):
    """The verdict: the unpatched against the patched model, interleaved and unprofiled."""

    baseline: Interval
    patched: Interval | None = None
    speedup: Interval | None = None
    noise: Interval | None = None
    """A/A run: the same model against itself."""
    baseline_peak_bytes: int | None = None
    """As `Rival.peak_bytes`, of eager."""
    rival: str = ""
    """The fastest way besides the patched ones."""
    speedup_over_rival: Interval | None = None
    verified: bool = False
    error: ErrorStats | None = None
    composition: str = "eager"
    memory_format: str = "preserved"
    """The patched model's layout in memory: "preserved" | "channels_last" | "row_major"."""
    sites_patched: int = 0
    left_to: str = ""
    """The rival that the plan leaves the whole model to, as no patched form is faster: then `patched` is its time."""
    dropped: list[str] = []
    rivals: list[Rival] = []
    verdict: str


class Session(Record):
    """One analysis. `verdict` in one sentence leads every report."""

    schema_version: int = SCHEMA_VERSION
    verdict: str
    environment: Environment
    workload: WorkloadInfo
    settings: dict[str, Any] = {}
    profile: ProfileInfo
    candidates: list[CandidateResult] = []
    rejections: list[Rejection] = []
    end_to_end: EndToEnd | None = None
    stages_s: dict[str, float] = {}
    cache_hits: int = 0
    cache_misses: int = 0
    warnings: list[str] = []

    def save(self, path: Path | str) -> None:
        """Write atomically: a reader sees the old file or the whole new one."""
        write_atomic(Path(path), self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> Session:
        """Read a session file (or the folder it is in).

        Raises:
            SessionUnreadable: missing, not JSON, another schema version, or fields that don't fit.
        """
        file = path / "session.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise SessionUnreadable(str(file), error.strerror or str(error)) from error
        except ValueError as error:
            raise SessionUnreadable(str(file), f"it is not JSON ({error})") from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version not in READABLE:
            raise SessionUnreadable(
                str(file), f"its schema_version is {version!r}, this FuseScout reads {' and '.join(map(str, READABLE))}"
            )
        try:
            return cls.model_validate(raw | {"schema_version": SCHEMA_VERSION})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise SessionUnreadable(str(file), f"field {where}: {first['msg']}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that `path` never holds half of it, also when the disk fills up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
