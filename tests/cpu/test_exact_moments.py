"""Group norms whose 16-bit moments make eager exact next to the mean by luck: float32 ones are a measure too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.exact_moments import FULL_MOMENTS
from fusescout.exact_moments import FullMoments
from fusescout.modelcheck import ModelJudge
from fusescout.workload import Workload

BF16 = torch.bfloat16


class LikeCuda(TorchDispatchMode):
    """Group norms of 16-bit values as the CUDA kernel has them: moments in 16 bits, the rest in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "group_norm" not in str(func) or args[0].dtype != BF16:
            return func(*args, **(kwargs or {}))
        x, groups = args[0], next(a for a in args[1:] if isinstance(a, int) and a in (2,))
        rows = x.float().view(x.shape[0], groups, -1)
        mean, scale = rows.mean(-1, keepdim=True).to(BF16), rows.var(-1, correction=0, keepdim=True).rsqrt().to(BF16)
        y = ((rows - mean.float()) * scale.float()).view(x.shape).to(BF16)
        return y if "native" not in str(func) else (y, mean, scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 32, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(self.conv(x), 2)


class Exact(nn.Module):
    """The same with moments in float32, as a fused kernel has them; or with a mean that is off."""

    def __init__(self, model: Model, off: float = 0.0) -> None:
        super().__init__()
        self.model, self.off = model, off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.model.conv(x).float().view(x.shape[0], 2, -1)
        y = (rows - rows.mean(-1, keepdim=True) - self.off) * rows.var(-1, correction=0, keepdim=True).rsqrt()
        return y.view(x.shape[0], 32, x.shape[2], -1).to(BF16)


def images() -> torch.Tensor:
    """Most pixels are next to their mean, of which there would be enough among a hundred million others."""
    noise = torch.randint(-32, 33, (4, 2, 16, 64), generator=torch.Generator().manual_seed(0)) / 64
    found = 1 + torch.cat([noise, -noise, torch.zeros(4, 2, 96, 64)], 2)
    found[:, :, 0, 0] += 1 / 64  # next to the mean, not on it
    return found


@pytest.fixture
def judge() -> Iterator[ModelJudge]:
    torch.manual_seed(0)
    model = Model().to(BF16).eval()
    model.conv.weight.data[:] = torch.tensor([154 / 256, 103 / 256]).view(1, 2, 1, 1)  # their sum lies between two
    with LikeCuda():
        yield ModelJudge(Workload(model, (images().to(BF16),), dtype="bfloat16", name="norm"))


def test_exact_moments_pass(judge: ModelJudge) -> None:
    passed = judge.check(Exact(judge.workload.model))
    assert not isinstance(passed, str)
    assert passed.against == FULL_MOMENTS and "group norms in float32" in passed.measure


def test_eager_alone_would_refuse_them(judge: ModelJudge) -> None:
    judge._measured[FULL_MOMENTS] = []
    assert "where" in str(judge.check(Exact(judge.workload.model)))


@pytest.mark.parametrize("off", [0.02, -0.02, 0.1])
def test_a_mean_that_is_off_stays_refused(judge: ModelJudge, off: float) -> None:
    assert isinstance(judge.check(Exact(judge.workload.model, off)), str)


def test_only_group_norms_of_16_bits_are_changed() -> None:
    x = torch.randn(2, 4, 8, 8)
    weight = torch.randn(4)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), FullMoments() as mode:
            assert torch.equal(F.group_norm(x, 2, weight), F.group_norm(x, 2, weight)) and mode.count == 0
            found = F.group_norm(x.to(BF16), 2, weight.to(BF16))
        assert mode.count == 1 and found.dtype == BF16
        wanted = F.group_norm(x.to(BF16).float(), 2, weight.to(BF16).float()).to(BF16)
        assert torch.equal(found, wanted)
