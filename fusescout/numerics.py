"""The process-wide numerical settings of torch that change what operators compute, as plain data.

Child processes take over the parent's, so that a race is run under the user's own rules: fp32 stays fp32 where TF32 is
not allowed, and eager is the eager that the model sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS = (
    ("cudnn", "allow_tf32"),
    ("cudnn", "benchmark"),
    ("cudnn", "enabled"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("mkldnn", "enabled"),
)


def current() -> dict[str, Any]:
    """Settings of this process, JSON-safe."""
    found: dict[str, Any] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
    for backend, name in _BACKENDS:
        value = getattr(_backend(backend), name)
        if isinstance(value, bool):
            found[f"{backend}.{name}"] = value
    return found


def apply(settings: dict[str, Any]) -> None:
    """Make this process compute like the one that `current` was called in."""
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    torch.set_num_threads(settings["threads"])
    for backend, name in _BACKENDS:
        value = settings.get(f"{backend}.{name}")
        if value is not None and getattr(_backend(backend), name) != value:
            setattr(_backend(backend), name, value)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Inside, float32 matrix products may use TF32 if `allowed`; else the user's own setting stays."""
    before = torch.get_float32_matmul_precision()
    if allowed:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if allowed:
            torch.set_float32_matmul_precision(before)


def has_tf32(device: str) -> bool:
    """Whether a device can multiply in TF32: NVIDIA's GPUs from Ampere on."""
    return device.startswith("cuda") and torch.cuda.is_tf32_supported()


def tf32_kinds(device: str) -> frozenset[str]:
    """Kinds of operator (as `flops.op_class` names them) whose float32 the user's settings let a device cut to TF32."""
    kinds = set()
    if has_tf32(device):
        kinds |= {"conv"} if torch.backends.cudnn.allow_tf32 else set()
        kinds |= {"gemm", "attention"} if torch.get_float32_matmul_precision() != "highest" else set()
    return frozenset(kinds)


def _backend(path: str) -> Any:
    module: Any = torch.backends
    for part in path.split("."):
        module = getattr(module, part)
    return module
