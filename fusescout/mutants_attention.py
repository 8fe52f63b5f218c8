"""Planted bugs of attention: faults that a kernel over tiles of keys can have, put in the place of eager's operators.

The built-in operator is replaced by its definition with one fault in it; of attention that is written out, the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusescout.contenders.base import Runner
from fusescout.flops import op_class
from fusescout.ir import Subgraph
from fusescout.reference import to_source
from fusescout.regions import GEMMS
from fusescout.regions.rows import SOFTMAXES

TILE = 16
"""Keys of a lost tile, or a quarter of all where there are not so many."""
LOST_TILE = "lost tile of keys"
BUILT_IN = "torch.ops.aten.scaled_dot_product_attention.default("
SOFTMAX = ("torch.ops.aten.softmax.int(", "torch.ops.aten._softmax.default(")
Weigh = Callable[[Tensor], Tensor]
"""What a row's scores become: weights that need not add up to one where the fault is."""


def attention_mutants(graph: Subgraph) -> dict[str, Runner]:
    """The bugs by name, for a sub-graph with attention in it; none for others."""
    calls = [op for op in graph.ops if op_class(op.target) == "attention"]
    written = any(op.name in SOFTMAXES for op in graph.ops) and sum(op.name in GEMMS for op in graph.ops) > 1
    if calls:
        wrong = {name: _built_in(**fault) for name, fault in _FAULTS.items()}
        causal = any(op.kwarg("is_causal", op.args[5] if len(op.args) > 5 else False) for op in calls)
        if not causal:
            del wrong["causal order off by one"]
        if not causal and not any(len(op.args) > 3 and op.args[3] is not None for op in calls):
            del wrong["nothing hidden"]
        return {name: _planted(graph, call, _softmax(_plain)) for name, call in wrong.items()}
    if written:
        return {
            name: _planted(graph, _built_in(), _softmax(weigh))
            for name, weigh in {LOST_TILE: _lost_tile, "sums of two bases": _two_bases}.items()
        }
    return {}


def without_bug(graph: Subgraph) -> Runner:
    """The definition alone: what the bugs are planted in must pass."""
    return _planted(graph, _built_in(), _softmax(_plain))


def _planted(graph: Subgraph, attend: Callable[..., Tensor], softmax: Callable[..., Tensor]) -> Runner:
    """The sub-graph's own text with other functions for attention and softmax."""
    text = to_source(graph).replace(BUILT_IN, "attend(")
    for name in SOFTMAX:
        text = text.replace(name, "softmax(")
    scope: dict[str, Any] = {"torch": torch, "attend": attend, "softmax": softmax}
    exec(text, scope)

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(scope["reference"](*inputs))

    return run


def _softmax(weigh: Weigh) -> Callable[..., Tensor]:
    def call(x: Tensor, dim: int, *rest: Any, **named: Any) -> Tensor:
        return weigh(x.float()).to(named.get("dtype") or x.dtype)

    return call


def _built_in(
    factor: float | None = None, hides: bool = True, ahead: int = 0, weigh: Weigh | None = None
) -> Callable[..., Tensor]:
    """Attention by its definition, in float32, with faults.

    Args:
        factor: what the scores are multiplied by besides their scale; None for 1.
        hides: whether mask and causal order are heeded.
        ahead: keys beyond its own place that a query sees in causal order.
        weigh: makes weights of scores.
    """

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q.float() @ k.float().mT * (scale * (factor or 1.0))
        if is_causal and hides:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(ahead)
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None and hides:
            scores = scores + (torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask)
        weights = (weigh or _plain)(scores)
        out = (weights @ v.float()).to(q.dtype)
        return torch.empty_like(q.expand(out.shape[:-1] + q.shape[-1:])[..., : out.shape[-1]]).copy_(out)

    return call


def _plain(scores: Tensor) -> Tensor:
    """A softmax; 0 where nothing is seen."""
    return torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, scores.softmax(-1))


def _lost_tile(scores: Tensor) -> Tensor:
    """The last keys, fewer than fill a tile, are left out."""
    keys = scores.shape[-1]
    lost = min(TILE, -(-keys // 4))
    return _plain(scores.index_fill(-1, torch.arange(keys - lost, keys, device=scores.device), -math.inf))


def _two_bases(scores: Tensor) -> Tensor:
    """Exponentials of the first keys keep the base they had when the largest score became known."""
    half = -(-scores.shape[-1] // 2)
    base = scores[..., :half].amax(-1, keepdim=True)
    top = torch.maximum(base, scores.amax(-1, keepdim=True))
    weights = (scores - top).exp()
    wrong = torch.cat(((scores[..., :half] - base).exp(), weights[..., half:]), -1)
    return torch.where(top == -math.inf, 0.0, wrong / weights.sum(-1, keepdim=True))


_FAULTS: dict[str, dict[str, Any]] = {
    "scores not scaled as told": {"factor": 1.25},
    "nothing hidden": {"hides": False},
    "causal order off by one": {"ahead": 1},
    LOST_TILE: {"weigh": _lost_tile},
    "sums of two bases": {"weigh": _two_bases},
}
