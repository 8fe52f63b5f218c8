"""A vocabulary head with its cross entropy: planted bugs, odd classes, chunks, a patched model, Hopper code."""

import math
import re

import pytest
import torch
from fusescout.templates.dialect import Dialect
from fusescout.templates.loss_finish import finish
from fusescout.templates.loss_problem import read
from fusescout.templates.loss_source import LossWriter
from fusescout.templates.rowwise import written
from fusescout.templates.source import build as build_text
from loss_cases import HEADS
from loss_cases import WIDTH
from loss_cases import causal
from loss_cases import head
from row_cases import targets
from template_cases import randn
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.contenders.binding import bind
from fusescout.contenders.compile_cpu import compile_cpu
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.framework import Framework
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.inputs import InputSource
from fusescout.mutants import REJECTED
from fusescout.mutants import self_test
from fusescout.mutants_losses import loss_mutants
from fusescout.patching import patched
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.reference import build
from fusescout.regions import find_regions
from fusescout.registry import load
from fusescout.template import Kernel
from fusescout.verify import Verifier
from fusescout.workload import build as workload

CPU = Device("cpu", "cpu", "x86_64", 2)
HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)
TEMPLATE = load().templates["linear_cross_entropy"]
PAIR = [c for c in HEADS if c.name in ("shifted_loss", "smoothed_losses")]


def test_planted_bugs_of_a_loss_are_rejected():
    graph, inputs = HEADS[0].traced(dtype=torch.bfloat16)
    names = list(loss_mutants(graph, build(graph)))
    assert len(names) == 4
    found = self_test(graph, inputs, "cpu", names=names)
    assert [name for name, result in found.items() if not result.startswith(REJECTED)] == []


@pytest.mark.parametrize("case", PAIR, ids=lambda c: c.name)
def test_chunks_of_rows_are_a_way_of_the_framework(case):
    graph, inputs = case.traced()
    contender = Framework()
    (variant,) = contender.variants(graph, CPU, "quick")
    assert variant == {"calls": ["cross_entropy in chunks"]}
    built = contender.build(graph, variant, CPU)
    assert built.source.count(".linear.") == 8
    assert not Verifier(graph, inputs, "cpu").check(built.run, "quick").reason


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The compiled kernel of a mean over 4 rows."""
    graph, _ = trace(causal, (randn(4, WIDTH), head(100), targets(4, classes=100)))
    contender = TileLang(cache_dir=tmp_path_factory.mktemp("kernels"))
    built = contender.build(graph, contender.variants(graph, CPU, "quick")[0], CPU)
    return lambda *inputs: built.run(inputs)[0].item()


def test_all_rows_ignored_give_nan_as_eager(run):
    assert math.isnan(run(randn(4, WIDTH), head(100), torch.full((4,), -100)))


@pytest.mark.parametrize("bad", [100, 127, 128, -1, 1 << 32, -(1 << 40)])
def test_a_class_that_there_is_not_gives_nan(run, bad):
    """Eager raises; a kernel can't, and must not read or write there."""
    classes = torch.tensor([3, bad, -100, 99])
    assert math.isnan(run(randn(4, WIDTH), head(100), classes))
    assert math.isfinite(run(randn(4, WIDTH), head(100), torch.tensor([3, 0, -100, 99])))


def test_scores_of_minus_infinity_are_eagers(run):
    """Whole tiles of them, in front of finite ones and behind, and nothing else."""
    x = randn(4, WIDTH).abs()
    for tiles in (slice(0, 64), slice(64, 100), slice(0, 100)):
        w = head(100)
        w[tiles] = -math.inf
        for classes in (torch.tensor([1, 70, 2, 3]), torch.tensor([70, 71, -100, 72])):
            expected = causal(x, w, classes).item()
            assert run(x, w, classes) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_ignored_rows_may_hold_anything(run):
    x = randn(4, WIDTH)
    x[1], x[2] = math.nan, math.inf
    classes = torch.tensor([3, -100, -100, 99])
    assert run(x, head(100), classes) == pytest.approx(causal(x, head(100), classes).item(), rel=1e-6)


REFUSED = {
    "class weights": (
        lambda x, w, c, t: F.cross_entropy(F.linear(x, w), t, c),
        (randn(80, WIDTH), head(), head()[:, 0].abs(), targets(80, classes=1031)),
    ),
    "class probabilities": (
        lambda x, w, p: F.cross_entropy(F.linear(x, w), p),
        (randn(80, WIDTH), head(), randn(80, 1031).softmax(-1)),
    ),
    "scores of a mask for each row": (
        lambda x, w, m, t: F.cross_entropy(F.linear(x, w) + m, t),
        (randn(80, WIDTH), head(), randn(80, 1031), targets(80, classes=1031)),
    ),
    "rows as classes": (
        lambda x, w, t: F.cross_entropy(F.linear(x, w).t(), t),
        (randn(80, WIDTH), head(), targets(1031, classes=80)),
    ),
    "first positions left out": (
        lambda x, w, t: F.cross_entropy(F.linear(x, w)[:, 1:].reshape(-1, 1031), t),
        (randn(2, 40, WIDTH), head(), targets(78, classes=1031)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_with_a_reason(name):
    function, inputs = REFUSED[name]
    assert TEMPLATE.supports(trace(function, inputs)[0], CPU)


class Language(nn.Module):
    """A causal language model that gives its loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(300, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 300, bias=False)

    def forward(self, tokens, labels):
        hidden = self.norm(torch.tanh(self.mix(self.embed(tokens))))
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return causal(hidden, self.head.weight, labels)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_patched_language_model_has_eagers_loss_and_gradients(mode):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = Language().train(mode == "training"), torch.randint(0, 300, (3, 17))
    captured = capture(workload(model, (tokens, tokens.clone()), mode=mode)).graphs[0]
    (region,) = [r for r in find_regions(captured.graph) if r.family == "linear_cross_entropy"]
    graph, _ = captured.graph.subgraph(region.nodes)
    variant = TileLang().variants(graph, CPU, "quick")[0]
    entry = Entry(
        id="head", family=region.family, chain=list(graph.chain), subgraph=graph.to_json(), contender="tilelang",
        variant=dict(variant), sites=1,
    )  # fmt: skip
    plan = Plan(
        target="language", mode=mode, device_kind="cpu", device_name=describe_device("cpu").name,
        torch=torch.__version__, entries=[entry],
    )  # fmt: skip

    def step(labels):
        loss = model(tokens, labels)
        gradients = torch.autograd.grad(loss, list(model.parameters())) if mode == "training" else ()
        return [loss.detach(), *gradients]

    with torch.set_grad_enabled(mode == "training"):
        batches = tokens.clone(), torch.where(tokens < 150, tokens, -100)
        expected = [step(labels) for labels in batches]
        with patched(model, plan) as handle:
            got = [step(labels) for labels in batches]
            assert handle.counters.sites == 1
            assert not handle.counters.fallbacks
    for mine, eager in zip(got, expected, strict=True):
        for a, b in zip(mine, eager, strict=True):
            torch.testing.assert_close(a, b)


def emulated(graph, bm, bn):
    """The text for CUDA with the CPU's loops and buffers in place of tiles, as `test_rowwise_cuda.py` has it."""
    problem, loss = read(graph)
    config = {"schedule": "auto", "BM": bm, "BN": bn, "BK": 16, "stages": 2, "threads": 128, "policy": "FullRow"}
    tiles = -(-problem.N // bn)
    behind = finish(loss, tiles)
    writer = LossWriter(problem, loss, config, Dialect("cuda"), behind)
    rows = {"threads": 8, "rows": 8, "width": tiles + 3, "keep": True, "vector": 1}
    text = "\n".join([writer.source("emulated"), *written(behind.stages, rows, Dialect("cuda"))])
    text = text[text.index("M, N, K =") :].replace("T.Parallel", "T.grid")
    text = re.sub(r"alloc_(fragment|shared)", "alloc_local", text)
    text = Dialect("cpu").header() + re.sub(r", threads=\w+(, prelude=PRELUDE)?", "", text)
    return Kernel(build_text(text, "emulated"), writer.params(), text, Dialect("cpu").pass_configs)


@pytest.mark.parametrize("case", PAIR, ids=lambda c: c.name)
def test_the_text_for_cuda_says_the_same(case, tmp_path):
    """Tiles that are not full, rows of several matrices, classes in every tile: what indices and tests are about."""
    graph, inputs = case.traced()
    made = emulated(graph, 32, 128)
    run, eager = bind(graph, made, compile_cpu(made, tmp_path, "-O1"), CPU), build(graph)
    source = InputSource(graph, inputs, "cpu", 0)
    for name in ("captured", "shuffled", "nan", "+inf", "-inf", "large"):
        given = source.make(name)
        (out,), (expected,) = run(given), eager(given)
        scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


LARGE = {"gpt2": (8192, 50257, 768, "pingpong"), "llama3": (4096, 128256, 4096, "coop")}


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", LARGE)
def test_assembles_for_hopper_without_spills(name):
    rows, classes, width, schedule = LARGE[name]
    x, w = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, classes))
    graph, _ = trace(
        lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t), (x, w, x.new_empty(rows, dtype=torch.int64))
    )
    assert TEMPLATE.supports(graph, HOPPER) is None
    config = next(c for c in TEMPLATE.configs(graph, HOPPER) if c["schedule"] == schedule)
    kernel = TEMPLATE.kernel(graph, config, HOPPER)
    held = sum(math.prod(p.shape) * 4 for p in kernel.params if p.role == "scratch")
    assert held < rows * classes * 2 / 30
    found = cubin_report(kernel)
    assert found.spilled_bytes == 0
    assert found.source.count("tl::AllReduce<tl::MaxOp, 4, 1,") >= 1, "a row's scores lie in one warp's registers"
