"""What `gemm.py` measures: shapes (M x N x K), chains, the bare GEMM, and cuBLASLt's own epilogue where it has one."""

from functools import lru_cache
from functools import partial

import torch
from torch.nn import functional as F


def gelu(x):
    return F.gelu(x, approximate="tanh")


@lru_cache(maxsize=1)
def both(g, u):
    """The two weights as one, joined once: the bare GEMM's time doesn't include that."""
    return torch.cat((g, u))


def fused(gelu, x, w, b):
    return torch.ops.aten._addmm_activation(b, x, w.t(), use_gelu=gelu)


def case(m, n, k, chain, extra=(), rival=None, template="gemm_epilogue", bare=F.linear):
    shapes = [(m, k), (n, k), *extra]
    return {"shapes": shapes, "chain": chain, "rival": rival, "template": template, "bare": bare, "mnk": (m, n, k)}


def tanh_gelu_chain(x, w, b):
    return gelu(F.linear(x, w, b))


def relu_chain(x, w, b):
    return F.relu(F.linear(x, w, b))


def silu_chain(x, w):
    return F.silu(F.linear(x, w))


def residual_chain(x, w, b, r):
    return F.linear(x, w, b) + r


def erf_gelu_chain(x, w, b):
    return F.gelu(F.linear(x, w, b))


def gated_chain(x, g, u):
    return F.silu(F.linear(x, g)) * F.linear(x, u)


def joined_chain(x, g, u):
    return F.linear(x, both(g, u))


CASES = {
    "8192x3072x768 bias gelu_tanh": case(8192, 3072, 768, tanh_gelu_chain, [(3072,)], partial(fused, True)),
    "4096x4096x4096 bias relu": case(4096, 4096, 4096, relu_chain, [(4096,)], partial(fused, False)),
    "8192x768x3072 bias residual": case(8192, 768, 3072, residual_chain, [(768,), (8192, 768)]),
    "3152x3072x768 bias gelu_tanh": case(3152, 3072, 768, tanh_gelu_chain, [(3072,)], partial(fused, True)),
    "512x4096x4096 silu": case(512, 4096, 4096, silu_chain),
    "16x4096x4096 silu": case(16, 4096, 4096, silu_chain),
    "16384x3072x768 bias gelu_erf": case(16384, 3072, 768, erf_gelu_chain, [(3072,)]),
    "8192x50257x768 no epilogue, odd N": {**case(8192, 50257, 768, lambda x, w: F.linear(x, w)), "limit": 6},
    "8192x3072x1024 gated silu": case(
        8192,
        3072,
        1024,
        gated_chain,
        [(3072, 1024)],
        template="gated_mlp",
        bare=lambda x, g, u: F.linear(x, both(g, u)),
    ),
}
CPU_CASES = {
    "64x96x32 bias gelu_tanh": case(64, 96, 32, tanh_gelu_chain, [(96,)]),
    "33x40x24 gated silu": case(
        33, 40, 24, gated_chain, [(40, 24)], template="gated_mlp", bare=lambda x, g, u: F.linear(x, g)
    ),
}
