"""Group norms of 16-bit values as the framework makes them under autocast: in float32, rounded once.

PyTorch's own kernel for 16 bits rounds each group's mean and deviation to 16 bits as well. A value next to the mean is
then the mean, exactly: the error of its result, zero, is a thousandth of the rounding error that its neighbours have,
and no evaluation that keeps the mean in float32, Inductor's or ours, can match it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.reference import HALVES

FULL_MOMENTS = "float32 moments"
GROUP_NORMS = (torch.ops.aten.group_norm.default, torch.ops.aten.native_group_norm.default)
"""In inference mode the first one arrives here undivided."""


class FullMoments(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, group norms of 16-bit values are computed in float32; their results have the dtypes they had.

    Attributes:
        count: how many were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in GROUP_NORMS or not _is_half(args[0]):
            return func(*args, **(kwargs or {}))
        self.count += 1

        def whole(value: Any) -> Any:
            return value.float() if _is_half(value) else value

        found = func(*map(whole, args), **{k: whole(v) for k, v in (kwargs or {}).items()})
        dtype = args[0].dtype
        return found.to(dtype) if isinstance(found, Tensor) else tuple(f.to(dtype) for f in found)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in HALVES
