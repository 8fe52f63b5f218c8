"""What this run ran on: versions of the tool chain, for sessions, cache keys and bug reports."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from fusescout import __version__
from fusescout.device import Device
from fusescout.errors import MissingPackage
from fusescout.session import Environment


def require_torch() -> None:
    """Raise `MissingPackage` if torch isn't installed; doesn't import it."""
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("torch", "torch")


def describe(device: Device) -> Environment:
    """All facts a report needs to be judged by."""
    return Environment(
        fusescout=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        torch=package_version("torch") or "",
        tilelang=package_version("tilelang"),
        nvcc=nvcc_version(),
        driver=driver_version() if device.kind == "cuda" else None,
        os=f"{platform.system()} {platform.release()}",
        device_kind=device.kind,
        device_name=device.name,
        cores=device.cores,
        copy_gb_per_s=device.copy_bytes_per_s / 1e9,
        tflops={k: v / 1e12 for k, v in device.flops_per_s.items()},
        launch_us=device.launch_us,
    )


@functools.cache
def package_version(name: str) -> str | None:
    """Version of an installed package, with its local part, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvcc_path() -> str | None:
    """The nvcc that TileLang would use: CUDA_HOME or CUDA_PATH, PATH, NVIDIA's wheel, /usr/local/cuda."""
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if root and (Path(root) / "bin" / "nvcc").exists():
            return str(Path(root) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        return on_path
    try:
        wheel = importlib.metadata.files("nvidia-cuda-nvcc") or ()
    except importlib.metadata.PackageNotFoundError:
        wheel = ()
    usual = [*(Path(str(f.locate())) for f in wheel if f.name == "nvcc"), Path("/usr/local/cuda/bin/nvcc")]
    return next((str(p) for p in usual if p.exists()), None)


@functools.cache
def nvcc_version() -> str | None:
    """Such as "13.0.88", or None without nvcc."""
    path = nvcc_path()
    return _version_of([path, "--version"], r"V(\d+\.\d+\.\d+)") if path else None


@functools.cache
def cxx_version() -> str | None:
    """Version of the g++ that compiles CPU kernels, or None without one."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    return _version_of([path, "-dumpfullversion"], r"(\S+)") if path else None


@functools.cache
def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        path = shutil.which("nvidia-smi")
        return _version_of([path, "--query-gpu=driver_version", "--format=csv,noheader"], r"(\S+)") if path else None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _version_of(command: list[str], pattern: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(pattern, done.stdout)
    return found.group(1) if found else None
