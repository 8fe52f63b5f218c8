"""`fusescout doctor`: what this machine has of all that FuseScout can use."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fusescout import __version__
from fusescout.cli import options
from fusescout.errors import EXIT_ENVIRONMENT
from fusescout.errors import EXIT_OK
from fusescout.errors import CacheUnwritable


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `needed` says that something doesn't work without it on this machine."""

    name: str
    ok: bool
    needed: bool
    detail: str
    fix: str = ""


def doctor(
    context: typer.Context,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if something needed is missing.")] = False,
    templates: options.Templates = None,
    cache_dir: options.CacheDir = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Check the environment: packages, compilers, GPU, cache, templates."""
    terminal = options.terminal(context, quiet, verbose)
    config = options.config(context)
    with terminal.stdout_reserved():
        checks = list(_checks(config.cache_dir, config.templates))
    if as_json:
        terminal.out(json.dumps([dataclasses.asdict(c) for c in checks], indent=1))
    else:
        for check in checks:
            state = "ok" if check.ok else "MISSING" if check.needed else "none"
            fix = f"  -> {check.fix}" if check.fix and not check.ok else ""
            terminal.out(f"{check.name:<10} {state:<8} {check.detail}{fix}")
    return EXIT_ENVIRONMENT if strict and any(c.needed and not c.ok for c in checks) else EXIT_OK


def _checks(cache_dir: Path, templates: tuple[Path, ...]) -> Iterator[Check]:
    from fusescout.environment import cxx_version
    from fusescout.environment import driver_version
    from fusescout.environment import nvcc_path
    from fusescout.environment import nvcc_version

    yield Check("fusescout", True, True, f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    names = "*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
    works, said = _ask(f"import torch; print(torch.__version__, 'CUDA', torch.version.cuda, {names}, sep='|')")
    version, *gpus = said.replace("|CUDA|", " CUDA ").split("|") if works else (said,)
    yield Check("torch", works, True, version, "pip install 'fusescout[torch]'")
    has_gpu = bool(gpus)
    yield Check("GPU", has_gpu, False, ", ".join(gpus) or "none that torch can use; the CPU works")
    driver = driver_version()
    yield Check("driver", driver is not None, has_gpu, driver or "none")
    works, said = _ask("import tilelang; print(tilelang.__version__)")
    yield Check("tilelang", works, True, said, "pip install 'fusescout[tilelang]'")
    nvcc = nvcc_version()
    where = f"{nvcc} ({nvcc_path()})" if nvcc else "none; TileLang's CUDA kernels need it, all else works"
    yield Check("nvcc", nvcc is not None, has_gpu, where, "pip install 'fusescout[nvcc]', or set CUDA_HOME")
    compiler = cxx_version()
    yield Check(
        "g++", compiler is not None, True, compiler or "none; TileLang's CPU kernels need it", "install g++ or set CXX"
    )
    yield _cache(cache_dir)
    yield from _templates(templates)


def _ask(code: str) -> tuple[bool, str]:
    """Run code in a child Python: a broken package can crash or hang there without harm."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return False, "it hangs"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def _cache(folder: Path) -> Check:
    from fusescout.cache import Cache

    try:
        Cache(folder).probe()
    except CacheUnwritable as error:
        return Check("cache", False, True, f"{folder}: {error.why}", error.fix)
    return Check("cache", True, True, str(folder))


def _templates(folders: tuple[Path, ...]) -> Iterator[Check]:
    from fusescout.registry import load

    registry = load(folders)
    names = ", ".join(registry.templates)
    yield Check("templates", bool(names), True, names or "none", "reinstall fusescout")
    for warning in registry.warnings:
        yield Check("template", False, False, warning)
