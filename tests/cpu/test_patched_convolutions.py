"""Models whose convolutions are patched: parameters that change show, prepared values stay in place, undo undoes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from conv_models import Block
from conv_models import Net
from conv_models import image
from conv_models import planned
from conv_models import trained
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusescout.contenders.convolution_tail import as_tail
from fusescout.contenders.framework import Framework
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import MemoryFormat


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return trained(Net())


def close(model: nn.Module, x: torch.Tensor, handle: Patched) -> bool:
    """Whether the patched model gives what the model itself would."""
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = None
    with torch.no_grad():
        got, expected = model(x), twin(x)
    assert got.stride() == expected.stride()
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("composition", "memory_format"),
    [("eager", "preserved"), ("eager", "channels_last"), ("inductor", "channels_last")],
)
def test_a_patched_model_sees_its_parameters_change(
    model: nn.Module, composition: Composition, memory_format: MemoryFormat
) -> None:
    x = image()
    handle = patch(model, planned(model, x, Framework(), memory_format), composition=composition)
    assert close(model, x, handle)
    assert handle.counters.sites >= 4
    assert not handle.counters.fallbacks
    with torch.no_grad():
        before = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    assert close(model, x, handle), "an optimizer step was not seen"
    with torch.no_grad():
        assert not torch.allclose(model(x), before, rtol=1e-3)
    model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    assert close(model, x, handle), "load_state_dict was not seen"
    model.first.bn1.running_var.mul_(3)
    assert close(model, x, handle), "a buffer was not seen"
    model.first.conv2.weight.data = model.first.conv2.weight.data * 2
    assert close(model, x, handle), "new data was not seen"
    model.second.conv1.weight = nn.Parameter(model.second.conv1.weight.detach() * 2)
    assert close(model, x, handle), "a new parameter was not seen"
    model.second.conv2.bias.data.add_(1)
    handle.refresh()
    assert close(model, x, handle), "a refresh made nothing anew"
    with torch.inference_mode():
        model(x)
    assert close(model, x, handle)
    handle.undo()
    with torch.no_grad():
        assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_prepared_values_stay_where_they_are(model: nn.Module) -> None:
    """A CUDA graph reads them at fixed addresses, so they are written over in place, and only when a source changed."""
    from fusescout.hoisting import hoist
    from fusescout.patching import Backend

    x = image()
    found: list[Any] = []

    def spying(module: torch.fx.GraphModule) -> Any:
        found.append(hoist(module))
        return found[-1]

    with pytest.MonkeyPatch.context() as change:
        change.setattr("fusescout.patching.hoist", spying)
        handle = Patched(model, Backend(planned(model, x, Framework(), "channels_last")))
        with torch.no_grad():
            model(x)
    (hoisted,) = found
    first = [v.data_ptr() for v in hoisted.held()]
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    assert not owned & {v.untyped_storage().data_ptr() for v in hoisted.held()}
    made = hoisted.held()
    with torch.no_grad():
        model(x)
        assert all(a is b for a, b in zip(hoisted.held(), made, strict=True))
        model.first.conv1.weight.mul_(2)
        model(x)
    assert [v.data_ptr() for v in hoisted.held()] == first
    handle.undo()


def test_a_compiled_rest_takes_prepared_values_by_their_sizes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbol for the size of a prepared weight has no source among the inputs, and a guard on it can't be made."""
    made: list[Any] = []
    create = ShapeEnv.create_symbol

    def spying(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        made.append(create(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(ShapeEnv, "create_symbol", spying)
    x = image()
    handle = patch(model, planned(model, x, Framework(), "channels_last"), composition="inductor")
    with torch.no_grad():
        model(x)
    assert handle.counters.sites >= 4
    assert not handle.counters.fallbacks
    assert made
    assert not [size for size in made if isinstance(size, sympy.Symbol)]
    handle.undo()


def test_a_matrix_product_runs_inside_a_compiled_rest() -> None:
    torch._dynamo.reset()
    block, x = trained(Block()), image()
    plan = planned(block, x, TileLang(), "channels_last")
    handle = patch(block, plan.without({e.id for e in plan.entries[1:]}), composition="inductor")
    assert close(block, x, handle)
    assert (handle.counters.sites, handle.counters.fallbacks) == (1, {})
    with torch.no_grad():
        block.bn2.running_mean.add_(1)
    assert close(block, x, handle)
    handle.undo()


def test_non_contiguous_inputs_and_another_size_fall_back_or_fit(model: nn.Module) -> None:
    x = image()
    handle = patch(model, planned(model, x, Framework()))
    assert close(model, x, handle)
    turned = image(2, 9, 8, 7).transpose(1, 2)
    assert close(model, turned, handle)
    assert close(model, image(3, 8, 5, 5), handle)
    handle.undo()


class OnAnyDevice(TileLang):
    """Takes tails of convolutions on the CPU too, where they are not offered since oneDNN adds biases itself."""

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        tail = as_tail(graph)
        offered = super().variants(graph, replace(device, kind="cuda", arch="sm_90a"), effort)
        if isinstance(offered, str) or isinstance(tail, str):
            return str(offered)
        template = self.registry.templates[offered[0]["template"]]
        return [{"template": template.NAME, **template.configs(tail.inner, device)[0]}]


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_biases_join_what_follows_in_a_patched_model(composition: Composition) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Conv2d(8, 12, 3), nn.GELU(), nn.GroupNorm(3, 12), nn.Conv2d(12, 6, 3), nn.ELU()))
    x = image()
    handle = patch(model, planned(model, x, OnAnyDevice()), composition=composition)
    assert close(model, x, handle)
    assert handle.counters.sites == 2
    assert not handle.counters.fallbacks
    with torch.no_grad():
        model[0].bias.add_(1)
    assert close(model, x, handle)
    handle.undo()
