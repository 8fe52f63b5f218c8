"""q, k and v as one product: the framework's forms are right, and a patched model sees its parameters change."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from template_cases import SHARED
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.contenders.base import Contender
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework.one_product import BMM
from fusescout.contenders.framework.one_product import LINEAR
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import Workload

CPU = Device("cpu", "test", "x86", 2)
WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """BERT's, Llama's or T5's: with or without biases, keys and values of all heads or of some."""

    def __init__(self, heads: int, bias: tuple[bool, bool, bool]) -> None:
        super().__init__()
        narrow = WIDTH // HEADS * heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=bias[0])
        self.k, self.v = nn.Linear(WIDTH, narrow, bias=bias[1]), nn.Linear(WIDTH, narrow, bias=bias[2])
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (w(h).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    """A BERT-like layer, one with grouped queries and two biases, one without biases; gives projections themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Attention(HEADS, (True, True, True)),
            Attention(2, (True, False, True)),
            Attention(HEADS, (False, False, False)),
        )
        self.left, self.right = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return self.left(y), self.right(y).view(-1)


def planned(model: nn.Module, x: torch.Tensor, contender: Contender) -> Plan:
    """A plan with every region of this family."""
    (captured,) = capture(Workload(model, (x,))).graphs
    entries = {}
    for region in find_regions(captured.graph):
        if region.family == "gemm_shared_input":
            graph, _ = captured.graph.subgraph(region.nodes)
            variants = contender.variants(graph, CPU, "quick")
            assert not isinstance(variants, str), variants
            entries[graph.key] = Entry(
                id=f"shared-{graph.key[:8]}", family=region.family, chain=list(graph.chain),
                subgraph=graph.to_json(), contender=contender.name, variant=dict(variants[0]), sites=1,
            )  # fmt: skip
    device = describe_device("cpu")
    return Plan(
        target="t", mode="inference", device_kind="cpu", device_name=device.name, torch=torch.__version__,
        entries=list(entries.values()),
    )  # fmt: skip


def close(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether the patched model gives what the model itself would."""
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = None
    with torch.no_grad():
        got, expected = model(x), twin(x)
    assert [t.stride() for t in got] == [t.stride() for t in expected]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected, strict=True))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 6)), WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("composition", ["eager", "inductor"])
@pytest.mark.parametrize("contender", [Framework(), TileLang()], ids=["framework", "tilelang"])
def test_a_patched_model_sees_its_parameters_change(contender: Contender, composition: Composition) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net().eval(), inputs()
    with torch.no_grad():
        before = model(x)
    handle = patch(model, planned(model, x, contender), composition=composition)
    assert close(model, x)
    assert (handle.counters.sites, handle.counters.fallbacks) == (4, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    assert close(model, x), "an optimizer step was not seen"
    with torch.no_grad():
        assert not torch.allclose(model(x)[0], before[0], rtol=1e-3)
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    assert close(model, x), "load_state_dict was not seen"
    model.layers[0].k.weight = nn.Parameter(model.layers[0].k.weight.detach() * 2)
    assert close(model, x), "a new parameter was not seen"
    model.layers[1].v.bias.data.add_(1)
    handle.refresh()
    assert close(model, x), "a refresh made nothing anew"
    handle.undo()
    with torch.no_grad():
        assert torch.equal(model(x)[0], copy.deepcopy(model)(x)[0])


def test_with_gradients_and_with_other_shapes_the_model_runs_as_it_was() -> None:
    torch._dynamo.reset()
    model, x = Net().eval(), inputs()
    handle = patch(model, planned(model, x, Framework()))
    assert close(model, inputs(3, 5))
    model(x)[0].sum().backward()
    assert model.layers[0].q.weight.grad is not None
    assert handle.counters.sites == 0
    assert close(model, x)
    assert handle.counters.sites == 4
    handle.undo()


@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_the_frameworks_form_is_right(case: Any) -> None:
    graph, given = case.traced()
    framework = Framework()
    (variant,) = framework.variants(graph, CPU, "quick")
    assert variant == {"calls": [LINEAR]}
    assert Verifier(graph, given, "cpu").check(framework.build(graph, variant, CPU).run, "full").reason == ""
    (memory,) = framework.upkeep(graph, variant).rests_on
    assert memory.endswith("MiB for prepared weights")


def test_equal_products_without_biases_are_a_batch_whose_results_no_copy_moves() -> None:
    graph, given = SHARED[0].traced()
    plain = replace(graph, ops=tuple(replace(op, args=op.args[:2]) for op in graph.ops))
    framework = Framework()
    assert framework.variants(plain, CPU, "quick") == [{"calls": [BMM]}]
    built = framework.build(plain, {"calls": [BMM]}, CPU)
    assert "clone" not in built.source
    assert Verifier(plain, given, "cpu").check(built.run, "full").reason == ""
    ragged = replace(plain, inputs=tuple(replace(s, constant=False) for s in plain.inputs))
    assert isinstance(framework.variants(ragged, CPU, "quick"), str)


def test_results_side_by_side_in_memory_are_told_from_results_that_overlap() -> None:
    graph, given = SHARED[0].traced()

    def run(inputs: Any, *, overlap: bool) -> tuple[torch.Tensor, ...]:
        found = framework.run(inputs)
        memory = torch.cat([f.flatten() for f in found])
        parts = [memory[k * f.numel() :][: f.numel()].view_as(f) for k, f in enumerate(found)]
        return (parts[0], parts[1], parts[0] if overlap else parts[2])

    framework = Framework().build(graph, {"calls": [LINEAR]}, CPU)
    verifier = Verifier(graph, given, "cpu")
    assert verifier.check(lambda i: run(i, overlap=False), "quick").reason == ""
    assert "shares memory" in verifier.check(lambda i: run(i, overlap=True), "quick").reason


def test_the_repro_script_of_a_kernel_makes_its_weights_once(tmp_path: Path) -> None:
    graph, _ = SHARED[1].traced()
    contender = TileLang(cache_dir=tmp_path)
    variant = contender.variants(graph, CPU, "quick")[0]
    assert variant["template"] == "gemm_shared_input"
    script = contender.repro(graph, variant, CPU)
    assert "constants.append(prepare(inputs[1], inputs[2], inputs[3], inputs[4]))" in script
    exec(compile(script, "repro", "exec"), {"__name__": "__main__"})
