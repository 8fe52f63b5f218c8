"""Constant attention masks: which are recognised, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from patched_models import plan_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fusescout.capture import capture
from fusescout.patching import patched
from fusescout.workload import build

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
LENGTH = 12
MIN = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()  # all these models share one `forward`, and Dynamo captures one function eight times only


def positions(n: int = LENGTH) -> torch.Tensor:
    return torch.arange(n)


def causal() -> torch.Tensor:
    return positions()[:, None] >= positions()[None, :]


def causal_of(hidden: float) -> torch.Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(~causal(), hidden)[None, None]


class Attend(nn.Module):
    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor | None], **named: Any) -> None:
        super().__init__()
        self.mask, self.named = mask, named
        self.register_buffer("kept", causal())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, -1, 2, 8).transpose(1, 2)
        out = scaled_dot_product_attention(heads * 0.5, heads, heads, attn_mask=self.mask(x), **self.named)
        return out.transpose(1, 2).reshape(x.shape)


def attentions(model: nn.Module, x: torch.Tensor) -> list[tuple[Any, bool]]:
    """(mask, is_causal) of each attention captured."""
    found = capture(build(model, (x,)))
    assert not found.warnings
    nodes = [n for g in found.graphs for n in g.module.graph.nodes if n.target is ATTENTION]
    return [(n.args[3] if len(n.args) > 3 else None, n.args[5] if len(n.args) > 5 else False) for n in nodes]


X = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(1))
RECOGNISED = {
    "causal": (lambda x: causal(), True),
    "causal, built of the input's length": (lambda x: torch.ones(x.shape[1], x.shape[1]).tril().bool(), True),
    "causal, expanded": (lambda x: causal().expand(2, 1, LENGTH, LENGTH), True),
    "minus infinity": (lambda x: causal_of(float("-inf")), True),
    "smallest number": (lambda x: causal_of(MIN), True),
    "new_ones of the input": (lambda x: x.new_ones(LENGTH, LENGTH).tril() > 0, True),
    "all of it": (lambda x: torch.ones(2, 1, 1, LENGTH, dtype=torch.bool), False),
    "zeros are added": (lambda x: torch.zeros(LENGTH, LENGTH), False),
}


def padded_through_a_view(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros(2, 1, LENGTH, LENGTH)
    mask[:, 0].masked_fill_((x[:, None, :, 0] > 100), float("-inf"))
    return mask


def assigned(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask[:, 5:] = float("-inf")
    return mask


def filled_through_two_views(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[2:].t()[5:].fill_(False)
    return mask


LEFT = {
    "written through a view": padded_through_a_view,
    "a slice assigned": assigned,
    "written through two views": filled_through_two_views,
    "a window": lambda x: causal() & (positions()[:, None] - positions()[None, :] < 4),
    "the other triangle": lambda x: ~causal() | torch.eye(LENGTH, dtype=torch.bool),
    "a bias": lambda x: causal_of(-4.0),
    "decided by the input": lambda x: causal() & (x[0, 0, 0] > -100),
    "ones like a comparison of the input": lambda x: causal() & (torch.ones_like(x[0, :, 0]) * x[0, :, 0] > -100),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_mask_that_no_input_decides_is_recognised(name: str) -> None:
    mask, is_causal = RECOGNISED[name]
    model = Attend(mask).eval()
    assert attentions(model, X) == [(None, is_causal)]
    expected = model(X)
    with torch.no_grad(), patched(model, plan_of(model, X)):
        torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize("name", LEFT)
def test_any_other_mask_stays(name: str) -> None:
    model = Attend(LEFT[name]).eval()
    ((mask, is_causal),) = attentions(model, X)
    assert mask is not None
    assert not is_causal
    plan = plan_of(model, X).model_copy(update={"constant_masks": True})
    other = X.clone()
    other[:, 7, 0] = 200.0
    with torch.no_grad():
        expected = [model(x) for x in (X, other)]
        with patched(model, plan):
            for x, wanted in zip((X, other), expected, strict=True):
                torch.testing.assert_close(model(x), wanted)


def test_a_mask_in_a_buffer_stays_since_it_may_change() -> None:
    model = Attend(lambda x: None).eval()
    model.mask = lambda x: model.kept
    ((mask, _),) = attentions(model, X)
    assert mask is not None
    with torch.no_grad(), patched(model, plan_of(model, X)):
        model(X)
        model.kept.copy_(torch.eye(LENGTH, dtype=torch.bool))
        changed = model(X)
    torch.testing.assert_close(changed, model(X))


def test_a_causal_mask_of_fewer_queries_than_keys_counts_from_the_top_left() -> None:
    class Cross(nn.Module):
        def __init__(self, diagonal: int) -> None:
            super().__init__()
            self.diagonal = diagonal

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(2, -1, 2, 8).transpose(1, 2)
            mask = torch.ones(4, LENGTH, dtype=torch.bool).tril(self.diagonal)
            return scaled_dot_product_attention(heads[:, :, :4], heads, heads, attn_mask=mask)

    assert attentions(Cross(0).eval(), X) == [(None, True)]
    ((mask, _),) = attentions(Cross(LENGTH - 4).eval(), X)
    assert mask is not None


def test_scale_and_dropout_are_kept() -> None:
    found = capture(build(Attend(lambda x: causal(), scale=0.7, dropout_p=0.0).eval(), (X,)))
    (node,) = [n for g in found.graphs for n in g.module.graph.nodes if n.target is ATTENTION]
    assert node.args[3:] == (None, 0.0, True)
    assert node.kwargs["scale"] == 0.7


def test_what_made_the_mask_is_gone() -> None:
    (graph,) = capture(build(Attend(lambda x: causal()).eval(), (X,))).graphs
    assert not {n.op for n in graph.graph.nodes} & {"arange", "ge"}


def test_leaving_masks_out_is_a_change_by_itself() -> None:
    model = Attend(lambda x: causal()).eval()
    expected = model(X)
    plan = plan_of(model, X).model_copy(update={"entries": [], "constant_masks": True})
    assert not plan.is_empty
    assert plan.emptied().is_empty
    with torch.no_grad(), patched(model, plan) as handle:
        torch.testing.assert_close(model(X), expected)
    assert handle.counters.changed
    assert (handle.counters.masks, handle.counters.sites) == (1, 0)
