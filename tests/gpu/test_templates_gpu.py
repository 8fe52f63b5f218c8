"""Conformance of every template on a GPU: the CPU target's cases, in each dtype, with the first configurations.

nvcc takes most of the time, so what the selected tests need is compiled in threads before the first of them.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


from row_cases import PIECES
from row_cases import ROWS
from row_cases import WIDE
from row_cases import WINDOWED
from template_cases import OPERATORS
from template_cases import POINTWISE
from template_cases import ROWWISE
from template_cases import Case
from template_cases import trace

from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.verify import Verifier

DEVICE = describe_device("cuda")


@pytest.fixture(scope="module")
def contender(tmp_path_factory, request):
    made = TileLang(cache_dir=tmp_path_factory.mktemp("kernels"))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # such a worker doesn't know which tests will be its own
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for test in request.session.items:
                for graph, variant in needed(test, made):
                    pool.submit(made.build, graph, variant, DEVICE)  # what fails is left for its test to report
    return made


def needed(test, contender):
    """(sub-graph, variant) of each kernel that a collected test builds."""
    wanted = getattr(test, "callspec", None)
    if wanted is None or test.path.name != os.path.basename(__file__):
        return
    every = test.originalname == "test_every_configuration"
    dtype = wanted.params.get("dtype", torch.bfloat16 if every else torch.float32)
    with suppress(Exception):  # as above
        graph, _, variants = chosen(contender, wanted.params["case"], dtype, 16 if every else 1)
        yield from ((graph, variant) for variant in variants)


@cache
def chosen(contender, case, dtype, configs):
    """The sub-graph, its inputs and the first variants of the family that must cover it."""
    graph, inputs = case.traced("cuda", dtype)
    variants = contender.variants(graph, DEVICE, "max")
    assert not isinstance(variants, str), variants
    meant = [v for v in variants if case.family == contender.registry.templates[v["template"]].FAMILY]
    assert meant
    return graph, inputs, meant[:configs]


def conform(contender, case, dtype, configs=1):
    graph, inputs, variants = chosen(contender, case, dtype, configs)
    verifier = Verifier(graph, inputs, "cuda")
    for variant in variants:
        outcome = verifier.check(contender.build(graph, variant, DEVICE).run, "full")
        assert not outcome.reason, f"{variant}: {outcome.reason}"


@pytest.mark.parametrize("case", OPERATORS, ids=lambda c: c.name)
def test_operators(case, contender):
    conform(contender, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", POINTWISE + ROWWISE, ids=lambda c: c.name)
def test_shapes(case, dtype, contender):
    conform(contender, case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ROWS + WIDE + PIECES + WINDOWED, ids=lambda c: c.name)
def test_rows_and_pieces(case, dtype, contender):
    conform(contender, case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
def test_a_bias_joins_what_follows_its_convolution(last, dtype, contender):
    def behind(x, w, b):
        return torch.tanh(torch.nn.functional.gelu(torch.nn.functional.conv2d(x, w, b, 2, 1)))

    def inputs():
        x, w = torch.randn(4, 16, 33, 31), torch.randn(24, 16, 3, 3) / 12
        order = torch.channels_last if last else torch.contiguous_format
        return x.to(memory_format=order), w.to(memory_format=order), torch.randn(24)

    conform(contender, Case("conv_tail", "pointwise", behind, inputs), dtype)


@pytest.mark.parametrize(
    "case",
    [
        *(c for c in POINTWISE + ROWWISE if c.name in ("bias_gelu", "crosswise", "layer_norm")),
        *(
            c
            for c in ROWS + WIDE
            if c.name in ("softmax_channels", "wide_group_norm", "wide_log_softmax", "wide_cross_entropy")
        ),
    ],
    ids=lambda c: c.name,
)
def test_every_configuration(case, contender):
    conform(contender, case, torch.bfloat16, configs=16)


def test_a_misaligned_view_is_accepted_at_run_time(contender):
    """Captured aligned, called with a view that isn't: the vector loads must not fault."""
    graph, (x,) = trace(lambda x: torch.relu(x) * 2, (torch.randn(4096, device="cuda"),))
    run = contender.build(graph, contender.variants(graph, DEVICE, "quick")[0], DEVICE).run
    shifted = torch.randn(4097, device="cuda")[1:]
    assert torch.equal(run([shifted])[0], torch.relu(shifted) * 2)
    assert torch.equal(run([x])[0], torch.relu(x) * 2)


def test_replays_in_a_cuda_graph(contender):
    graph, (x,) = trace(lambda x: torch.sigmoid(x) + x, (torch.randn(100, 1000, device="cuda"),))
    run = contender.build(graph, contender.variants(graph, DEVICE, "quick")[0], DEVICE).run
    run([x])
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        (out,) = run([x])
    x.copy_(torch.randn_like(x))
    captured.replay()
    torch.testing.assert_close(out, torch.sigmoid(x) + x)
