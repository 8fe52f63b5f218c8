"""Public faults of aliasing, mutation and random draws: whoever writes to memory must find it where it was.

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
from torch.utils.checkpoint import checkpoint

model = Models()


@model()
class ChunkInplace(Base):
    def forward(self, x):
        h = self.lin(x)
        a, b = h[..., :8], h[..., 8:]
        s = a * 2 + 1
        return F.relu_(a) * b + s


@model()
class ChunkInplace2(Base):
    def forward(self, x):
        h = self.lin(x)
        a, b = h[..., :8], h[..., 8:]
        s = b * 2 + 1
        b.mul_(3)
        a.add_(1)
        return a.sigmoid() * b.sin() + s


@model()
class ReluRelu_(Base):
    def forward(self, x):
        h = F.gelu(self.lin(x))
        return F.relu_(h) + 1


@model()
class InplaceResidual(Base):
    def setup(self):
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.lin(x)
        y = self.act(h)
        return self.lin2(y) + h


@model()
class ResUpdated(Base):
    def forward(self, x):
        x = x + self.lin(x)
        h = self.n(x)
        return h + x


@model()
class InplaceViewBase(Base):
    def forward(self, x):
        h = F.gelu(self.lin(x))
        v = h.view(32, 16)
        y = v * 2 + 1
        v.add_(1.0)
        return h, y


@model()
class InplaceViewBase2(Base):
    def forward(self, x):
        h = F.gelu(self.lin(x))
        v = h.view(32, 16)
        y = (v * 2).view(4, 8, 16) + h
        v[0].add_(1.0)
        return h, y


@model()
class InplaceRow(Base):
    def forward(self, x):
        h = self.lin(x) * 2
        t = h.transpose(0, 1)
        u = t + 1
        t[0] = 0.0
        return h * u.transpose(0, 1)


@model()
class InputWritten(Base):
    def forward(self, x):
        y = x * 2 + 1
        z = x.clone()
        z.mul_(2)
        return y + z, self.lin(y)


@model(modes=("inference",))
class InputWritten2(Base):
    def forward(self, x):
        y = x * 2 + 1
        x.mul_(2)
        return y + x, F.relu(x + y)


@model()
class WriteAfterRead(Base):
    def forward(self, x):
        h = x * 1
        v = h[:, :4]
        y = torch.relu(v + 1) * 2
        h[:, 2:6].add_(3)
        return y + h[:, :4], (v * 2 + 1)


@model()
class BufferUpdate(Base):
    def setup(self):
        self.register_buffer("c", torch.zeros(16))

    def forward(self, x):
        self.c.add_(x.detach().mean((0, 1)))
        return F.relu(self.lin(x) + self.c) * self.c


@model()
class LazyBuf(Base):
    def setup(self):
        self.buf = None

    def forward(self, x):
        if self.buf is None:
            self.buf = torch.ones(16)
        return F.relu(self.lin(x) * self.buf + 1)


@model()
class OutIsInput(Base):
    def forward(self, x):
        return x, x.view(-1), (x * 2).view(-1), self.lin.weight, self.lin.weight * 2


@model()
class ViewsOut(Base):
    def forward(self, x):
        h = F.gelu(self.lin(x))
        v = h.view(32, 16)
        return v, v * 2 + 1, h


@model()
class Detach(Base):
    def forward(self, x):
        h = self.lin(x) * 2
        return h * h.detach().relu() + 1, (h - h.detach()) * 3


@model()
class STE(Base):
    def forward(self, x):
        h = self.lin(x)
        return h + (h.round() - h).detach() * 1.0


@model()
class NoGradInside(Base):
    def forward(self, x):
        with torch.no_grad():
            t = torch.softmax(self.lin(x) * 2, -1)
        return (self.lin2(x) * t + 1).tanh(), t


@model()
class MixedGrad(Base):
    def setup(self):
        self.register_buffer("f", random(16))

    def forward(self, x):
        c = (self.f * 2).cos()
        s = (self.f * 2).sin() + 1
        return x * c + s, c, s, (x > 0), (x * 2 > 1)


@model()
class RandInside(Base):
    def forward(self, x):
        return torch.relu(x + torch.rand_like(x)) * 2 + torch.randn(16)


@model()
class RandomOrder(Base):
    def forward(self, x):
        a = x * 2
        d1 = F.dropout(a, 0.5, self.training)
        d2 = F.dropout(x, 0.5, self.training)
        b = a + 1
        return d1, d2, b


@model()
class RandomOrder2(Base):
    def forward(self, x):
        a = self.lin(x)
        r = torch.rand_like(a) + a
        q = torch.randn(16)
        b = F.gelu(a)
        return r, q, b, F.scaled_dot_product_attention(a, a, a, dropout_p=0.2 if self.training else 0.0), torch.rand(3)


@model()
class Dropouts(Base):
    def setup(self):
        self.d = nn.Dropout(0.3)

    def forward(self, x):
        return self.n(x + self.d(F.gelu(self.lin(x)))) * 2


@model(lambda: (random(4, 16, 8),))
class Dropout2(Base):
    def setup(self):
        self.d = nn.Dropout1d(0.5)

    def forward(self, x):
        return torch.tanh(self.d(x * 2) + 1) * x


@model()
class AlphaDrop(Base):
    def setup(self):
        self.d = nn.AlphaDropout(0.5)

    def forward(self, x):
        return torch.tanh(self.d(self.lin(x) * 2) + 1) * x


@model()
class RReLU(Base):
    def setup(self):
        self.d = nn.RReLU()

    def forward(self, x):
        return torch.tanh(self.d(self.lin(x) * 2) + 1) * x


@model()
class Checkpointed(Base):
    def setup(self):
        self.d = nn.Dropout(0.3)

    def forward(self, x):
        h = checkpoint(lambda t: self.d(F.gelu(self.lin(t))) + 1, x, use_reentrant=False)
        return F.relu(self.lin2(h) * 2)


@pytest.mark.parametrize(("name", "mode"), model.cases())
def test_patched_equals_eager(name: str, mode: str) -> None:
    model.check(name, mode)
