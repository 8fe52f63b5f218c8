"""Tells whether tensors still hold what they held: the same memory, and no write since.

Torch counts writes (`Tensor._version`): `copy_`, `load_state_dict` and most optimizers count. Fused optimizers don't,
so every step of any optimizer counts here. A new `.data` is seen by its address, and by the end of the memory it had
before, since an address is given out again. A write through `.data` is not seen, nor one to memory that somebody else
holds and that a parameter is given again and again (`vector_to_parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

_expired = torch.UntypedStorage._expired
_steps = 0
_watching = False


def steps() -> int:
    """Optimizer steps that this process has made since somebody asked first."""
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_count)
        _watching = True
    return _steps


def _count(*_: Any) -> None:
    global _steps
    _steps += 1


class Marks:
    """What some tensors held at the time.

    Args:
        tensors: they.
        optimized: whether an optimizer may write them: fused ones do so without a count.
    """

    __slots__ = ("_marks", "_steps")

    def __init__(self, tensors: Sequence[Tensor], optimized: bool = True) -> None:
        self._steps = steps() if optimized else None
        self._marks = [
            (id(t), t._version, t.data_ptr(), StorageWeakRef(t.untyped_storage()))  # type: ignore[no-untyped-call]
            for t in tensors
        ]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, and nothing was written to them."""
        if self._steps is not None and self._steps != _steps:
            return False
        for tensor, (identity, version, address, storage) in zip(tensors, self._marks, strict=True):
            if id(tensor) != identity or tensor._version != version or tensor.data_ptr() != address:
                return False
            if _expired(storage.cdata):
                return False
        return True

    def forget(self) -> None:
        """Hold no longer, whatever comes."""
        self._steps = -1

    @property
    def gone(self) -> bool:
        """Whether the memory of one of them is no more."""
        return any(_expired(storage.cdata) for *_, storage in self._marks)
