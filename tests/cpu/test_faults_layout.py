"""Public faults of numbers, shapes and layouts: mixed dtypes, strides, sizes of one and none, complex values.

Every region of each model is replaced, in inference and in training: see `patched_models.Models`.
"""

from __future__ import annotations

import pytest
import torch
from patched_models import Base
from patched_models import Models
from patched_models import random
from torch import nn
from torch.nn import functional as F

model = Models()


@model(lambda: (random(4, 8, 16).bfloat16(),))
class MixedDtypes(Base):
    def forward(self, x):
        return (
            F.layer_norm(x.float(), (16,), self.n.weight).bfloat16() + x,
            (x * self.n.weight),
            (x.float() @ self.lin.weight).to(x.dtype) * x,
            (x > 0).float() * self.n.weight,
        )


@model()
class Autocast(Base):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.gelu(self.lin(x))
            h = self.n(h + x)
            with torch.autocast("cpu", enabled=False):
                h = self.lin2(h.float()) * 2 + 1
            return self.lin(h) + h


@model()
class ZeroInit(Base):
    def setup(self):
        nn.init.zeros_(self.lin.weight)
        nn.init.zeros_(self.lin.bias)

    def forward(self, x):
        return self.n(x + self.lin(x) * 2)


@model(lambda: (random(3, 4, 5, 16),))
class GN4(Base):
    def setup(self):
        self.g = nn.GroupNorm(2, 4)

    def forward(self, x):
        return F.silu(self.g(x) * 2), F.gelu(self.lin(x) + self.lin2.bias)


@model(
    lambda: (
        random(6, 8, 16)[::2],
        random(4, 8, 16).transpose(0, 1),
        random(1, 16).expand(8, 16),
        random(4 * 8 * 16 + 1)[1:].view(4, 8, 16),
    )
)
class Strides(Base):
    def forward(self, x, y, e, o):
        return (
            x * 2 + 1,
            F.relu(y + 1) * y,
            torch.softmax(y * 2, -1),
            self.n(e * 2),
            F.gelu(self.lin(o) + o),
            y.transpose(0, 1) + o * 2,
        )


@model(
    lambda: (
        random(1, 16).as_strided((1, 16), (1, 1)),
        random(1, 8, 16),
    )
)
class SizeOne(Base):
    def forward(self, x, y):
        return F.relu(self.lin(x) + x), self.n(y + x), y.sum(0) * 2


@model(lambda: (random(2, 16, 8, 8).to(memory_format=torch.channels_last),))
class ChannelsLast(Base):
    def setup(self):
        self.c = nn.Conv2d(16, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(self.c(x) + x) * 2, F.relu(self.bn(self.c(x))) + x


@model(
    lambda: (
        random(2, 43, 16),
        random(43, 43),
    )
)
class AttnBias(Base):
    def forward(self, x, b):
        q = self.lin(x)
        a = (q @ q.transpose(-1, -2)) * 0.25 + b
        a = a.masked_fill(torch.ones(43, 43).triu(1).bool(), float("-inf")).softmax(-1)
        return a @ q


@model(lambda: (random(2, 8, 16),))
class ComplexRope(Base):
    def forward(self, x):
        c = torch.view_as_complex(self.lin(x).view(2, 8, 8, 2))
        f = torch.polar(torch.ones(8, 8), torch.arange(64.0).view(8, 8))
        return torch.view_as_real(c * f).flatten(2) * 2 + 1


@model(lambda: (torch.randn(2, 8, dtype=torch.complex64),))
class ComplexLinear(Base):
    def setup(self):
        self.cl = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x):
        return torch.view_as_real(self.cl(x) * 2 + x)


@model()
class EmptyT(Base):
    def forward(self, x):
        return x[:0] * 2 + 1, self.n(x[:0] + 1), x * 2


@pytest.mark.parametrize(("name", "mode"), model.cases())
def test_patched_equals_eager(name: str, mode: str) -> None:
    model.check(name, mode, low_precision=name in ("MixedDtypes", "Autocast"))
