"""q, k and v as one product on a real GPU: every config of the kernel, the framework's forms, and patched models."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from config_spread import spread
from fusescout.templates import gemm_shared_input
from template_cases import SHARED
from template_cases import Case
from template_cases import randn
from torch.nn import functional as F

from fusescout import reference
from fusescout.capture import capture
from fusescout.contenders.base import Contender
from fusescout.contenders.binding import bind
from fusescout.contenders.compile_cuda import compile_cuda
from fusescout.contenders.framework import Framework
from fusescout.contenders.preparing import prepared
from fusescout.contenders.tilelang import TileLang
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.tolerance import Allowance
from fusescout.verify import Verifier
from fusescout.workload import Workload

DEVICE = describe_device("cuda")
FAMILY = "gemm_shared_input"


def _projections(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = [t for t in given if t.dim() == 2]
    biases = [t for t in given if t.dim() == 1]
    return tuple(F.linear(x, w, biases[n] if n < len(biases) else None) for n, w in enumerate(weights))


def _case(name: str, x: tuple[int, ...], widths: tuple[int, ...], biases: int) -> Case:
    k = x[-1]

    def inputs() -> tuple[torch.Tensor, ...]:
        weights = (randn(n, k, seed=s) * k**-0.5 for s, n in enumerate(widths))
        return (randn(*x), *weights, *(randn(n, seed=s) for s, n in enumerate(widths[:biases])))

    return Case(name, FAMILY, _projections, inputs, 1)


LARGE = [
    _case("several tiles for each block", (3, 1368, 776), (768, 768, 768), 3),
    _case("grouped queries, gaps between weights", (1000, 1032), (1544, 264, 520), 1),
    _case("narrower than a tile", (2, 700, 520), (24, 40, 8, 200, 16), 0),
    _case("few rows", (3, 5, 2056), (2048, 512, 512), 0),
    _case("one row", (1, 1, 2056), (2048, 512, 512), 3),
    _case("one k-step", (300, 64), (136, 136), 2),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: c.name)
def test_every_kind_is_as_close_to_the_truth_as_eager(case: Case, tmp_path_factory: Any) -> None:
    graph, given = case.traced("cuda", torch.bfloat16)
    assert gemm_shared_input.supports(graph, DEVICE) is None
    eager, truth = reference.build(graph)(given), reference.build(graph, "float64")([t.double() for t in given])
    allowed = [Allowance(e, t) for e, t in zip(eager, truth, strict=True)]
    configs = spread(gemm_shared_input.configs(graph, DEVICE))
    splits = [gemm_shared_input.prepared(graph, c) for c in configs]
    kernels = [gemm_shared_input.kernel(s.steady, c, DEVICE) for s, c in zip(splits, configs, strict=True)]
    folder = tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(16) as pool:
        compiled = list(pool.map(lambda k: compile_cuda(k, DEVICE, folder), kernels))
    wrong = {}
    for config, split, kernel, launch in zip(configs, splits, kernels, compiled, strict=True):
        built = prepared(split, bind(split.steady, kernel, launch, DEVICE))
        for _ in range(2):
            outputs = built.run(given)
        torch.cuda.synchronize()
        reasons = [a.judge(o).reason for a, o in zip(allowed, outputs, strict=True)]
        if any(reasons):
            wrong[str(config)] = reasons
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_both_contenders_pass_the_full_check(case: Case, dtype: torch.dtype, tmp_path: Any) -> None:
    graph, given = case.traced("cuda", dtype)
    verifier = Verifier(graph, given, "cuda")
    for contender in (Framework(), TileLang(cache_dir=tmp_path)):
        variant = contender.variants(graph, DEVICE, "quick")[0]
        outcome = verifier.check(contender.build(graph, variant, DEVICE).run, "full")
        assert not outcome.reason, f"{contender.name} {variant}: {outcome.reason}"


class Attention(torch.nn.Module):
    """BERT's, or with fewer keys and values and no biases Llama's."""

    def __init__(self, narrow: int, bias: bool) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(256, 256, bias=bias), torch.nn.Linear(256, narrow, bias=bias)
        self.v, self.o = torch.nn.Linear(256, narrow, bias=bias), torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, 64).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


def _planned(model: torch.nn.Module, x: torch.Tensor, contender: Contender) -> Plan:
    (captured,) = capture(Workload(model, (x,), device="cuda")).graphs
    entries = {}
    for region in find_regions(captured.graph):
        if region.family == FAMILY:
            graph, _ = captured.graph.subgraph(region.nodes)
            entries[graph.key] = Entry(
                id=f"shared-{graph.key[:8]}", family=FAMILY, chain=list(graph.chain), subgraph=graph.to_json(),
                contender=contender.name, variant=dict(contender.variants(graph, DEVICE, "quick")[0]), sites=1,
            )  # fmt: skip
    return Plan(
        target="t", mode="inference", device_kind="cuda", device_name=DEVICE.name, torch=torch.__version__,
        entries=list(entries.values()),
    )  # fmt: skip


@pytest.mark.parametrize("composition", ["eager", "inductor", "cudagraph"])
@pytest.mark.parametrize("contender", [Framework(), TileLang()], ids=["framework", "tilelang"])
def test_a_patched_model_reads_new_weights_at_old_addresses(contender: Contender, composition: Composition) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    parts = Attention(256, True), Attention(64, False), Attention(256, False)
    model = torch.nn.Sequential(*parts).eval().cuda().bfloat16()
    x = torch.randn(4, 128, 256, device="cuda").bfloat16()

    def close() -> bool:
        twin = copy.deepcopy(model)
        twin._compiled_call_impl = None
        with torch.no_grad():
            return all(torch.allclose(model(x), twin(x), rtol=0.05, atol=0.05) for _ in range(4))

    handle = patch(model, _planned(model, x, contender), composition=composition)
    assert close()
    assert (handle.counters.sites, handle.counters.fallbacks) == (3, {})
    with torch.no_grad():
        model[0].k.weight.mul_(-3)
        model[1].v.weight.mul_(-3)
    assert close(), "a write was not seen"
    handle.undo()
