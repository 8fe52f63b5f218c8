"""Public faults of training a patched model: hooks, gradients of gradients, checkpoints, autocast, frozen weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from live_models import Net
from live_models import X
from live_models import all_patched
from live_models import close
from live_models import gradients
from live_models import plain
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusescout.plan import Composition


def test_gradients_of_gradients() -> None:
    """A gradient penalty: detached gradients would silently make it zero."""
    model, x = Net(), X.clone().requires_grad_()

    def penalty() -> list[Tensor]:
        (gx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found = torch.autograd.grad(gx.norm() ** 2, [x, *model.parameters()], allow_unused=True)
        return [g for g in found if g is not None]

    with all_patched(model, "training") as handle:
        close(penalty(), plain(model, penalty))
        assert handle.counters.sites


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook", "forward_pre_hook", "forward_hook"])
@pytest.mark.parametrize("name", ["lin", "act", ""])
def test_hooks_added_later_run_and_may_change_values(kind: str, name: str) -> None:
    model, x = Net(), X.clone().requires_grad_()
    seen: list[int] = []

    def hook(_: nn.Module, *given: Any) -> Any:
        seen.append(1)
        return {"forward_pre_hook": (given[0][0] * 2,), "forward_hook": given[-1]}.get(kind)

    with all_patched(model, "training"):
        model(x)
        handle = getattr(model.get_submodule(name), f"register_{kind}")(hook)
        got, count = gradients(model, x), len(seen)
        expected = plain(model, lambda: gradients(model, x))
        assert count == len(seen) - count > 0
        close(got, expected)
        handle.remove()
        close(gradients(model, x), plain(model, lambda: gradients(model, x)))


@pytest.mark.parametrize("inside", [False, True])
def test_backward_in_and_out_of_autocast(inside: bool) -> None:
    class Outer(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model, x = Outer(), X.clone().requires_grad_()
    with all_patched(model, "training"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        for a, b in zip(gradients(model, x), plain(model, lambda: gradients(model, x)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


def test_two_forwards_one_backward_and_one_forward_two_backwards() -> None:
    model, x, y = Net(), X.clone().requires_grad_(), (X * 2).requires_grad_()

    def both() -> list[Tensor]:
        out = model(x) * model(y)
        first = torch.autograd.grad(out.sum(), [x, y, *model.parameters()], retain_graph=True)
        return [*first, *torch.autograd.grad((out * X).sum(), [x, y, *model.parameters()])]

    with all_patched(model, "training"):
        close(both(), plain(model, both))


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_a_patched_model_that_is_first_called_in_a_checkpoint(composition: Composition) -> None:
    """What is saved while it is being compiled is no part of the forward pass."""
    model, x = Net(), X.clone().requires_grad_()

    def run() -> list[Tensor]:
        out = checkpoint(model, x, use_reentrant=False)
        return list(torch.autograd.grad((out * X).sum(), [x, *model.parameters()]))

    with all_patched(model, "training", composition=composition):
        close(run(), plain(model, run))


def test_an_unused_parameter_gets_no_gradient_rather_than_zeros() -> None:
    class Part(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = x * 2
            return y, y * self.n.weight

    model = Part()
    with all_patched(model, "training"):
        (model(X.clone().requires_grad_())[0]).sum().backward()
        assert model.n.weight.grad is None


def test_training_follows_the_same_path() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    with all_patched(model, "training"):
        twin.train()
        for _ in range(4):
            for m, optimizer in zip((model, twin), optimizers, strict=True):
                optimizer.zero_grad()
                m(X).square().mean().backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_weights_may_thaw() -> None:
    model, x = Net(), X.clone().requires_grad_()
    model.lin.requires_grad_(False)
    with all_patched(model, "training", x):
        model(x).sum().backward()
        assert model.lin.weight.grad is None
        model.lin.requires_grad_(True)
        close(gradients(model, x), plain(model, lambda: gradients(model, x)))


def test_hooks_on_tensors_inside_are_left_to_the_framework() -> None:
    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            h = F.gelu(self.lin(x)) * 2
            if h.requires_grad:
                h.register_hook(lambda g: g * 3)
            return self.n(h)

    model, x = Watched(), X.clone().requires_grad_()
    with all_patched(model, "training"):
        close(gradients(model, x), plain(model, lambda: gradients(model, x)))


def test_the_switch_keeps_dropout_in_checkpoints_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graph, run as it is, would draw another mask in the backward pass."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return checkpoint(lambda t: F.dropout(F.gelu(self.lin(t)), 0.5), self.n(x), use_reentrant=False)

    model, x = Checkpointed(), X.clone().requires_grad_()

    def seeded() -> list[Tensor]:
        torch.manual_seed(3)
        return gradients(model, x)

    monkeypatch.setenv("FUSESCOUT_DISABLE", "1")
    with all_patched(model, "training"):
        close(seeded(), plain(model, seeded))
