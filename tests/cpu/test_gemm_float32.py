"""float32 products from bfloat16 ones: the planes, the error of six products, the kernels' text, prepared weights.

What runs on tensor cores is emulated here; `tests/gpu/test_gemm_float32_gpu.py` runs the kernels.
"""

import ast
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from fusescout.templates import gemm_float32
from fusescout.templates.gemm_problem import Matrix
from fusescout.templates.planes import LARGEST
from fusescout.templates.planes import planes
from hypothesis import given
from hypothesis import strategies as st
from patched_models import plan_of
from template_cases import trace
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusescout import constants
from fusescout import reference
from fusescout.analysis import _refusal
from fusescout.candidates import rank
from fusescout.capture.encode import encode_graph
from fusescout.capture.encode import spec_of
from fusescout.config import Config
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.preparing import prepared
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.ir import Subgraph
from fusescout.patching import patch

HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)
AMPERE = Device("cuda", "NVIDIA A100", "sm_80", 108)
CPU = Device("cpu", "cpu", "x86_64", 2)
PREPARED, IN_EACH_CALL = 0, -1


def meta(function, *shapes, dtype=torch.float32):
    return trace(function, tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes))[0]


def planes_of(w: torch.Tensor) -> torch.Tensor:
    matrix = Matrix(0, *w.shape, w.stride(0), "float32", True)
    (made,) = reference.build(planes(spec_of(w), matrix))([w])
    assert spec_of(made).stride == planes(spec_of(w), matrix).output_specs[0].stride
    return made[:, :, : w.shape[1]].double()


def with_parameter(graph: Subgraph, weight: int = 1) -> Subgraph:
    """With the weight as a parameter."""
    return replace(graph, inputs=tuple(replace(s, constant=k == weight) for k, s in enumerate(graph.inputs)))


# ---- the planes ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_three_planes_hold_a_float32(numbers):
    w = torch.tensor([numbers], dtype=torch.float32)
    made = planes_of(w)
    assert made.isfinite().all()
    lost = (made.sum(0) - w.double()).abs()
    assert (lost[w.abs() >= 2.0**-110] == 0).all()
    assert (lost <= 2.0**-134).all()


@given(st.integers(0, 2**31 - 1))
def test_every_mantissa_is_held_to_its_last_bit(seed):
    torch.manual_seed(seed)
    w = (1 + torch.rand(1, 64)) * 2.0 ** torch.randint(-100, 127, (1, 64))
    made = planes_of(w)
    assert torch.equal(made.sum(0), w.double())
    assert (made[1].abs() <= made[0].abs() * 2.0**-8).all(), "the first plane is the nearest bfloat16"


def test_infinities_and_nan_are_the_first_planes_alone():
    made = planes_of(torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0]]))
    assert made[0].tolist()[0][:2] == [torch.inf, -torch.inf]
    assert made[0, 0, 2].isnan()
    assert (made[1:] == 0).all()


def test_what_would_round_to_infinity_is_cut():
    largest = torch.finfo(torch.float32).max
    w = torch.tensor([[largest, -largest, LARGEST, 3.3961775292304957e38, 3.39e38]])
    made = planes_of(w)
    assert torch.equal(made.sum(0), w.double())
    assert made[0].abs().max() == LARGEST


def test_planes_of_padded_and_of_turned_matrices():
    torch.manual_seed(0)
    padded = torch.randn(5, 24)[:, :19]  # rows that don't follow each other, of no multiple of eight elements
    assert torch.equal(planes_of(padded).sum(0), padded.double())
    turned = torch.randn(7, 16).t()
    matrix = Matrix(0, 7, 16, 16, "float32", True)
    (made,) = reference.build(planes(spec_of(turned), matrix))([turned])
    assert torch.equal(made.double().sum(0), turned.t().double())


# ---- six products -------------------------------------------------------------------------------------------------


def towards_zero(exact: torch.Tensor) -> torch.Tensor:
    rounded = exact.float()
    over = rounded.double().abs() > exact.abs()
    return torch.where(over, torch.nextafter(rounded, torch.zeros(())), rounded)


def six_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As the kernel sums them: in steps of 64, what comes from a tensor core cut to float32."""
    xs, ws = planes_of(x), planes_of(w.t().contiguous()).transpose(1, 2)
    lead, rest = (torch.zeros(x.shape[0], w.shape[1]) for _ in range(2))
    for k in range(0, x.shape[1], 64):
        step = slice(k, k + 64)
        for a, b in gemm_float32.PRODUCTS:
            rest = towards_zero(rest.double() + xs[a][:, step] @ ws[b][step])
        lead = lead + towards_zero(xs[0][:, step] @ ws[0][step])
    return lead + rest


def sequential(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """float32 arithmetic, one product after the other."""
    total = torch.zeros(x.shape[0], w.shape[1])
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1] * w[k]
    return total


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_six_products_are_as_exact_as_float32(scale):
    torch.manual_seed(0)
    x, w = torch.randn(24, 2048) * scale, torch.randn(2048, 16)
    truth = x.double() @ w.double()
    error = (six_products(x, w) - truth).abs()
    eager = (sequential(x, w) - truth).abs()
    assert error.max() < eager.max()
    assert error.mean() < eager.mean()


def test_two_planes_would_not_do():
    """What the third plane is for: products of two would be further off than float32, however they are summed."""
    torch.manual_seed(0)
    x, w = 1 + torch.rand(64, 64), 1 + torch.rand(64, 64)
    truth = x.double() @ w.double()
    two = planes_of(x)[:2].sum(0) @ planes_of(w.t().contiguous())[:2].sum(0).t()
    eager = (sequential(x, w) - truth).abs().mean()
    assert (two - truth).abs().mean() > 2 * eager
    assert (six_products(x, w) - truth).abs().mean() < eager


# ---- the template -------------------------------------------------------------------------------------------------


def linear(x, w, b, r):
    return F.relu(F.linear(x, w, b)) + r


def addmm(b, x, w):
    return torch.addmm(b, x, w).relu()


SHAPES = ((1000, 520), (776, 520), (776,), (1000, 776))


def example(function=linear, shapes=SHAPES):
    return meta(function, *shapes)


REFUSED = {
    "float32 products": (lambda x, w: F.linear(x, w).relu(), torch.bfloat16, (8, 64), (32, 64)),
    "batched": (lambda x, w: torch.bmm(x, w).relu(), torch.float32, (2, 8, 64), (2, 64, 32)),
    "several results": (lambda x, w: (h := F.linear(x, w), h.relu()), torch.float32, (8, 64), (32, 64)),
    "another dtype": (lambda x, w: F.linear(x, w).bfloat16(), torch.float32, (8, 64), (32, 64)),
    "2 matrix products": (lambda x, w, v: F.linear(x, w) * F.linear(x, v), torch.float32, (8, 64), (32, 64), (32, 64)),
    "pointwise": (lambda x, w: F.linear(x, w).cumsum(-1), torch.float32, (8, 64), (32, 64)),
    "32 bits count": (lambda x, w: F.linear(x, w).relu(), torch.float32, (1 << 20, 1024), (8, 1024)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_cover_has_a_reason(reason):
    function, dtype, *shapes = REFUSED[reason]
    assert reason in gemm_float32.supports(meta(function, *shapes, dtype=dtype), HOPPER)


def test_it_is_for_hopper():
    assert gemm_float32.supports(example(), HOPPER) is None
    for device in (AMPERE, CPU):
        assert "Hopper" in gemm_float32.supports(example(), device)


def test_a_parameters_planes_are_prepared_and_that_comes_first():
    found = gemm_float32.configs(with_parameter(example()), HOPPER)
    assert [c.get("weight") for c in found] == ["prepared", "prepared", None, None]
    assert [c.get("weight") for c in gemm_float32.configs(example(), HOPPER)] == [None, None]
    graph = with_parameter(example())
    ops = tuple(replace(op, out=replace(op.out, requires_grad=True)) for op in graph.ops)
    assert [c.get("weight") for c in gemm_float32.configs(replace(graph, ops=ops), HOPPER)] == [None, None]


def test_planes_of_more_elements_than_32_bits_count_are_only_prepared():
    large = meta(F.linear, (128, 32768), (32768, 32768))
    assert "32 bits" in gemm_float32.supports(large, HOPPER)
    assert gemm_float32.supports(with_parameter(large), HOPPER) is None
    assert [c.get("weight") for c in gemm_float32.configs(with_parameter(large), HOPPER)] == ["prepared", "prepared"]


@pytest.mark.parametrize(
    "graph",
    [example(), example(addmm, ((776,), (1000, 520), (520, 776))), example(lambda x, w: x @ w, ((9, 20), (20, 17)))],
    ids=["linear", "addmm", "bare, odd"],
)
def test_a_prepared_weight_is_neither_read_nor_split(graph):
    graph = with_parameter(graph, 2 if graph.chain[0] == "addmm" else 1)
    configs = gemm_float32.configs(graph, HOPPER)
    every = gemm_float32.kernel(graph, configs[IN_EACH_CALL], HOPPER)
    assert [p.name for p in every.params if p.role == "scratch"] == ["xs", "ws"]
    assert every.source.count("T.Kernel(") == 3
    split = gemm_float32.prepared(graph, configs[PREPARED])
    assert gemm_float32.prepared(graph, configs[IN_EACH_CALL]) is None
    made = gemm_float32.kernel(split.steady, configs[PREPARED], HOPPER)
    assert made.source.count("T.Kernel(") == 2
    assert [p.name for p in made.params if p.role == "scratch"] == ["xs"]
    assert "w0" not in {p.name for p in made.params}
    (ws,) = (p for p in made.params if p.name == "ws")
    (spec,) = split.prepare.output_specs
    assert (ws.role, ws.index) == ("input", len(graph.inputs))
    assert ws.stride == spec.stride
    assert spec.nbytes >= 1.5 * graph.inputs[split.sources[0]].nbytes
    for kernel in (every, made):
        ast.parse(kernel.source)
        assert kernel.source.count("T.wgmma_gemm(") == 6
        assert kernel.source.count("T.tma_copy(") == 6


def test_the_steady_part_computes_the_whole_chain():
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in ((6, 24), (17, 24), (17,), (6, 17))]
    graph = with_parameter(example(shapes=[i.shape for i in inputs]))
    split = gemm_float32.prepared(graph, {"weight": "prepared"})
    made = reference.build(split.prepare)([inputs[k] for k in split.sources])
    (steady,) = reference.build(split.steady)([*(inputs[k] for k in split.kept), *made])
    assert torch.equal(steady, reference.build(graph)(inputs)[0])


def test_the_contender_says_what_the_planes_cost_and_shows_how_they_are_made(tmp_path):
    graph, contender = with_parameter(example()), TileLang(cache_dir=tmp_path)
    variants = contender.variants(graph, HOPPER, "default")
    assert {v["template"] for v in variants} == {"gemm_float32"}
    prepared_first, *_, plain = variants
    assert "2.31 MiB for prepared weights" in contender.upkeep(graph, prepared_first).rests_on
    assert len(contender.upkeep(graph, plain).rests_on) == 1
    script = contender.repro(graph, prepared_first, HOPPER)
    ast.parse(script)
    assert "constants.append(prepare(inputs[1]))" in script
    assert "prepare(" not in contender.repro(graph, plain, HOPPER)


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
def test_it_assembles_for_hopper_without_spills():
    graph = with_parameter(example())
    config = gemm_float32.configs(graph, HOPPER)[PREPARED]
    kernel = gemm_float32.kernel(gemm_float32.prepared(graph, config).steady, config, HOPPER)
    found = cubin_report(kernel)
    assert found.spilled_bytes == 0
    assert 0 < found.registers <= 168, "three warpgroups of a block share 64 K registers"
    assert found.source.count("wgmma_ss<") >= 6
    assert "tma_load(" in found.source


@pytest.mark.parametrize(
    ("device", "raced"), [(HOPPER, True), (AMPERE, False), (CPU, False)], ids=["H200", "A100", "CPU"]
)
def test_a_product_alone_is_raced_where_a_contender_has_something_to_try(device, raced):
    module = make_fx(lambda x, w: F.linear(x, w))(*(torch.empty(2048, 2048, device="meta") for _ in range(2)))
    graph = encode_graph(module, 0)
    measured = replace(device, copy_bytes_per_s=4e12, flops_per_s={"float32": 51e12, "bfloat16": 780e12})
    ranking = rank([graph], lambda _g, _n: 340.0, 340.0, measured, _refusal(measured, Config()), 12)
    assert bool(ranking.candidates) is raced
    assert [r.code for r in ranking.rejections] == ([] if raced else ["gemm-bound"])


def test_of_large_constants_only_the_last_are_kept(monkeypatch):
    inputs = [torch.randn(s) for s in ((6, 24), (17, 24), (17,), (6, 17))]
    split = gemm_float32.prepared(with_parameter(example(shapes=[i.shape for i in inputs])), {"weight": "prepared"})
    for limit, kept in ((constants.KEPT_BYTES, 3), (1, 1)):
        monkeypatch.setattr(constants, "KEPT_BYTES", limit)
        parts = prepared(split, reference.build(split.steady)).parts
        for _ in range(3):
            parts.run([inputs[0], inputs[1].clone(), *inputs[2:]])
        assert len(parts._known) == kept


# ---- in a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_a_patched_model_keeps_planes_and_makes_them_anew_when_a_weight_changes(composition):
    """The kernel's place is taken by what it computes of the planes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 33), nn.Linear(33, 8)).eval()
    x, seen = torch.randn(4, 20), []

    def build(self, graph, variant, device):
        split = gemm_float32.prepared(graph, variant)

        def run(inputs):
            (*given, made) = inputs
            weight = made.double().sum(0)[:, : given[split.sources[0]].shape[1]].float()
            seen.append(made.data_ptr())
            return reference.build(graph)([weight if k == split.sources[0] else t for k, t in enumerate(given)])

        return prepared(split, run)

    def close():
        twin = copy.deepcopy(model)
        twin._compiled_call_impl = None
        with torch.no_grad():
            return torch.allclose(model(x), twin(x), rtol=1e-5, atol=1e-6)

    with mock.patch.object(TileLang, "build", build):
        plan = plan_of(model, x)
        update = {"contender": "tilelang", "variant": {"template": "gemm_float32", "weight": "prepared"}}
        plan = plan.model_copy(update={"entries": [e.model_copy(update=update) for e in plan.entries]})
        handle = patch(model, plan, composition=composition)
        assert close()
        assert handle.counters.sites == 2
        assert not handle.counters.fallbacks
        assert close()
        with torch.no_grad():
            model[1].weight.mul_(3)
        assert close(), "a write was not seen"
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        assert close(), "load_state_dict was not seen"
        assert len(set(seen)) == 2, "planes stay where they are"
        handle.undo()
