"""Attention masks are given memory that fused kernels read, and the model's results stay what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from patched_models import plan_of
from torch import Tensor
from torch import fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from fusescout.capture import capture
from fusescout.capture.mask_layout import lay_out_masks
from fusescout.capture.masks import ATTENTION
from fusescout.patching import patched
from fusescout.workload import build

B, H, S, D = 3, 2, 5, 8


class Biased(nn.Module):
    """Two layers of attention over one mask."""

    def __init__(self, mask: Callable[[Biased, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.table = nn.Embedding(S * S, H)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(self, x)
        for _ in range(2):
            heads = x.view(B, S, H, D).transpose(1, 2)
            x = scaled_dot_product_attention(heads * 0.5, heads, heads, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        return x


def positions() -> Tensor:
    return torch.arange(S * S).view(S, S)


def heads_last(model: Biased, x: Tensor) -> Tensor:
    return model.table(positions()).permute(2, 0, 1)[None]


def masked_for_each_sequence(model: Biased, x: Tensor) -> Tensor:
    shown = (torch.arange(S) > 0)[None, None, :, None].expand(B, 1, S, S)
    return torch.where(shown, heads_last(model, x), -1e4)


def of_the_input(model: Biased, x: Tensor) -> Tensor:
    return (x[:, :, 0] > -9)[:, None, :, None].expand(B, 1, S, S)


def written_to_afterwards(model: Biased, x: Tensor) -> Tensor:
    mask = torch.zeros(S, S, H).permute(2, 0, 1)
    mask[:, 0] += x[0, 0, 0]
    return mask


X = torch.randn(B, S, H * D, generator=torch.Generator().manual_seed(3))
STRIDED = {f.__name__: f for f in (heads_last, masked_for_each_sequence, of_the_input)}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def attentions(model: nn.Module) -> list[fx.Node]:
    found = capture(build(model, (X,)))
    assert not found.warnings
    return [n for g in found.graphs for n in g.module.graph.nodes if n.target is ATTENTION]


@pytest.mark.parametrize("name", STRIDED)
def test_a_mask_whose_keys_are_not_adjacent_is_made_dense_once(name: str) -> None:
    model = Biased(STRIDED[name]).eval()
    first, second = attentions(model)
    assert first.args[3] is second.args[3]
    assert first.args[3].meta["val"].stride(-1) == 1
    assert first.args[3].meta["val"].shape == STRIDED[name](model, X).shape
    with torch.no_grad():
        expected = model(X)
        with patched(model, plan_of(model, X).model_copy(update={"constant_masks": True})) as handle:
            torch.testing.assert_close(model(X), expected)
            assert handle.counters.masks == 2
            model.table.weight[3] += 2.0
            changed = model(X)
        torch.testing.assert_close(changed, model(X))


def test_a_mask_is_never_made_for_each_sequence_of_the_batch() -> None:
    (mask, _) = (n.args[3] for n in attentions(Biased(masked_for_each_sequence).eval()))
    assert mask.meta["val"].stride(0) == 0
    made = {n for n in mask.graph.nodes if n.target is torch.ops.aten.where.ScalarOther}
    assert [n.meta["val"].shape[0] for n in made] == [1]


def test_a_mask_that_something_writes_to_is_left_alone() -> None:
    model = Biased(written_to_afterwards).eval()
    mask = attentions(model)[0].args[3]
    assert mask.meta["val"].stride(-1) != 1
    with torch.no_grad():
        expected = model(X)
        with patched(model, plan_of(model, X)):
            torch.testing.assert_close(model(X), expected)


def test_a_mask_whose_memory_is_written_to_between_two_attentions_is_left_alone() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            base = torch.zeros(S, S) + x[0, 0, 0]
            mask, heads = base.t(), x.view(B, S, H, D).transpose(1, 2)
            first = scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
            base.add_(torch.ones(S, S).triu() * 9)
            return (first + scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)).transpose(1, 2) * 2

    model = Twice().eval()
    with torch.no_grad():
        expected = model(X)
        with patched(model, plan_of(model, X).model_copy(update={"constant_masks": True})):
            torch.testing.assert_close(model(X), expected)


def test_what_is_drawn_for_each_sequence_is_not_cut() -> None:
    def dropped(model: Biased, x: Tensor) -> Tensor:
        return nn.functional.dropout(heads_last(model, x).expand(B, H, S, S), 0.5, training=True)

    (mask, _) = (n.args[3] for n in attentions(Biased(dropped).eval()))
    assert not [n for n in mask.graph.nodes if "dropout" in str(n.target) and n.meta["val"].shape[0] == 1]


def test_the_gradient_of_an_expanded_mask_is_that_of_each_element() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            heads = x.view(B, S, H, D).transpose(1, 2)
            return scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2) * 2

    def gradient(model: nn.Module, run: Callable[..., Tensor]) -> Tensor:
        mask = torch.randn(H, S, S).mT[None].expand(B, H, S, S).requires_grad_()
        torch.manual_seed(0)
        run(X, mask).square().sum().backward()
        assert mask.grad is not None
        return mask.grad

    model = Given()
    torch.manual_seed(1)
    expected = gradient(model, model)
    given = torch.randn(H, S, S).mT[None].expand(B, H, S, S)
    plan = plan_of(model.eval(), X, given).model_copy(update={"constant_masks": True})
    with patched(model, plan):
        torch.manual_seed(1)
        torch.testing.assert_close(gradient(model, model), expected)


def test_gradients_reach_what_the_mask_is_made_of() -> None:
    model = Biased(masked_for_each_sequence)
    model(X).sum().backward()
    expected = model.table.weight.grad.clone()
    model.table.weight.grad = None
    with patched(model, plan_of(model.eval(), X)):
        model(X).sum().backward()
    torch.testing.assert_close(model.table.weight.grad, expected)


def test_an_output_in_the_layout_of_the_slow_kernel_keeps_the_mask() -> None:
    """Attention over a strided mask gives another layout, which the caller would see."""

    class Shown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.view(B, S, H, D).transpose(1, 2)
            mask = torch.zeros(S, S, H).permute(2, 0, 1) + heads.new_ones(1)
            return scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    (node,) = attentions(Shown().eval())
    assert node.meta["val"].stride() == Shown()(X).stride()


@pytest.mark.parametrize(("keys", "row"), [(37, 48), (48, 48)])
def test_rows_start_at_multiples_of_sixteen_on_a_gpu(keys: int, row: int) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        for name in ("q", "k", "v"):
            graph.placeholder(name).meta["val"] = torch.empty(2, 4, 32, 64, device="cuda")
        mask = graph.placeholder("mask")
        mask.meta["val"] = torch.empty(32, keys, device="cuda")
        attention = graph.call_function(ATTENTION, tuple(graph.find_nodes(op="placeholder")))
        graph.output(attention)
        changed = lay_out_masks(fx.GraphModule(nn.Module(), graph))
        assert set(changed) == ({attention} if keys % 16 else set())
        values = {n: n.meta["val"] for n in graph.find_nodes(op="placeholder")}
        for node in graph.nodes:
            if node.op == "call_function" and node is not attention:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    assert values[attention.args[3]].shape == (32, keys)
    assert values[attention.args[3]].stride() == (row, 1)
