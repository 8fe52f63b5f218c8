"""`torch.tensor(0.5)` inside a model is a number for its kernels, unless somebody writes to it or gets hold of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn
from torch.utils._pytree import tree_leaves

from fusescout.capture.aten import to_aten
from fusescout.capture.encode import encode_graph
from fusescout.device import Device
from fusescout.regions import find_regions
from fusescout.registry import load

X = torch.linspace(-2, 2, 12).view(3, 4)


def captured(function):
    found = []

    def keep(gm, inputs):
        found.append(to_aten(gm, inputs))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=keep, dynamic=False)(X)
    (module,) = found
    for got, wanted in zip(module(X), tree_leaves(function(X)), strict=True):
        assert torch.equal(got, wanted)
    return module


def operators(module):
    return [str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function"]


def bounded(x: Tensor) -> Tensor:
    return torch.max(torch.min(x * 2, torch.tensor(0.3, device=x.device)), torch.tensor(-1)) + 1


def test_a_number_is_part_of_the_one_kernel_around_it():
    graph = encode_graph(captured(bounded), 0)
    (region,) = [r for r in find_regions(graph) if r.family == "pointwise"]
    assert [graph.by_name[n].op for n in region.nodes] == ["mul", "full", "min", "full", "max", "add"]
    subgraph, inputs = graph.subgraph(region.nodes)
    assert len(inputs) == 1
    assert load().templates["pointwise"].supports(subgraph, Device("cpu", "cpu", "x86_64", 2)) is None


def test_a_longer_constant_is_read_where_it_lies():
    module = captured(lambda x: (x + torch.tensor([1.0, 2.0, 3.0, 4.0])).relu())
    assert operators(module) == ["add", "relu"]


def test_the_rounded_value_is_kept():
    (node,) = (n for n in captured(lambda x: x * torch.tensor(0.1)).graph.nodes if "full" in str(n.target))
    assert node.args[1] == torch.tensor(0.1).item()


def written(x: Tensor) -> Tensor:
    total = torch.tensor(0.0)
    total += x.sum()
    return x + total


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, torch.tensor(0.5)


@pytest.mark.parametrize("function", [written, returned], ids=lambda f: f.__name__)
def test_a_copy_that_others_may_write_stays_a_copy(function):
    assert "lift_fresh_copy" in operators(captured(function))


def test_a_second_call_finds_the_constant_unchanged():
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            step = torch.tensor([0.5, 1.0, 1.5, 2.0])
            step[0] = 3.0
            return x + step

    module = captured(Net())
    assert torch.equal(module(X)[0], module(X)[0])
