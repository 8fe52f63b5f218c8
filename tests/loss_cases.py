"""Vocabulary heads with their cross entropy, as models spell them. As `template_cases.py`, and run by the same tests.

Large enough for a GPU's tiles, with more classes than tiles take, and a last tile that is not full.
"""

import torch
from row_cases import targets
from template_cases import Case
from template_cases import randn
from torch import Tensor
from torch.nn import functional as F

WIDTH = 40


def head(classes: int = 1031) -> Tensor:
    """Scaled so that scores have the size of its inputs."""
    return randn(classes, WIDTH) * WIDTH**-0.5


def causal(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """As `transformers` computes it."""
    scores = F.linear(x, w).float()
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), t.view(-1), ignore_index=-100)


def shifted(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """As minimal GPTs and older versions compute it: the last position predicts nothing."""
    scores = F.linear(x, w)[..., :-1, :].contiguous()
    return F.cross_entropy(scores.view(-1, scores.shape[-1]), t)


def capped(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Gemma's soft cap, and a bias."""
    return F.cross_entropy(torch.tanh(F.linear(x, w, b) / 3.0) * 3.0, t, reduction="sum")


def smoothed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    scores = F.linear(x, w).transpose(1, 2)
    return F.cross_entropy(scores, t, reduction="none", ignore_index=7, label_smoothing=0.1)


HEADS = [
    Case(
        "causal_loss",
        "linear_cross_entropy",
        causal,
        lambda: (randn(2, 67, WIDTH), head(), targets(2, 67, classes=1031)),
    ),
    Case(
        "shifted_loss",
        "linear_cross_entropy",
        shifted,
        lambda: (randn(2, 66, WIDTH), head(), targets(130, classes=1031)),
    ),
    Case(
        "capped_loss",
        "linear_cross_entropy",
        capped,
        lambda: (randn(70, WIDTH), head(), randn(1031), targets(70, classes=1031)),
    ),
    Case(
        "smoothed_losses",
        "linear_cross_entropy",
        smoothed,
        lambda: (randn(4, 70, WIDTH), head(), targets(4, 70, classes=1031, ignored=False)),
    ),
    Case(
        "nll_head",
        "linear_cross_entropy",
        lambda x, w, t: F.nll_loss(F.log_softmax(x @ w, -1), t),
        lambda: (randn(70, WIDTH), head(1032).t().contiguous(), targets(70, classes=1032)),
    ),
]
