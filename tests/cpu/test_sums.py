"""Sums over what linears and convolutions give, taken before the product: found, right, and without the product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sum_cases import CASES
from sum_cases import PIXELS
from sum_cases import traced
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout.candidates import lower_bound
from fusescout.capture import capture
from fusescout.constants import split
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework import rewrites
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.regions import find_regions
from fusescout.sums import is_summed
from fusescout.verify import Verifier
from fusescout.workload import Workload

CPU = Device("cpu", "test", "x86", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_sum_taken_before_the_product_is_right_also_for_infinities(name: str, dtype: torch.dtype) -> None:
    graph, inputs = traced(name, dtype)
    steps = rewrites(graph, CPU)
    linear = {op.name for op in graph.ops} & {"linear", "matmul", "mm"}
    assert steps[-1][0].split()[1:] == ["before", "linear" if linear else "convolution"]
    built = Framework().build(graph, {"calls": [s[0] for s in steps]}, CPU)
    assert Verifier(graph, inputs, "cpu").check(built.run, "full").reason == ""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("columns, scaled", torch.bfloat16),
        ("many columns, less a row", torch.bfloat16),
        ("columns, and the input again", torch.float32),
        ("columns of a matmul", torch.bfloat16),
        ("columns of a wide input", torch.float32),
    ],
)
def test_a_kernel_for_rows_adds_up_columns(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    graph, inputs = traced(name, dtype)
    contender = TileLang(cache_dir=tmp_path)
    variants = contender.variants(graph, CPU, "quick")
    assert variants[0]["template"] == "rowwise"
    built = contender.build(graph, variants[0], CPU)
    assert Verifier(graph, inputs, "cpu").check(built.run, "full").reason == ""


def test_what_is_prepared_is_not_rounded_to_16_bits() -> None:
    graph, inputs = traced("many columns, less a row", torch.bfloat16)
    built = Framework().build(graph, {"calls": [s[0] for s in rewrites(graph, CPU)]}, CPU)
    (truth,), (out,) = Verifier(graph, inputs, "cpu").truth(inputs), built.run(inputs)
    rounded = (truth.bfloat16().double() - truth).square().mean()
    assert (out.double() - truth).square().mean() < 1.1 * rounded


def test_a_product_that_is_only_added_up_is_found_and_not_bound_by_its_operations() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.ConvTranspose2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)
            self.head, self.shift = nn.Linear(8, 32), nn.Parameter(torch.randn(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled = F.adaptive_avg_pool2d(self.norm(self.conv(x) * 2), 1).flatten(1)
            pooled = torch.relu(pooled)
            return torch.relu((self.head(pooled) - self.shift).mean(1, keepdim=True)) + pooled

    (captured,) = capture(Workload(Model().eval(), (torch.randn(2, 4, 9, 9),))).graphs
    found = [captured.graph.subgraph(r.nodes)[0] for r in find_regions(captured.graph)]
    chains = [g.chain for g in found if is_summed(g)]
    assert ("linear", "sub", "mean") in chains
    assert ("linear", "sub", "mean", "relu", "add") in chains
    assert ("conv_transpose2d", "mul", "batch_norm", "adaptive_avg_pool2d") in chains
    device = Device("cuda", "H", "sm_90a", 132, 4e12, {"float32": 5e13}, 4.0, 50 << 20)
    for graph in found:
        bound, _, nbytes = lower_bound(graph, device)
        if is_summed(graph):  # the weights are not read either
            assert split(rewrites(graph, CPU)[-1][1]), "sums of parameters are prepared"
            needed = sum(s.nbytes for s in (*graph.inputs, *graph.output_specs) if not s.constant)
            assert nbytes == needed
            assert bound == pytest.approx(nbytes / 4e6)


def test_sums_that_need_the_product_are_left() -> None:
    def channels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).mean((1, 2, 3))

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y := F.linear(x, w)), y.sum(1)

    def bent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).relu().sum(1)

    for function, *shapes in ((channels, PIXELS, (8, 6, 3, 3)), (both, (4, 8), (6, 8)), (bent, (4, 8), (6, 8))):
        graph, _ = trace(function, tuple(torch.randn(s) for s in shapes))
        graph = replace(graph, inputs=tuple(replace(s, constant=k == 1) for k, s in enumerate(graph.inputs)))
        assert not is_summed(graph)
        assert not [s for s, _ in rewrites(graph, CPU) if "before" in s]


def test_a_matmul_with_a_parameter_is_a_linear_here() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned, self.straight = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = (x @ self.turned.t() / 2).sum(1, keepdim=True) * 1.5
            return first + (x @ self.straight).sum(1, keepdim=True) + (x @ x.T).sum(1, keepdim=True)

    (captured,) = capture(Workload(Model().eval(), (torch.randn(16, 8),))).graphs
    found = {captured.graph.subgraph(r.nodes)[0] for r in find_regions(captured.graph)}
    summed = [g for g in found if is_summed(g)]
    assert {g.chain[: g.chain.index("sum") + 1] for g in summed} >= {("t", "matmul", "div", "sum"), ("matmul", "sum")}
    for graph in summed:
        split_ = split(rewrites(graph, CPU)[-1][1])
        assert split_
        assert not {"matmul", "linear"} & {op.name for op in split_.steady.ops}
