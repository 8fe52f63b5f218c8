"""Products of 8-bit floats in the precision of a model that is run to check others: their factors widen exactly.

The framework has no such product with a wide result, and its 8-bit weights must stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.flops import op_name
from fusescout.scaled import SCALED
from fusescout.scaled import arguments


def widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in `dtype`, but for 8-bit floats: products read them as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype.itemsize > 1 else tensor


class ExactScaled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, scaled products give `dtype`, whatever result they are asked for.

    Scales for blocks along K are left to the framework, which refuses them in such a model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_name(str(func)) not in SCALED:
            return func(*args, **(kwargs or {}))
        given = arguments(str(func), args, kwargs or {})
        a, b, bias = given["self"], given["mat2"], given.get("bias")
        scales = [s[0] if isinstance(s, (list, tuple)) else s for s in (given["scale_a"], given["scale_b"])]
        lines = ((a.shape[0], 1), (1, b.shape[1]))
        if any(s.numel() != 1 and s.shape != shape for s, shape in zip(scales, lines, strict=True)):
            return func(*args, **(kwargs or {}))
        product = a.to(self.dtype) @ b.to(self.dtype)
        for scale in scales:
            product = product * scale.to(self.dtype)
        return product if bias is None else product + bias.to(self.dtype)
