"""q, k and v as one product: the framework's forms are right, and a patched model sees its parameters change."""

from __future__ import annotations

import ast
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fusescout.templates import gemm_shared_input
from template_cases import SHARED
from template_cases import Case
from template_cases import randn
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.contenders.base import Contender
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework.one_product import BMM
from fusescout.contenders.framework.one_product import LINEAR
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.ir import Subgraph
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import Workload

CPU, HOPPER = Device("cpu", "test", "x86", 2), Device("cuda", "NVIDIA H200", "sm_90a", 132)
WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """BERT's, Llama's or T5's: with or without biases, keys and values of all heads or of some."""

    def __init__(self, heads: int, bias: tuple[bool, bool, bool]) -> None:
        super().__init__()
        narrow = WIDTH // HEADS * heads
        self.q = nn.Linear(WIDTH, WIDTH, bias=bias[0])
        self.k, self.v = nn.Linear(WIDTH, narrow, bias=bias[1]), nn.Linear(WIDTH, narrow, bias=bias[2])
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    """A BERT-like layer, one with grouped queries and two biases, and plain projections of one width as results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Attention(HEADS, (True, True, True)),
            Attention(2, (True, False, True)),
        )
        self.left, self.right = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return self.left(y).tanh(), self.right(y).view(-1)


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


@pytest.mark.filterwarnings("error:fusescout")  # torch warns of operators whose results share memory
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
    assert (handle.counters.sites, handle.counters.fallbacks) == (3, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    assert close(model, x), "an optimizer step was not seen"
    with torch.no_grad():
        assert not torch.allclose(model(x)[0], before[0], rtol=1e-3)
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    assert close(model, x), "load_state_dict was not seen"
    if composition == "eager":
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
    assert handle.counters.sites == 3
    handle.undo()


@pytest.mark.parametrize("case", [c for c in SHARED if c.name != "qkv_bias"], ids=lambda c: c.name)
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
    ast.parse(script)


def grouped(*widths: int, rows: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Subgraph:
    """Products of one input, the first with a bias."""
    case = Case(
        "grouped",
        "gemm_shared_input",
        lambda x, b, *ws: tuple(F.linear(x, w, None if n else b) for n, w in enumerate(ws)),
        lambda: (randn(rows, 264), randn(widths[0]), *(randn(n, 264) for n in widths)),
        1,
    )
    return case.traced(dtype=dtype)[0]


def test_a_tile_on_the_gpu_belongs_to_one_result() -> None:
    graph = grouped(520, 136, 264)
    assert gemm_shared_input.supports(graph, HOPPER) is None
    whole = {"auto", "coop", "pingpong"}
    configs = gemm_shared_input.configs(graph, HOPPER)
    assert whole <= {c["schedule"] for c in configs}
    assert "roles" not in {c["schedule"] for c in configs}
    for config in {c["schedule"]: c for c in reversed(configs) if c["schedule"] in whole}.values():
        split = gemm_shared_input.prepared(graph, config)
        assert split is not None
        starts = [op.args[2] for op in split.steady.ops if op.name == "slice"]
        assert [s % config["BN"] for s in starts] == [0, 0, 0]  # type: ignore[operator]
        kernel = gemm_shared_input.kernel(split.steady, config, HOPPER)
        ast.parse(kernel.source)
        outputs = [p.shape for p in kernel.params if p.role == "output"]
        assert outputs == [(1000, 520), (1000, 136), (1000, 264)]
        writes = [line for line in kernel.source.splitlines() if "y1[" in line]
        assert writes
        assert all(f"col - {starts[1]}" in line for line in writes)


def test_what_the_kernel_does_not_cover_has_a_reason() -> None:
    assert "16 bytes" in str(gemm_shared_input.supports(grouped(520, 132), HOPPER))
    assert "TF32" in str(gemm_shared_input.supports(grouped(520, 136, dtype=torch.float32), HOPPER))
    own = grouped(520, 136)
    free = replace(own, inputs=tuple(replace(s, constant=False) for s in own.inputs))
    assert "parameter" in str(gemm_shared_input.supports(free, HOPPER))
    assert "several" in str(gemm_shared_input.supports(grouped(520), HOPPER))


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
def test_it_assembles_for_hopper_without_spills() -> None:
    graph = grouped(520, 136, 264)
    config = next(
        c for c in gemm_shared_input.configs(graph, HOPPER) if c["schedule"] == "pingpong" and "cluster" not in c
    )
    split = gemm_shared_input.prepared(graph, config)
    assert split is not None
    found = cubin_report(gemm_shared_input.kernel(split.steady, config, HOPPER))
    assert found.spilled_bytes == 0
    assert 0 < found.registers <= 168, "three warpgroups of a block share 64 K registers"
    assert all(f"tma_store(y{k}_desc" in found.source for k in range(3))
    assert found.source.count("__syncthreads()") == 1, "a second one would dead-lock the roles"
