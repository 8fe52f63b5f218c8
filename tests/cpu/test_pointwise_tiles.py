"""Tiles for operands that lie crosswise: where they are offered, and their CUDA text run thread by thread here."""

import math
import re

import pytest
import torch
from cuda_on_cpu import compile_threads
from fusescout.templates import pointwise
from lowering import HOPPER
from lowering import lowered
from template_cases import randn
from template_cases import trace
from torch.nn import functional as F

from fusescout import reference
from fusescout.tolerance import Allowance

BF16 = torch.bfloat16


def two_results(x, y, b):
    return (s := F.gelu(x + y.transpose(1, 2)) * b), s > 0


CASES = {
    "a batch, rows that end within a patch": (two_results, (2, 41, 48), (2, 48, 41), (48,)),
    "float32": (lambda x, y: torch.relu(x.t()) * 2 - y, (33, 32), (32, 33)),
    "rows of odd length": (lambda x, y: torch.relu(x) * 2 + y, (2, 35, 5, 9), (2, 35, 5, 9)),
    "rows that end within a warp, float32": (lambda x, y: x * y, (2, 21, 38), (2, 38, 21)),
    "channels last meets channels first": (lambda x, y: torch.relu(x) + y, (2, 32, 8, 6), (2, 32, 8, 6)),
    "several tiles, with ends, float32": (lambda x, y: torch.relu(x.t()) - y, (72, 132), (132, 72)),
    "one byte an element": (lambda x, y: (x > 0.5).t() & (y < 0.25), (48, 80), (80, 48)),
    "results in both orders": (lambda x, y: (F.relu(x), (x.t() > y).contiguous()), (80, 48), (48, 80)),
    "results in both orders, float32": (lambda x, y: (x * 3, (x.t() - y).contiguous()), (70, 36), (36, 70)),
}
EVERY = ("a batch, rows that end within a patch", "several tiles, with ends, float32")
"""Cases that all configurations are run on."""


def crosswise(graph, key="rows"):
    return [c for c in pointwise.configs(graph, HOPPER) if key in c]


@pytest.mark.parametrize("key", ["rows", "tile_rows"], ids=["patches", "in shared memory"])
@pytest.mark.parametrize("name", CASES)
def test_they_run_thread_by_thread(name, key, tmp_path):
    function, *shapes = CASES[name]
    dtype = torch.float32 if "float32" in name else BF16
    given = [randn(*s, seed=k).to(dtype) for k, s in enumerate(shapes)]
    if given[1].dim() == 4:
        given[1] = given[1].contiguous(memory_format=torch.channels_last)
    if "warp" in name:
        given[1] = given[1].transpose(1, 2)
    graph, inputs = trace(function, tuple(given))
    eager, truth = reference.build(graph)(inputs), reference.build(graph, "float64")([t.double() for t in inputs])
    assert len(crosswise(graph)) == 3 and len(crosswise(graph, key)) >= 2
    for number, config in enumerate(crosswise(graph, key)[: 3 if name in EVERY else 1]):
        kernel = pointwise.kernel(graph, config, HOPPER)
        source = lowered(kernel).kernel_source
        vectors = {4: "float4", 2: "float2"} if dtype == torch.float32 else {8: "uint4"}
        if wide := vectors.get(math.gcd(8 if dtype == BF16 else 4, graph.output_specs[0].shape[-1])):
            assert f"*({wide}*)" in source
        outputs = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype) for o in eager]
        for o in outputs:
            o.untyped_storage().fill_(0xFF)
        (folder := tmp_path / str(number)).mkdir()
        launch = compile_threads(source, [p.name for p in kernel.params], folder)
        tensors = {"input": inputs, "output": outputs}
        (blocks,) = re.findall(r"T\.Kernel\((\d+), threads", kernel.source)
        launch([tensors[p.role][p.index] for p in kernel.params], int(blocks), config["threads"])
        for got, e, t in zip(outputs, eager, truth, strict=True):
            assert not (reason := Allowance(e, t).judge(got).reason), f"{config}: {reason}"


def test_a_walk_that_suits_all_operands_stays_flat():
    for function, *shapes in (
        (lambda x, y: x * y + 1, (64, 64), (64, 64)),
        (lambda x, y: x * y + 1, (64, 64), (64, 1)),
        (lambda x, y: x.t() * y.t() + 1, (64, 64), (64, 64)),
        (lambda x, y: x.permute(0, 2, 1, 3) * 2 + y, (2, 24, 3, 64), (2, 3, 24, 64)),
        (lambda x, y: x + y.t(), (64, 12), (12, 64)),  # so few columns, and below rows, that sectors stay half empty
        (lambda x, y: x + y.t(), (8, 64), (64, 8)),
    ):
        graph, _ = trace(function, tuple(torch.empty(s, dtype=BF16, device="meta") for s in shapes))
        assert not crosswise(graph)
