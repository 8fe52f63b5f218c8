"""Tensors in nests of tuples, lists, mappings and dataclasses: the inputs and outputs models really have."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples, lists, mappings and dataclasses, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors(getattr(value, entry.name))


def convert(value: Any, device: str | None, dtype: torch.dtype | None, memo: dict[int, tuple[Any, Any]]) -> Any:
    """The same nest with its tensors on `device` and its floating ones in `dtype`; what changes is copied.

    One tensor at two places stays one tensor (`memo`, by id).
    """
    import torch

    if id(value) in memo:
        return memo[id(value)][1]
    result = value
    if isinstance(value, torch.Tensor):
        casts = value.is_floating_point() and value.dtype.itemsize > 1  # 8 bits are chosen for a product of theirs
        moved = value.to(device=device, dtype=dtype if casts else None)
        result = value if moved is value else moved.detach().requires_grad_(value.requires_grad)
    elif isinstance(value, torch.nn.utils.rnn.PackedSequence):
        # Its batch sizes stay on the CPU: rebuilding it field by field would move them.
        result = value.to(*[item for item in (device, dtype) if item is not None])  # type: ignore[arg-type]
    elif isinstance(value, dict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = convert(item, device, dtype, memo)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        result = type(value)(*(convert(item, device, dtype, memo) for item in value))
    elif isinstance(value, list | tuple):
        result = type(value)(convert(item, device, dtype, memo) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for entry in dataclasses.fields(value):
            object.__setattr__(result, entry.name, convert(getattr(value, entry.name), device, dtype, memo))
    memo[id(value)] = (value, result)  # holding `value` keeps its id from being used again
    return result
