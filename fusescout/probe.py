"""Measures what a device can do at most: copy bandwidth, matmul rate per dtype, and the cost of one launch.

Each number is the best of several tries, because a ceiling is what is asked for. Matrices hold random numbers: zeros
draw less power and would let a GPU clock higher than real work does.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fusescout.device import Device

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
CUDA_COPY_BYTES, CPU_COPY_BYTES = 1 << 29, 1 << 27
CUDA_SIZES, CPU_SIZES = (8192, 4096), (1024, 256)
"""Edge of the square matrices: the first, or the second where one product of that size already shows to be slow."""
LAUNCHES = 500
BUDGET_S = {"cuda": 0.15, "cpu": 0.4}
"""Seconds per measured quantity."""


def measure_device(kind: str, dtypes: tuple[str, ...] = DTYPES) -> Device:
    """Measure the current device of a kind, once per process, thread count and precision of float32 products.

    float32 products use TF32 if and only if the user's flags allow it. On CUDA whoever asks for float32 gets bfloat16
    too: a float32 product can be made of bfloat16 ones (`candidates.lower_bound`).

    Args:
        kind: "cpu" or "cuda".
        dtypes: dtype names to measure the matmul rate of; those the device can't multiply are left out.
    """
    import torch

    from fusescout.numerics import matmul_precision

    if kind == "cuda" and "float32" in dtypes:
        dtypes = tuple(dict.fromkeys((*dtypes, "bfloat16")))
    return _measured(kind, dtypes, torch.get_num_threads(), matmul_precision())


@functools.cache
def _measured(kind: str, dtypes: tuple[str, ...], threads: int, precision: str) -> Device:
    import torch

    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if kind == "cuda" else []), torch.no_grad():
        rates = {name: _matmul_rate(kind, getattr(torch, name)) for name in dtypes}
        bandwidth, launch_us = _copy_rate(kind), _launch_us(kind)
    return replace(
        describe_device(kind),
        copy_bytes_per_s=bandwidth,
        flops_per_s={n: r for n, r in rates.items() if r},
        launch_us=launch_us,
    )


def describe_device(kind: str) -> Device:
    """The current device of a kind without its measured ceilings: enough to build kernels for it."""
    name, arch, cores, cache = _identity(kind)
    return Device(kind=kind, name=name, arch=arch, cores=cores, cache_bytes=cache)


def _best_s(kind: str, work: Callable[[], object]) -> float:
    """Shortest time of one execution in seconds, within the budget."""
    import torch

    work()
    if kind == "cpu":
        best, end = float("inf"), time.perf_counter() + BUDGET_S[kind]
        while time.perf_counter() < end or best == float("inf"):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return best
    torch.cuda.synchronize()
    end = time.perf_counter() + BUDGET_S[kind]
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return min(times)


def _copy_rate(kind: str) -> float:
    """Bytes read plus bytes written per second."""
    import torch

    count = (CUDA_COPY_BYTES if kind == "cuda" else CPU_COPY_BYTES) // 4
    source = torch.ones(count, device=kind)
    target = torch.zeros_like(source)
    return 2 * 4 * count / _best_s(kind, lambda: target.copy_(source))


def _matmul_rate(kind: str, dtype: torch.dtype) -> float:
    """FLOP per second of a square product, or 0 where the device can't do it."""
    import torch

    large, small = CUDA_SIZES if kind == "cuda" else CPU_SIZES
    try:
        small_s = _product_s(kind, dtype, small)
        # How long the large one would take: worth it only if it fits the budget.
        scale = (large / small) ** 3
        if small_s * scale > BUDGET_S[kind]:
            return 2.0 * small**3 / small_s
        return 2.0 * large**3 / min(_product_s(kind, dtype, large), small_s * scale)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return 0.0  # no kernel for this dtype on this device


def _product_s(kind: str, dtype: torch.dtype, size: int) -> float:
    import torch

    a, b = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
    if dtype.itemsize == 1:
        one = torch.ones((), device=kind)
        scaled = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        return _best_s(kind, lambda: scaled(a, b.t(), one, one))
    out = torch.empty(size, size, device=kind, dtype=dtype)
    return _best_s(kind, lambda: torch.mm(a, b, out=out))


def _launch_us(kind: str) -> float:
    """Host cost of one small operator, while the device keeps up or the queue takes it."""
    import torch

    small = torch.ones(16, device=kind)
    best = float("inf")
    for _ in range(3):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            small.neg_()
        best = min(best, time.perf_counter() - start)
    return best / LAUNCHES * 1e6


def _identity(kind: str) -> tuple[str, str, int, int]:
    """Name, architecture, cores, bytes of last-level cache."""
    import torch

    if kind == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        # "a" marks the architecture-specific instructions (WGMMA, TMA) that kernels for Hopper and later are built for.
        suffix = "a" if found.major >= 9 else ""
        arch = f"sm_{found.major}{found.minor}{suffix}"
        return found.name, arch, found.multi_processor_count, found.L2_cache_size
    return _cpu_name(), platform.machine(), torch.get_num_threads(), _cpu_cache_bytes()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _cpu_cache_bytes() -> int:
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)
