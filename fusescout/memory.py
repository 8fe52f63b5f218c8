"""What a check watches of memory: it is filled before a run so that gaps show; who shares it; what was written."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusescout.inputs import raw
from fusescout.ir import TensorSpec

_M_PERTURB = -6


@contextmanager
def poisoned(specs: Sequence[TensorSpec], device: str) -> Iterator[None]:
    """Fill the memory that new tensors of these sizes will be given, so that what isn't written shows."""
    sizes = [max(spec.nbytes, 1) for spec in (*specs, *specs)]
    doomed = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del doomed
    perturb = _mallopt() if device == "cpu" else None
    if perturb:
        perturb(_M_PERTURB, 0x81)  # glibc now fills what it hands out with 0x7E
    try:
        yield
    finally:
        if perturb:
            perturb(_M_PERTURB, 0)


@contextmanager
def filled_by_torch() -> Iterator[None]:
    """Let torch.empty give NaN. This changes which kernels torch picks, so it's an extra run, never the only one."""
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
        memory.fill_uninitialized_memory = fill


def sharing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> set[tuple[str, str]]:
    """Pairs of outputs and inputs that live in one storage, and of outputs whose elements lie between each other's."""
    named = [(f"input {k}", _storage(t)) for k, t in enumerate(inputs)]
    found = set()
    for k, out in enumerate(outputs):
        start, end = _extent(out)
        for name, (first, last) in named if out.numel() else ():
            if start < last and first < end:
                found.add((f"output {k}", name))
        named.append((f"output {k}", (start, end)))
    return found


def _storage(tensor: Tensor) -> tuple[int, int]:
    """First and last address of all that an input's storage holds."""
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and last address of a tensor's elements."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def untouched(inputs: Sequence[Tensor], before: Sequence[Tensor]) -> str:
    """Which input doesn't hold the bytes any more that it held `before`, or nothing."""
    changed = [k for k, (t, b) in enumerate(zip(inputs, before, strict=True)) if not torch.equal(raw(t), b)]
    return f"it wrote to input {changed[0]}" if changed else ""


def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's `mallopt`, where there is one."""
    try:
        found: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return None
    return found
