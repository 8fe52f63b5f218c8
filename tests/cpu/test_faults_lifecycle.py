"""Public faults of patching a live model: weights and modules that change, modes, threads, copies, odd inputs."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch
from live_models import Net
from live_models import X
from live_models import agree
from live_models import all_patched
from live_models import close
from live_models import gradients
from live_models import plain
from patched_models import check
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import parametrize


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


def test_a_compiler_that_fails_leaves_the_model_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    model = Net()
    with all_patched(model, composition="inductor") as handle:
        agree(model)
        assert any("no compiler here" in reason for reason in handle.counters.fallbacks.values())
