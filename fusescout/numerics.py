"""The process-wide numerical settings of torch that change what operators compute, as plain data.

Child processes take over the parent's, so that a race is run under the user's own rules: fp32 stays fp32 where TF32 is
not allowed, and eager is the eager that the model sees.

torch refuses to read its older TF32 flags once its newer `fp32_precision` settings say what those can't (convolutions
in true float32, recurrent layers not). Then the newer ones are read instead.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
_PRECISIONS = (
    *("", "cudnn", "cudnn.conv", "cudnn.rnn", "cuda.matmul"),
    *("mkldnn", "mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn"),
)
"""Where `fp32_precision` is, the general ones first: what is set there is given on to those inside."""


def current() -> dict[str, Any]:
    """Settings of this process, JSON-safe."""
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    older = {"float32_matmul_precision": _older(torch.get_float32_matmul_precision)}
    older |= {f"{backend}.{name}": _older(partial(getattr, _backend(backend), name)) for backend, name in _BACKENDS}
    found |= {name: value for name, value in older.items() if isinstance(value, bool | str)}
    if None in older.values():
        found["fp32_precision"] = {path: _backend(path).fp32_precision for path in _PRECISIONS}
    return found


def _older(read: Callable[[], Any]) -> Any:
    """One of the older settings; None if torch refuses to read it."""
    try:
        return read()
    except RuntimeError:
        return None


def apply(settings: dict[str, Any]) -> None:
    """Make this process compute like the one that `current` was called in."""
    torch.set_num_threads(settings["threads"])
    if "float32_matmul_precision" in settings:
        torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    for backend, name in _BACKENDS:
        value = settings.get(f"{backend}.{name}")
        if value is not None and _older(partial(getattr, _backend(backend), name)) != value:
            setattr(_backend(backend), name, value)
    for path, precision in settings.get("fp32_precision", {}).items():
        if _backend(path).fp32_precision != precision:
            _backend(path).fp32_precision = precision


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Inside, float32 matrix products may use TF32 if `allowed`; else the user's own setting stays."""
    if not allowed or _products_in_tf32():
        yield
        return
    before, matmul = _older(torch.get_float32_matmul_precision), _backend("cuda.matmul")
    precision = matmul.fp32_precision
    if before is None:
        matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if before is None:
            matmul.fp32_precision = precision
        else:
            torch.set_float32_matmul_precision(before)


def matmul_precision() -> str:
    """What float32 matrix products are computed in: "highest", "high" or "medium"; by the newer settings their word."""
    return str(_older(torch.get_float32_matmul_precision) or _backend("cuda.matmul").fp32_precision)


def _products_in_tf32() -> bool:
    return matmul_precision() in ("high", "medium", "tf32")


def _convolutions_in_tf32() -> bool:
    older = _older(lambda: torch.backends.cudnn.allow_tf32)
    return bool(_backend("cudnn.conv").fp32_precision == "tf32" if older is None else older)


def has_tf32(device: str) -> bool:
    """Whether a device can multiply in TF32: NVIDIA's GPUs from Ampere on."""
    return device.startswith("cuda") and torch.cuda.is_tf32_supported()


def tf32_kinds(device: str) -> frozenset[str]:
    """Kinds of operator (as `flops.op_class` names them) whose float32 the user's settings let a device cut to TF32."""
    kinds = set()
    if has_tf32(device):
        kinds |= {"conv"} if _convolutions_in_tf32() else set()
        kinds |= {"gemm", "attention"} if _products_in_tf32() else set()
    return frozenset(kinds)


def _backend(path: str) -> Any:
    module: Any = torch.backends
    for part in filter(None, path.split(".")):
        module = getattr(module, part)
    return module
