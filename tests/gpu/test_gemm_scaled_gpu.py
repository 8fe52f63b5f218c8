"""Products of 8-bit floats on Hopper's tensor cores, held to the tool's own rule: every schedule, scale and tail."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from config_spread import spread
from fusescout.templates import gemm_epilogue
from one_entry import plan_of_kernel
from scaled_cases import E4M3
from scaled_cases import QUANTISING
from scaled_cases import Float8Linear
from scaled_cases import gelu
from scaled_cases import gelu_promoted
from scaled_cases import half
from scaled_cases import operands
from scaled_cases import scaled_cases
from template_cases import Case
from test_gemm_template_gpu import synchronize
from torch import nn

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
LARGE = ("scaled_gelu", "scaled_gelu_promoted", "scaled_rows_silu_residual")


def named(title, cases, names=()):
    return [pytest.param(c, id=f"{c.name} {title}") for c in cases if not names or c.name in names]


def long_sums(function):
    """Terms of one sign: what the tensor cores cut off of their sums adds up."""
    x, w, *scales = operands(256, 512, 8192)
    x, w = (t.float().abs().to(E4M3) for t in (x, w))
    return Case("scaled_long_sums", "gemm_epilogue", function, lambda: (x, w, *scales, half(512)))


CASES = [
    *named("tails everywhere", scaled_cases(1000, 528, 784)),
    *named("several tiles for each block", scaled_cases(4104, 1552, 784), LARGE),
    *named("16 rows", scaled_cases(16, 4096, 4096), LARGE),
    *named("one step along K", scaled_cases(300, 208, 128), LARGE),
    pytest.param(long_sums(gelu), id="long sums"),
    pytest.param(long_sums(gelu_promoted), id="long sums, promoted"),
]


@pytest.mark.parametrize("case", QUANTISING, ids=lambda c: c.name)
def test_values_become_8_bit_floats_and_back(case, tmp_path_factory):
    graph, inputs = case.traced("cuda")
    device, contender = describe_device("cuda"), TileLang(cache_dir=tmp_path_factory.getbasetemp())
    verifier = Verifier(graph, inputs, "cuda")
    for variant in contender.variants(graph, device, "quick"):
        outcome = verifier.check(contender.build(graph, variant, device).run, "full")
        assert not outcome.reason, f"{variant}: {outcome.reason}"


@pytest.mark.parametrize("case", CASES)
def test_every_schedule_passes_the_full_check(case, tmp_path_factory):
    graph, inputs = case.traced("cuda")
    device, contender = describe_device("cuda"), TileLang(cache_dir=tmp_path_factory.getbasetemp())
    assert gemm_epilogue.supports(graph, device) is None
    variants = [{"template": "gemm_epilogue", **c} for c in spread(gemm_epilogue.configs(graph, device))]
    assert len({v["schedule"] for v in variants}) > 1
    verifier, wrong = Verifier(graph, inputs, "cuda"), {}
    with ThreadPoolExecutor(16) as pool:
        built = list(pool.map(partial(contender.build, graph, device=device), variants))
    for variant, made in zip(variants, built, strict=True):
        made.run(inputs)
        synchronize()
        if reason := verifier.check(made.run, "full").reason:
            wrong[str(variant)] = reason
    assert not wrong


def test_8_bit_products_have_a_rate_of_their_own():
    rates = measure_device("cuda", ("bfloat16", "float8_e4m3fn")).flops_per_s
    assert rates["float8_e4m3fn"] > 1.2 * rates["bfloat16"]


@pytest.mark.parametrize("rows", [False, True], ids=["tensors", "rows"])
def test_a_patched_float8_model_gives_what_eager_gives(rows):
    torch.manual_seed(0)
    model = nn.Sequential(Float8Linear(512, 256, rows), nn.GELU(), Float8Linear(256, 512, rows)).cuda().eval()
    x = torch.randn(304, 256, device="cuda").bfloat16()
    with torch.no_grad():
        expected = model(x)
    (found,) = capture(build(model, (x,), {}, mode="inference")).graphs
    chains = [found.graph.subgraph(r.nodes)[0] for r in find_regions(found.graph) if r.family == "gemm_epilogue"]
    graph = next(g for g in chains if g.chain == ("t", "_scaled_mm", "gelu"))
    device = describe_device("cuda")
    variant = {"template": "gemm_epilogue", **gemm_epilogue.configs(graph, device)[0]}
    plan = plan_of_kernel(graph, "gemm_epilogue", variant, device)
    for composition in ("eager", "cudagraph"):
        torch._dynamo.reset()
        handle = patch(model, plan, composition=composition)
        for _ in range(3):  # the first calls of a CUDA graph only warm it up
            with torch.no_grad():
                got = model(x).clone()
        assert handle.counters.sites == 1
        assert not handle.counters.fallbacks
        error = (got.float() - expected.float()).abs()
        assert error.max() < 0.1 * expected.float().abs().max()  # one step of 8 bits here and there
        assert error.mean() < 0.01 * expected.float().abs().mean()
        handle.undo()
