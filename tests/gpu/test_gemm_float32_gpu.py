"""float32 products from bfloat16 tensor cores on a real GPU, held to the tool's own rule; nothing may be TF32 here."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fusescout.templates import gemm_float32
from one_entry import plan_of_kernel
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.contenders.tilelang import TileLang
from fusescout.patching import patch
from fusescout.probe import describe_device
from fusescout.probe import measure_device
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import build

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

CASES = {
    "bias and silu": (lambda x, w, b: F.silu(F.linear(x, w, b)), (300, 520), (392, 520), (392,)),
    "several tiles for each block": (lambda x, w, b: F.linear(x, w, b) * 1.5, (4104, 264), (1544, 264), (1544,)),
    "alone": (lambda x, w: F.linear(x, w), (512, 256), (384, 256)),
    "one row, one k-step": (lambda x, w, b: F.relu(F.linear(x, w, b)), (1, 64), (200, 64), (200,)),
    "odd everywhere, residual": (
        lambda x, w, b, r: F.relu(F.linear(x, w, b)) + r, (101, 203), (77, 203), (77,), (101, 77),
    ),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w).relu(), (1000, 520), (520, 776), (776,)),
    "alpha and beta": (lambda x, w, b: torch.addmm(b, x, w, alpha=2, beta=0.5), (100, 203), (203, 77), (77,)),
    "turned weight": (lambda x, w: torch.mm(x, w.t()).sigmoid(), (130, 72), (203, 72)),
    "leading dimensions": (lambda x, w, b, r: F.linear(x, w, b) + r, (3, 70, 136), (96, 136), (96,), (3, 70, 96)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", CASES)
def test_every_config_passes_the_full_check(name, tmp_path_factory):
    function, *shapes = CASES[name]
    torch.manual_seed(0)
    given = tuple(torch.randn(s, device="cuda") / (s[-1] ** 0.5 if len(s) == 2 else 1) for s in shapes)
    graph, inputs = trace(function, given)
    parameters = [t is given[1] for t in inputs]
    graph = replace(graph, inputs=tuple(replace(s, constant=p) for s, p in zip(graph.inputs, parameters, strict=True)))
    device, contender = describe_device("cuda"), TileLang(cache_dir=tmp_path_factory.getbasetemp())
    variants = [v for v in contender.variants(graph, device, "max") if v["template"] == "gemm_float32"]
    assert len(variants) == 4
    verifier = Verifier(graph, inputs, "cuda")
    with ThreadPoolExecutor(len(variants)) as pool:
        built = list(pool.map(lambda v: contender.build(graph, v, device), variants))
    wrong = {}
    for variant, made in zip(variants, built, strict=True):
        outcome = verifier.check(made.run, "full")
        if outcome.reason:
            wrong[str(variant)] = outcome.reason
    assert not wrong


def test_who_measures_float32_measures_what_it_can_be_made_of():
    rates = measure_device("cuda", ("float32",)).flops_per_s
    assert rates["bfloat16"] > 6 * rates["float32"]


def test_a_patched_model_uses_prepared_planes_and_sees_its_weight_change():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(264, 520), nn.ReLU()).cuda().eval()
    x = torch.randn(300, 264, device="cuda")
    (found,) = capture(build(model, (x,), {}, mode="inference")).graphs
    (region,) = (r for r in find_regions(found.graph) if r.family == "gemm_epilogue")
    graph, _ = found.graph.subgraph(region.nodes)
    device = describe_device("cuda")
    variant = {"template": "gemm_float32", **gemm_float32.configs(graph, device)[0]}
    assert variant["weight"] == "prepared"
    plan = plan_of_kernel(graph, region.family, variant, device)
    for composition in ("eager", "cudagraph"):
        torch._dynamo.reset()
        handle = patch(model, plan, composition=composition)
        for _ in range(2):
            for _ in range(3):  # the first calls of a CUDA graph only warm it up
                with torch.no_grad():
                    got = model(x).clone()
            truth = F.relu(F.linear(x.double(), model[0].weight.double(), model[0].bias.double()))
            assert (got - truth).abs().max() < 1e-5
            with torch.no_grad():
                model[0].weight.mul_(1.5)
        assert handle.counters.sites == 1
        assert not handle.counters.fallbacks
        handle.undo()
