"""Public faults of patching a live model: hooks, weights that change, modes, threads, gradients of gradients."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from patched_models import check
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.plan import Composition

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act, self.n, self.drop = nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        h = self.drop(self.n(x + self.act(self.lin(x)) * 0.5))
        return (h if mask is None else h * mask) * scale


@contextmanager
def all_patched(
    model: nn.Module, mode: str = "inference", x: Tensor = X, composition: Composition = "eager"
) -> Iterator[Patched]:
    torch._dynamo.reset()
    model.train(mode == "training")
    plan = plan_of(model, x, mode=mode)
    with fresh_outputs():
        handle = patch(model, plan, composition=composition)
        yield handle
        handle.undo()


def plain(model: nn.Module, call: Callable[[], Any]) -> Any:
    held, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return call()
    finally:
        model._compiled_call_impl = held


def agree(model: nn.Module, x: Tensor = X, **kwargs: Any) -> None:
    with torch.no_grad():
        got, expected = model(x, **kwargs), plain(model, lambda: model(x, **kwargs))
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((model(x) * X).sum(), [x, *model.parameters()]))


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


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


def test_a_patched_model_can_be_compiled_whole() -> None:
    model = Net()
    with all_patched(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(X), plain(model, lambda: model(X)))


def test_threads_may_call_first() -> None:
    model, inputs = Net().eval(), [torch.randn(k + 1, 8, 16) for k in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    failed: list[BaseException] = []
    got: list[Any] = [None] * len(inputs)

    def run(k: int) -> None:
        try:
            with torch.no_grad():
                got[k] = model(inputs[k])
        except BaseException as error:
            failed.append(error)

    with all_patched(model):
        threads = [threading.Thread(target=run, args=(k,)) for k in range(len(inputs))]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not failed
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def test_whatever_happens_to_the_weights_is_followed() -> None:
    model = Net()
    with all_patched(model):
        agree(model)
        model.lin.weight.data = torch.randn(16, 16)
        agree(model)
        nn.init.uniform_(model.n.weight)
        agree(model)
        model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}, assign=True)
        agree(model)
        parametrizations.weight_norm(model.lin)
        agree(model)
        model.lin.parametrizations.weight.original1.data.mul_(3)
        agree(model)
        parametrize.remove_parametrizations(model.lin, "weight")
        parametrize.register_parametrization(model.lin, "weight", Symmetric())
        agree(model)


def test_whatever_happens_to_the_modules_is_followed() -> None:
    model = Net()
    with all_patched(model):
        agree(model)
        model.lin, model.act = nn.Linear(16, 16), nn.ReLU()
        agree(model)
        model.n.eps = 0.1
        agree(model)
        agree(model.double(), X.double())
        agree(model.bfloat16(), X.bfloat16())


def test_a_weight_that_is_not_gathered_is_eagers_error() -> None:
    model = Net()
    with all_patched(model), torch.no_grad():
        model(X)
        model.lin.weight, model.lin.bias = nn.Parameter(torch.empty(0, 16)), nn.Parameter(torch.empty(0))
        with pytest.raises(RuntimeError):
            model(X)


def test_every_grad_mode_in_train_and_eval() -> None:
    model = Net()
    with all_patched(model):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            for training in (True, False):
                model.train(training)
                with mode():
                    got, expected = model(X), plain(model, lambda: model(X))
                assert torch.equal(got, expected)
                assert got.requires_grad == expected.requires_grad
        x = X.clone().requires_grad_()
        close(gradients(model, x), plain(model, lambda: gradients(model, x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_patched_model(dtype: torch.dtype) -> None:
    model = Net()
    with all_patched(model), torch.autocast("cpu", dtype=dtype):
        agree(model)
        with torch.autocast("cpu", enabled=False):
            agree(model)


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


def test_functional_call_sees_the_weights_it_is_given() -> None:
    model = Net()
    weights = {k: v.detach() * 2 for k, v in model.named_parameters()}
    with all_patched(model), torch.no_grad():
        call = torch.func.functional_call
        assert torch.equal(call(model, weights, (X,)), plain(model, lambda: call(model, weights, (X,))))


def test_copies_and_pickles_are_unpatched() -> None:
    model = Net()
    with all_patched(model), torch.no_grad():
        expected = model(X)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert getattr(twin, "_compiled_call_impl", None) is None
            assert torch.equal(twin(X), expected)


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None
    count: int = 3


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_dataclass_output_keeps_its_fields(mode: str) -> None:
    class Structured(Net):
        def forward(self, x: Tensor) -> Output:  # type: ignore[override]
            return Output(F.gelu(self.lin(self.n(x * 2 + 1))))

    handle = check(Structured(), X, mode=mode, sites=1)
    assert handle.model(X).hidden is None
    assert handle.model(X).count == 3


def test_optional_arguments_in_every_form() -> None:
    model, mask = Net(), (X > 0).float()
    with all_patched(model):
        agree(model)
        agree(model, mask=mask)
        agree(model, mask=None, scale=0.5)
        with torch.no_grad():
            assert torch.equal(model(X, mask), model(mask=mask, x=X))


def test_other_addresses_and_strides_than_the_plans() -> None:
    model = Net()
    with all_patched(model):
        agree(model, torch.randn(4 * 8 * 16 + 1)[1:].view(4, 8, 16))
        agree(model, X.transpose(0, 1).contiguous().transpose(0, 1))
        agree(model, X[:1].expand(4, 8, 16))


def test_what_is_not_a_number_stays_so() -> None:
    class Edges(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            zero = torch.zeros(())
            return F.relu(x) * 2, x.clamp(-1, 1) + 1, torch.maximum(x, zero), torch.maximum(zero, x), (x - x) * 2

    model = Edges()
    odd = X.clone()
    odd.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    with all_patched(model) as handle, torch.no_grad():
        for got, expected in zip(model(odd), plain(model, lambda: model(odd)), strict=True):
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num().signbit(), expected.nan_to_num().signbit())
        assert handle.counters.sites


def test_distributed_tensors_are_declined() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = Net(), init_device_mesh("cpu", (1,))
        with all_patched(model) as handle, torch.no_grad():
            distribute_module(model, mesh)
            x = distribute_tensor(X, mesh, [Replicate()])
            torch.testing.assert_close(model(x).full_tensor(), plain(model, lambda: model(x)).full_tensor())
            assert any("DTensor" in reason for reason in handle.counters.fallbacks.values())
    finally:
        dist.destroy_process_group()
