"""Every setting of an analysis, in one frozen `Config`.

Precedence: defaults < `[tool.fusescout]` of the nearest pyproject.toml that has it < `FUSESCOUT_*` environment
variables < arguments. `load` merges them and says where a bad value came from; nothing else reads the environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from typing import Any
from typing import Literal

import platformdirs
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import Field
from pydantic import StringConstraints
from pydantic import ValidationError

from fusescout.errors import BadSetting
from fusescout.errors import ConfigUnreadable
from fusescout.errors import UnknownSetting

PREFIX = "FUSESCOUT_"
DISABLE = "FUSESCOUT_DISABLE"
"""No setting of an analysis: patched models run as they were where it is set to anything but 0."""
SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
PATHS = ("templates", "output", "cache_dir")


def _long_dtype(value: Any) -> Any:
    return SHORT_DTYPES.get(value, value) if isinstance(value, str) else value


def _default_jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


class Config(BaseModel):
    """Settings of one analysis."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """"auto" is CUDA where there is a GPU, else the CPU."""
    dtype: Annotated[Literal["float64", "float32", "float16", "bfloat16"] | None, BeforeValidator(_long_dtype)] = None
    """Floating parameters, buffers and inputs are cast to it; None keeps what the model has."""
    mode: Literal["inference", "training"] = "inference"
    effort: Literal["quick", "default", "max"] = "default"
    """How long to search."""
    threshold: float = Field(1.05, ge=1)
    """A chain's winner must beat every cheaper contender by this factor."""
    min_gain: float = Field(1.0, gt=0)
    """The end-to-end speed-up that must be reached, such as 1.01."""
    runs: int = Field(5, ge=1)
    """Profile repetitions."""
    rounds: int = Field(30, ge=2)
    """Rounds of the end-to-end A/B comparison."""
    compose: Literal["eager", "inductor", "cudagraph", "replay", "auto"] = "auto"
    """What runs the rest of the patched model."""
    allow_tf32: bool = False
    top: int = Field(12, ge=1)
    """Most candidates that are raced."""
    templates: tuple[Path, ...] = ()
    """More template folders."""
    output: Path | None = None
    """Run folder; None is `fusescout-runs/<target>`."""
    cache_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_cache_dir("fusescout")))
    use_cache: bool = True
    deadline_s: float = Field(60, gt=0)
    """For each kernel that is compiled and tried."""
    jobs: int = Field(default_factory=_default_jobs, ge=1)
    """Parallel compilations."""
    include_source: bool = False
    """Put source lines of the model into reports."""
    seed: int = Field(0, ge=0)
    fail_under: float | None = Field(None, gt=0)
    """`analyze` exits with 1 if the lower end of the end-to-end speed-up is below this."""


def load(
    arguments: Mapping[str, Any] | None = None,
    *,
    kind: str = "argument",
    spell: Callable[[str], str] = str,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge all sources into a `Config`.

    Args:
        arguments: explicit settings; None values count as not given.
        kind: what the user knows `arguments` as.
        spell: how the user spells the name of one.
        folder: where the search for pyproject.toml starts, upwards (default: the current folder).
        environ: the environment (default: the process's).

    Raises:
        UnknownSetting: with the valid names and the closest.
        BadSetting: with the source, the given value and what is allowed.
        ConfigUnreadable: the pyproject.toml is not TOML, or can't be read.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    given = ((k, v, f"{kind} {spell(k)}", spell) for k, v in (arguments or {}).items() if v is not None)
    file = _from_file(folder or Path.cwd())
    environment = _from_environment(os.environ if environ is None else environ)
    for settings in (file, environment, given):
        for name, value, source, spelling in settings:
            if name not in Config.model_fields:
                raise _unknown(name, source, spelling)
            values[name], sources[name] = value, source
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise BadSetting(sources[name], values[name], _allowed(name, first["msg"])) from None


Setting = tuple[str, Any, str, Callable[[str], str]]
"""Name, value, where it comes from, and how that source spells a setting's name."""


def _from_file(folder: Path) -> Iterator[Setting]:
    for place in (folder.resolve(), *folder.resolve().parents):
        file = place / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("fusescout")
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigUnreadable(str(file), str(error)) from error
        if table is None:
            continue
        if not isinstance(table, dict):
            raise ConfigUnreadable(str(file), "[tool.fusescout] must be a table")
        for key, value in table.items():
            name = key.replace("-", "_")
            yield name, _relative_to(place, value) if name in PATHS else value, f"{file}: {key}", str
        return


def _from_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable == DISABLE or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        value = tuple(filter(None, text.split(os.pathsep))) if name == "templates" else text
        yield name, value, f"environment variable {variable}", lambda n: PREFIX + n.upper()


def disabled() -> bool:
    """Whether the user has turned off all patches, now."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def to_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The `FUSESCOUT_*` variables that say the same as these settings; None values are left out."""
    return {
        PREFIX + k.upper(): os.pathsep.join(map(str, v)) if isinstance(v, list | tuple) else str(v)
        for k, v in config.items()
        if v is not None
    }


def _relative_to(place: Path, value: Any) -> Any:
    """Paths in a file are relative to that file, wherever the command runs."""
    if isinstance(value, list):
        return [_relative_to(place, item) for item in value]
    return place / value if isinstance(value, str) else value


def _unknown(name: str, source: str, spelling: Callable[[str], str]) -> UnknownSetting:
    close = difflib.get_close_matches(name, Config.model_fields, n=1)
    valid = [spelling(n) for n in Config.model_fields]
    return UnknownSetting(source, name, valid, spelling(close[0]) if close else None)


def _allowed(name: str, message: str) -> str:
    if name == "device":
        return "Allowed: auto, cpu, cuda, cuda:N"
    return message.replace("Input should be", "Allowed:").replace("Allowed: a valid", "It must be a valid")
