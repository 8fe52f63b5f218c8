"""Products of 8-bit floats from capture to check: what is read of them, their truth, their inputs, planted bugs."""

import pytest
import torch
from lowering import lowered
from scaled_cases import Float8Linear
from scaled_cases import gelu
from scaled_cases import half
from scaled_cases import operands
from scaled_cases import product
from scaled_cases import scaled_cases
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.inputs import FULL
from fusescout.inputs import InputSource
from fusescout.modelcheck import ModelJudge
from fusescout.mutants import self_test
from fusescout.reference import build as reference
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import build

HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)


@pytest.fixture(params=[False, True], ids=["tensors", "rows"])
def workload(request):
    torch.manual_seed(0)
    model = nn.Sequential(Float8Linear(96, 64, request.param), nn.GELU(), Float8Linear(64, 96, request.param))
    return build(model.eval(), (torch.randn(48, 64).bfloat16(),), {}, mode="inference")


def test_a_float8_linear_is_captured_as_a_product_with_its_tail_and_its_weight_as_it_lies(workload):
    (found,) = capture(workload).graphs
    regions = [r for r in find_regions(found.graph) if r.family == "gemm_epilogue"]
    assert regions
    graph, _ = found.graph.subgraph(next(r for r in regions if any("gelu" in n for n in r.nodes)).nodes)
    assert graph.chain[:3] == ("t", "_scaled_mm", "gelu")
    (weight,) = (s for s in graph.inputs if s.constant and s.dtype == "float8_e4m3fn")
    assert weight.shape == (96, 64)
    assert weight.is_contiguous
    for device in (Device("cpu", "cpu", "x86_64", 2), HOPPER):
        assert not isinstance(TileLang().variants(graph, device, "quick"), str)


def test_a_float8_model_has_a_truth_in_float64(workload):
    judge = ModelJudge(workload)
    assert judge.truth_dtype == "float64"
    assert not isinstance(judge.check(workload.model), str)
    with torch.no_grad():
        workload.model[2].scale.mul_(1.05)
    assert "error" in judge.check(workload.model)


def _newer(x, w, sx, sw, b):
    kind = F.ScalingType.RowWise if sx.numel() > 1 else F.ScalingType.TensorWise
    return F.gelu(F.scaled_mm(x, w.t(), sx, kind, sw, kind, bias=b), approximate="tanh")


@pytest.mark.parametrize("function", [gelu, _newer])
@pytest.mark.parametrize("rows", [False, True], ids=["tensors", "rows"])
def test_the_truth_is_the_exact_product(function, rows):
    if function is _newer and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has one scaled product only")
    x, w, sx, sw = operands(32, 48, 64, rows)
    graph, inputs = trace(function, (x, w, sx, sw, b := half(48)))
    wide = x.double() @ w.double().t() * sx.double() * sw.double() + b.double()
    (truth,) = reference(graph, "float64")([t.double() for t in inputs])
    torch.testing.assert_close(truth, F.gelu(wide, approximate="tanh"), rtol=1e-12, atol=1e-12)
    assert not Verifier(graph, inputs, "cpu").check(reference(graph), "full").reason


def test_scales_for_blocks_along_k_are_the_librarys():
    graph, _ = trace(lambda x, w, sx, sw: F.relu(product(x, w, sx, sw)), operands(32, 48, 256))
    blocks = [s if s.dtype != "float32" else type(s)((32, 2), s.dtype, (2, 1)) for s in graph.inputs]
    graph = type(graph)(tuple(blocks), graph.ops, graph.outputs)
    with pytest.raises(ValueError, match="parts of a row"):
        reference(graph, "float64")
    assert "parts of a row" in TileLang().variants(graph, HOPPER, "quick")


@pytest.mark.parametrize("seen", [False, True], ids=["drawn", "captured"])
def test_inputs_use_the_range_and_hold_nan_only_where_asked(seen):
    graph, inputs = trace(gelu, (*operands(64, 96, 128), half(96)))
    source = InputSource(graph, inputs if seen else None, "cpu", 0)
    for case in source.names("full"):
        assert case in FULL
        for tensor, spec in zip(source.make(case), graph.inputs, strict=True):
            if spec.dtype == "float8_e4m3fn":
                known = tensor.float()[~tensor.isnan()].abs()
                assert known.numel() >= tensor.numel() - (case == "nan")
                assert known.max() > 2**-4
                assert case in ("constant", "small") or known.max() > 64
            elif not spec.shape:
                assert bool(tensor.isfinite())
                assert tensor > 0


@pytest.mark.parametrize("rows", [False, True], ids=["tensors", "rows"])
def test_planted_bugs_are_rejected(rows):
    graph, inputs = trace(gelu, (*operands(32, 48, 256, rows), half(48)))
    bugs = [f"ignores input {k}" for k in range(len(graph.inputs))]
    bugs += ["missing tile", "low-precision sum", "last step along K left out", "scales not applied"]
    bugs += ["first scale taken for the second", *(["one row's scale for all"] if rows else [])]
    found = self_test(graph, inputs, "cpu", names=bugs)
    assert set(found) == set(bugs)
    assert all(verdict.startswith("rejected") and "raised" not in verdict for verdict in found.values()), found


@pytest.mark.parametrize(
    ("name", "schedules"),
    [("scaled_gelu", {"coop"}), ("scaled_rows_gelu_promoted", {"coop", "pingpong", "auto", "split"})],
)
def test_hopper_kernels_use_the_8_bit_tensor_cores(name, schedules):
    (case,) = (c for c in scaled_cases(1000, 528, 784) if c.name == name)
    graph, contender = case.traced()[0], TileLang()
    every = reversed(contender.variants(graph, HOPPER, "max"))
    first = {v["schedule"]: v for v in every if v["schedule"] in schedules}
    assert set(first) == schedules
    for variant in first.values():
        source = lowered(contender.kernel(graph, variant, HOPPER)).kernel_source
        assert "tl::wgmma_ss<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32" in source
        assert ("float step0" in source) == ("promoted" in name)
    if nvcc_path() and "promoted" in name:  # two sets of accumulators
        report = cubin_report(contender.kernel(graph, first["coop"], HOPPER))
        assert report.spilled_bytes == 0
