"""Chains around reductions that are no plain last-dimension norm, and chains that take tensors to pieces.

As `template_cases.py`, and run by the same tests.
"""

import torch
from template_cases import Case
from template_cases import randn
from torch import Tensor
from torch.nn import functional as F


def targets(*shape: int, classes: int, ignored: bool = True) -> Tensor:
    made = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(5))
    if ignored:
        made.view(-1)[::3] = -100
    return made


def rotated(x: Tensor) -> Tensor:
    left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-right, left), -1)


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama's."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotated(q) * sin


def partly_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-NeoX's: the first quarter of each head."""
    n = cos.shape[-1]
    return torch.cat((rotary(q[..., :n], cos, sin), q[..., n:]), -1)


def interleaved_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GPT-J's: neighbouring pairs."""
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos + turned * sin


def queries(heads: int = 4) -> Tensor:
    return randn(2, 10, heads, 64).transpose(1, 2)


def channels(*shape: int) -> tuple[Tensor, ...]:
    return randn(*shape), randn(shape[1]), randn(shape[1], seed=1)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


ROWS = [
    Case("group_norm", "rowwise", lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), lambda: channels(3, 12, 5, 7)),
    Case("group_norm_flat", "rowwise", lambda x, w, b: F.group_norm(x + 1, 8, w, b), lambda: channels(9, 64)),
    Case("group_norm_plain", "rowwise", lambda x: F.group_norm(x, 3), lambda: (randn(2, 6, 33),)),
    Case(
        "group_norm_last",
        "rowwise",
        lambda x, w, b: F.silu(F.group_norm(x, 4, w, b) * 2),
        lambda: (channels(3, 12, 5, 6)[0].to(memory_format=torch.channels_last), *channels(3, 12, 5, 6)[1:]),
    ),
    Case(
        "instance_norm",
        "rowwise",
        lambda x, w, b: F.relu(F.instance_norm(x, None, None, w, b, True)),
        lambda: channels(2, 3, 9, 11),
    ),
    Case(
        "layer_norm_dims",
        "rowwise",
        lambda x, w, b: F.layer_norm(x, (3, 43), w, b),
        lambda: (randn(40, 3, 43), randn(3, 43), randn(3, 43, seed=1)),
    ),
    Case("softmax_channels", "rowwise", lambda x: (x * 2).softmax(1), lambda: (randn(2, 19, 6, 8),)),
    Case("log_softmax_first", "rowwise", lambda x: x.log_softmax(0), lambda: (randn(7, 33),)),
    Case("logsumexp", "rowwise", lambda x: F.leaky_relu(x.logsumexp(1, keepdim=True)), lambda: (randn(300, 100),)),
    Case("mean_of_image", "rowwise", lambda x, b: F.gelu(x.mean((2, 3)) + b), lambda: (randn(60, 5, 7, 7), randn(5))),
    Case(
        "pool_flatten",
        "rowwise",
        lambda x: F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1) * 2,
        lambda: (randn(60, 5, 7, 7),),
    ),
    Case("dropped_dim", "rowwise", lambda x: x.sum(-1) * 2, lambda: (randn(265, 66),)),
    Case("amax_of_image", "rowwise", lambda x: x.amax(dim=(2, 3)).sigmoid(), lambda: (randn(60, 5, 6, 7),)),
    Case(
        "min_of_channels",
        "rowwise",
        lambda x, b: torch.tanh((x + b).min(1, keepdim=True)[0]) * 2,
        lambda: (randn(3, 12, 7, 9), randn(12, 1, 1)),
    ),
    Case("max_of_last", "rowwise", lambda x: F.silu(x.max(-1).values + 1), lambda: (randn(70, 33),)),
    Case("middle_variance", "rowwise", lambda x: x.var(1), lambda: (randn(9, 33, 40),)),
    Case(
        "gated_norm", "rowwise", lambda x, w: F.rms_norm(_gated(x), (64,), w, 1e-6), lambda: (randn(33, 128), randn(64))
    ),
    Case(
        "norm_mish_view",
        "rowwise",
        lambda x, w, b: F.mish(F.group_norm(F.leaky_relu(x) * 1.5, 2, w, b)).unsqueeze(1),
        lambda: channels(33, 128),
    ),
    Case(
        "cross_entropy",
        "rowwise",
        lambda x, t: F.cross_entropy(x.view(-1, x.shape[-1]).float(), t.view(-1)),
        lambda: (randn(2, 19, 301), targets(2, 19, classes=301)),
    ),
    Case(
        "cross_entropy_sum",
        "rowwise",
        lambda x, t: F.cross_entropy(x, t, reduction="sum") * 0.5,
        lambda: (randn(37, 301), targets(37, classes=301)),
    ),
    Case(
        "cross_entropy_each",
        "rowwise",
        lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
        lambda: (randn(300, 301), targets(300, classes=301)),
    ),
    Case(
        "nll_loss",
        "rowwise",
        lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
        lambda: (randn(37, 301), targets(37, classes=301)),
    ),
    Case(
        "cross_entropy_image",
        "rowwise",
        lambda x, t: F.cross_entropy(x, t),
        lambda: (randn(2, 19, 6, 8), targets(2, 6, 8, classes=19, ignored=False)),
    ),
]
WIDE = [
    Case(
        "wide_group_norm", "rowwise", lambda x, w, b: F.relu(F.group_norm(x, 8, w, b)), lambda: channels(8, 16, 41, 128)
    ),
    Case("wide_log_softmax", "rowwise", lambda x: (x * 2).log_softmax(-1), lambda: (randn(3, 20011),)),
    Case("wide_logsumexp", "rowwise", lambda x: x.logsumexp(-1), lambda: (randn(40, 9001),)),
    Case(
        "wide_cross_entropy",
        "rowwise",
        lambda x, t: F.cross_entropy(x.float(), t),
        lambda: (randn(9, 20011), targets(9, classes=20011)),
    ),
    Case("wide_variance", "rowwise", lambda x: x.std(-1, keepdim=True) * x, lambda: (randn(4, 20000) + 50,)),
]
"""Rows that on a GPU don't fit into registers."""
PIECES = [
    Case("rotary", "pointwise", rotary, lambda: (queries(), randn(2, 10, 64), randn(2, 10, 64, seed=1))),
    Case("partly_rotary", "pointwise", partly_rotary, lambda: (queries(), randn(2, 10, 16), randn(2, 10, 16, seed=1))),
    Case(
        "rotary_two",
        "pointwise",
        lambda q, k, c, s: (rotary(q, c, s), rotary(k, c, s)),
        lambda: (queries(), queries() * 2, randn(2, 10, 64), randn(2, 10, 64, seed=1)),
    ),
    Case("interleaved", "pointwise", interleaved_rotary, lambda: (queries(), randn(10, 64), randn(10, 64, seed=1))),
    Case("chunks", "pointwise", _gated, lambda: (randn(33, 130),)),
    Case("unbound", "pointwise", lambda x: torch.stack([a * 2 for a in x.unbind(1)], 2), lambda: (randn(5, 3, 40),)),
    Case("cat_rows", "pointwise", lambda x, y: torch.relu(torch.cat((x, y)) + 1), lambda: (randn(4, 33), randn(6, 33))),
    Case(
        "permuted",
        "pointwise",
        lambda x, y: F.gelu(x.permute(0, 2, 3, 1) + y).reshape(2, -1, 8),
        lambda: (randn(2, 8, 4, 6), randn(8)),
    ),
    Case(
        "regrouped",
        "pointwise",
        lambda x, y: torch.relu(x.transpose(1, 2).reshape(2, 6, 32) + y),
        lambda: (randn(2, 4, 6, 8), randn(2, 6, 32)),
    ),
    Case("max_pool", "pointwise", lambda x: F.max_pool2d(x * 2, 2).clamp(0, 1), lambda: (randn(2, 3, 8, 12),)),
    Case(
        "avg_pool", "pointwise", lambda x, y: F.gelu(F.avg_pool3d(x + y, 2)), lambda: (randn(2, 3, 4, 6, 10), randn(1))
    ),
]
WINDOWED = [
    Case(
        "max_pool_overlap",
        "pooling",
        lambda x, b: F.mish(F.max_pool2d(F.relu(x + b), 3, 2, 1)),
        lambda: (randn(2, 5, 11, 13), randn(5, 1, 1)),
    ),
    Case(
        "max_pool_ceil",
        "pooling",
        lambda x: F.max_pool2d(x * 2, 3, 2, ceil_mode=True, dilation=(1, 2)) + 1,
        lambda: (randn(2, 6, 12, 15).to(memory_format=torch.channels_last),),
    ),
    Case(
        "avg_pool_ceil",
        "pooling",
        lambda x, y: F.gelu(F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)) * y,
        lambda: (randn(2, 5, 12, 10), randn(5, 1, 1)),
    ),
    Case(
        "avg_pool_uneven",
        "pooling",
        lambda x: torch.sigmoid(F.avg_pool3d(x, (2, 3, 2), (2, 2, 3), (0, 1, 1), count_include_pad=False)),
        lambda: (randn(2, 3, 5, 7, 9),),
    ),
]
"""Pooling with windows that overlap, stick out or leave something over."""
