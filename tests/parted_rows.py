"""Chains over rows that several blocks may share, small, for the CPU and for a GPU."""

import torch
from template_cases import randn
from template_cases import trace
from torch.nn import functional as F

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def group_norm(x, w, b):
    return F.group_norm(F.relu(x), 4, w, b)


def both(x, y):
    return (s := x + y), F.group_norm(s, 2) + y


def instance_norm(x, s):
    return F.instance_norm(x * s).clamp(-1, 1) * s


def batch_norm(x, w, b):
    variance = x.var((0, 2, 3), correction=0, keepdim=True)
    return F.relu((x - x.mean((0, 2, 3), keepdim=True)) * torch.rsqrt(variance + 1e-5) * w + b)


def mean(x):
    return F.gelu(x).mean((2, 3))


CASES = {
    "groups of channels, 3-D": (group_norm, (randn(2, 16, 5, 4, 6), randn(16), randn(16)), LAST_3D),
    "the sum too": (both, (randn(2, 8, 6, 8), randn(2, 8, 6, 8)), LAST),
    "channels": (instance_norm, (randn(3, 24, 8, 8), randn(24, 1, 1)), LAST),
    "a batch": (batch_norm, (randn(4, 12, 6, 8), randn(12, 1, 1), randn(12, 1, 1)), LAST),
    "means alone": (mean, (randn(2, 24, 16, 8),), LAST),
    "groups of one channel": (
        lambda x, w, b: F.group_norm(x, 16, w, b),
        (randn(2, 16, 8, 8), 1 + randn(16) / 8, randn(16) / 8),
        LAST,
    ),
    "what is true of a row": (
        lambda x: torch.where(x.mean((2, 3), keepdim=True) > 0, x, -x),
        (randn(2, 16, 8, 8),),
        LAST,
    ),
    "whole groups in memory": (group_norm, (randn(8, 16, 32, 32), 1 + randn(16) / 8, randn(16) / 8), None),
    "deviations of large numbers": (lambda x: F.group_norm(x + 1000, 2), (randn(2, 8, 8, 16),), LAST),
    "standard deviations": (lambda x: x * x.std((2, 3), keepdim=True), (randn(2, 8, 8, 16) + 5,), LAST),
}


def traced(name, dtype=torch.float32, device="cpu"):
    function, given, order = CASES[name]
    moved = [t.to(device, dtype) for t in given]
    return trace(function, tuple(t.contiguous(memory_format=order) if order and t.dim() > 3 else t for t in moved))
