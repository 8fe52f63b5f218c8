"""Tables of public faults, matching: what looks like a known chain and isn't. Each must give eager's numbers.

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


@model()
class PermuteAttn(Base):
    def forward(self, x):
        q = self.lin(x).view(4, 8, 2, 8)
        k = self.lin2(x).view(4, 8, 2, 8)
        a = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 8**0.5
        return (a.softmax(1) @ x.view(4, 8, 2, 8).transpose(1, 2)), a.softmax(-1).transpose(1, 2) + x.mean()


@model()
class SharedCalledTwice(Base):
    def forward(self, x):
        return F.relu(self.lin(x)) + self.lin(x * 2 + 1)


@model(lambda: (random(4, 16),))
class MmMm(Base):
    def forward(self, x):
        return x @ self.lin.weight + (x[:1] @ self.lin2.weight), x + self.lin.bias


@model()
class RankBias(Base):
    def setup(self):
        self.pos = nn.Parameter(random(1, 8, 16))
        self.col = nn.Parameter(random(8, 1))
        self.s = nn.Parameter(random())
        self.full = nn.Parameter(random(4, 8, 16))

    def forward(self, x):
        return F.gelu(self.lin(x) + self.pos), self.lin2(x) + self.col, self.lin(x) * self.s + self.full


@model(
    lambda: (
        random(16, 16),
        random(16),
    )
)
class SquareBias(Base):
    def forward(self, x, b):
        return (
            F.relu(x @ self.lin.weight + b),
            F.relu(self.lin(x) + b[:, None]),
            F.relu(self.lin(x) + b.expand(16, 16).t()),
        )


@model(lambda: (random(1, 16),))
class OneRow(Base):
    def forward(self, x):
        return F.gelu(self.lin(x)) + x, self.n(x + self.lin2(x))


@model()
class MultiUse(Base):
    def forward(self, x):
        z = self.lin(x)
        y = F.relu(z + x)
        return y, z, y + z.mean()


@model()
class Subclassed(Base):
    def setup(self):
        class Leaky(nn.ReLU):
            def forward(s, x):
                return torch.where(x > 0, x, 0.3 * x)

        self.a = Leaky()

    def forward(self, x):
        return (
            self.a(self.lin(x)),
            F.gelu(self.lin(x)),
            F.gelu(self.lin(x), approximate="tanh"),
            F.leaky_relu(self.lin(x), 0.3),
            F.relu6(self.lin(x) * 4),
            F.softplus(self.lin(x), beta=2),
        )


@model()
class ScaleEps(Base):
    def setup(self):
        self.n2 = nn.LayerNorm(16, eps=1e-2)
        self.r = nn.RMSNorm(16)
        self.r2 = nn.RMSNorm(16, eps=1e-1)

    def forward(self, x):
        h = self.lin(x).view(4, 8, 2, 8).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(h, h, h, scale=0.37),
            self.n2(x + self.lin2(x)),
            self.r(x * 2),
            self.r2(x * 2),
        )


@model()
class OtherDims(Base):
    def forward(self, x):
        h = self.lin(x)
        return (
            (h * 2).sum(1),
            (h + 1).sum(1, keepdim=True),
            (h * 3).mean((0, 2)),
            h.relu().amax(1, keepdim=True),
            (h * h).var(1),
            torch.softmax(h + 1, 0),
            (h * 2).sum(),
            h.norm(dim=1),
            (h + x).mean(-1, keepdim=True),
        )


@model(lambda: (random(8, 16),))
class BNTrain(Base):
    def setup(self):
        self.bn = nn.BatchNorm1d(16)

    def forward(self, x):
        return F.relu(self.bn(self.lin(x))) + x


@model()
class OneBatchNormEval(Base):
    def setup(self):
        self.bn = nn.BatchNorm1d(8)
        self.bn.eval()

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x):
        return F.relu(self.bn(self.lin(x))) + x


@model()
class GatedMLP(Base):
    def forward(self, x):
        return self.lin(F.silu(self.lin(x)) * self.lin2(x)) + x, F.silu(self.lin(x)) * self.lin(x)


@model()
class GLU(Base):
    def forward(self, x):
        return F.glu(self.lin(x), -1) * 2, F.glu(self.lin(x) * 2, 1) + 1


@model()
class Tri(Base):
    def forward(self, x):
        return (self.lin(x) * 2).tril() + 1, (x + 1).triu(1) * 2


@model()
class BigFan(Base):
    def forward(self, x):
        ys = [x * k + 1 for k in range(20)]
        return sum(ys), ys[3], ys[7].relu()


@model()
class Foreach(Base):
    def forward(self, x):
        a = self.lin(x)
        b = a * 2
        c = b.sum(-1, keepdim=True)
        return b / c, a + c, (a - a.mean(-1, keepdim=True)) / (a.var(-1, keepdim=True) + 1e-5).sqrt()


@model(lambda: (torch.randint(0, 16, (4, 8)),))
class Ints(Base):
    def setup(self):
        self.e = nn.Embedding(16, 16)

    def forward(self, i):
        return (i * 2 + 1) // 3, self.e(i) * 2 + 1, (i & 3) | 1, i.float() * 0.5, i / 3, i % 5


@model()
class ScalarT(Base):
    def setup(self):
        self.register_buffer("s", torch.tensor(2.0))

    def forward(self, x):
        return x * self.s + 1, self.s * 2 + 1, torch.where(x > 0, x, self.s)


@model()
class TransposeMid(Base):
    def forward(self, x):
        h = (self.lin(x) * 2).transpose(1, 2)
        return (h + 1).contiguous() * 2, torch.softmax((h + 1).transpose(1, 2), -1)


@model(lambda: (random(4, 8, 16), random(4, 8, 1)))
class MovedByAnother(Base):
    """The first replacement moves `a` behind `b`, which belong to the second."""

    def forward(self, x, y):
        m = y * 3
        s = x * 2
        a = s + m
        b = s.relu()
        return a, b, m + 1


@pytest.mark.parametrize(("name", "mode"), model.cases())
def test_patched_equals_eager(name: str, mode: str) -> None:
    model.check(name, mode)
