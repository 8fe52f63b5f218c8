"""A vocabulary head with its cross entropy on a GPU: every schedule, bad classes, and what it saves."""

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


from loss_cases import HEADS
from loss_cases import causal
from template_cases import Case
from template_cases import trace
from torch import Tensor

from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.reference import build
from fusescout.verify import Verifier

DEVICE = describe_device("cuda")


@pytest.fixture(scope="module")
def contender(tmp_path_factory):
    return TileLang(cache_dir=tmp_path_factory.mktemp("kernels"))


def large(rows: int, classes: int, width: int) -> tuple[Tensor, ...]:
    made = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, width, generator=made, device="cuda").bfloat16() for n in (rows, classes))
    labels = torch.randint(classes, (rows,), generator=made, device="cuda")
    return x, w * width**-0.5, labels.masked_fill_(labels % 5 == 0, -100)


def conform(contender, graph, inputs, level, variants):
    verifier = Verifier(graph, inputs, "cuda")
    for variant in variants:
        outcome = verifier.check(contender.build(graph, variant, DEVICE).run, level)
        assert not outcome.reason, f"{variant}: {outcome.reason}"
        assert outcome.stats.deterministic, variant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HEADS, ids=lambda c: c.name)
def test_shapes(case: Case, dtype, contender):
    graph, inputs = case.traced("cuda", dtype)
    variants = contender.variants(graph, DEVICE, "max")
    assert not isinstance(variants, str), variants
    assert {v["template"] for v in variants} == {"linear_cross_entropy"}
    conform(contender, graph, inputs, "full", variants[:2])


@pytest.mark.parametrize("schedule", ["pingpong", "coop", "roles", "auto"])
def test_every_schedule(schedule, contender):
    """Enough tiles for each block to have several in turn."""
    graph, inputs = trace(causal, large(1000, 50257, 264))
    variants = [v for v in contender.variants(graph, DEVICE, "max") if v["schedule"] == schedule]
    if not variants:
        pytest.skip(f"{DEVICE.name} has no {schedule}")
    conform(contender, graph, inputs, "quick", variants)


def test_bad_classes_give_nan_and_touch_nothing(contender):
    graph, (x, w, labels) = trace(causal, large(256, 1031, 64))
    run = contender.build(graph, contender.variants(graph, DEVICE, "quick")[0], DEVICE).run
    for bad in (1031, 1200, -1, 1 << 40):
        wrong = labels.clone()
        wrong[7] = bad
        assert math.isnan(run([x, w, wrong])[0].item())
    assert math.isnan(run([x, w, torch.full_like(labels, -100)])[0].item())
    torch.testing.assert_close(run([x, w, labels])[0], causal(x, w, labels), rtol=1e-2, atol=1e-2)


def test_it_holds_a_fraction_of_what_eager_holds(contender):
    graph, inputs = trace(causal, large(4096, 50257, 768))
    run = contender.build(graph, contender.variants(graph, DEVICE, "quick")[0], DEVICE).run

    def held(step) -> int:
        step(inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(inputs)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        assert held(run) < held(build(graph)) / 20
