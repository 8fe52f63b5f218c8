"""Compile a TileLang kernel for CUDA: through `tilelang.compile`, with a disk cache that knows the tool chain.

TileLang's cache key has no nvcc version and no device in it, so both are part of the cache folder's name.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusescout import environ
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.environment import nvcc_version
from fusescout.errors import ContenderFailed
from fusescout.template import Kernel


def compile_cuda(kernel: Kernel, device: Device, cache_dir: Path) -> Callable[..., None]:
    """Compile `kernel`; the result takes its parameters' tensors in order and fills the outputs.

    It launches on torch's current stream and can be captured in a CUDA graph after one call.

    Raises:
        ContenderFailed: nvcc is missing, or it or TileLang refuses the kernel.
    """
    import tilelang

    key = (kernel.source, repr(sorted(kernel.pass_configs.items())), device.arch, str(cache_dir))
    if key in _compiled:
        return _compiled[key]
    with environ.changed(TILELANG_CACHE_DIR=str(cache_folder(cache_dir, device)), TILELANG_PRINT_ON_COMPILATION="0"):
        try:
            compiled = tilelang.compile(kernel.func, target=target_of(device), pass_configs=dict(kernel.pass_configs))
        except Exception as error:  # isolation boundary: whatever the compiler throws becomes this contender's reason
            raise ContenderFailed("TileLang can't compile the kernel:", _tail(str(error))) from error
    return _compiled.setdefault(key, _entry(compiled))


_compiled: dict[tuple[str, str, str, str], Callable[..., None]] = {}
"""Kernels of this process: a plan is carried out once for each way to run the rest."""


def target_of(device: Device) -> dict[str, str]:
    """TileLang's target, spelled so that kernels precompiled elsewhere are found in its cache."""
    arch = {"sm_90": "sm_90a"}.get(device.arch, device.arch)
    return {"kind": "cuda", "arch": arch}


def cache_folder(cache_dir: Path, device: Device) -> Path:
    """Where kernels for this tool chain and device are kept."""
    import tilelang

    name = "-".join((tilelang.__version__, nvcc_version() or "no-nvcc", device.name, device.arch))
    return cache_dir / "tilelang" / re.sub(r"[^\w.-]+", "_", name)


@dataclass(frozen=True, slots=True)
class CubinReport:
    """What the assembler says of a kernel: registers per thread, bytes spilled, and the CUDA source."""

    registers: int
    spilled_bytes: int
    source: str


def cubin_report(kernel: Kernel, arch: str = "sm_90a") -> CubinReport:
    """Lower and assemble `kernel` for `arch` without a GPU.

    Raises:
        ContenderFailed: nvcc is missing, or it or TileLang refuses the kernel.
    """
    import tilelang

    nvcc = nvcc_path()
    if nvcc is None:
        raise ContenderFailed(
            "nvcc was not found:", "it assembles CUDA kernels.", 'Install "fusescout[nvcc]" or the CUDA toolkit.'
        )
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    try:
        with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(kernel.pass_configs)), target:
            source = str(tilelang.lower(kernel.func, target=target).kernel_source)
    except Exception as error:  # isolation boundary, as above
        raise ContenderFailed("TileLang can't lower the kernel:", _tail(str(error))) from error
    root = os.path.dirname(tilelang.__file__)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        generation = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
        command = [nvcc, "--cubin", "-O3", "-std=c++20", "-w", "-gencode", generation, "--ptxas-options=--verbose"]
        command += [f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include", "-o", f"{folder}/kernel.cubin", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ContenderFailed("nvcc refuses the generated kernel:", _tail(done.stderr))
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spilled = [
        int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    ]
    return CubinReport(max(registers, default=0), max(spilled, default=0), source)


def _entry(compiled: Any) -> Callable[..., None]:
    """The compiled host function itself where it can be reached: half the cost of a call through the wrapper."""
    adapter = getattr(compiled, "adapter", None)
    executable = getattr(adapter, "get_exportable_executable", None)
    if executable is None:
        return compiled  # type: ignore[no-any-return]
    main: Callable[..., None] = executable()["main"]
    return main


def _tail(text: str) -> str:
    return text.strip()[-800:] or "no message."
