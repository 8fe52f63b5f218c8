"""Small convolutional models, their captured chains, and plans that patch every one of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fusescout.capture import activations
from fusescout.capture import capture
from fusescout.capture.capture import CapturedGraph
from fusescout.contenders.base import Contender
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.layout import encoded
from fusescout.memory_format import channels_last
from fusescout.plan import Entry
from fusescout.plan import MemoryFormat
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.restride import copy_of
from fusescout.workload import Workload

CPU = Device("cpu", "test", "x86", 1)


def trained(model: nn.Module) -> nn.Module:
    """Eval mode, with statistics and weights that a trained model could have."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.running_mean.uniform_(-0.5, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
                nn.init.uniform_(module.bias, -0.5, 0.5, generator=generator)
    return model.eval()


def captured(model: nn.Module, x: torch.Tensor, memory_format: MemoryFormat = "preserved") -> CapturedGraph:
    (graph,) = capture(Workload(model, (x,))).graphs
    if memory_format == "preserved":
        return graph
    module = copy_of(graph.module)
    assert channels_last(module) == ""
    return replace(graph, module=module, graph=encoded(graph, module))


def chain(graph: CapturedGraph, *ops: str) -> tuple[Subgraph, list[torch.Tensor]]:
    """The convolution region with these operators, and its real inputs."""
    for region in find_regions(graph.graph):
        subgraph, names = graph.graph.subgraph(region.nodes)
        if region.family == "conv_epilogue" and subgraph.chain == ops:
            values = activations.record(graph, set(names))
            return subgraph, [values[n] for n in names]
    raise AssertionError(f"no region {ops}")


class Block(nn.Module):
    """conv, norm, relu, 1x1 conv, norm, and the same of a 1x1 shortcut added, relu."""

    def __init__(self, inner: int = 8, outer: int = 16) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, outer, 1), nn.BatchNorm2d(outer)
        self.short, self.bn3 = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.bn3(self.short(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(8, 16), Block(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape or (2, 8, 9, 7), generator=torch.Generator().manual_seed(1)).to(dtype)


def planned(model: nn.Module, x: torch.Tensor, contender: Contender, memory_format: MemoryFormat = "preserved") -> Plan:
    """A plan with every convolution region that the contender can run, largest first."""
    graph = captured(model, x, memory_format)
    entries: dict[str, Entry] = {}
    for region in find_regions(graph.graph):
        subgraph, _ = graph.graph.subgraph(region.nodes)
        variants = contender.variants(subgraph, CPU, "quick") if region.family == "conv_epilogue" else ""
        if not isinstance(variants, str):
            entries[subgraph.key] = Entry(
                id=f"conv-{subgraph.key[:8]}", family=region.family, chain=list(subgraph.chain),
                subgraph=subgraph.to_json(), contender=contender.name, variant=dict(variants[0]), sites=1,
            )  # fmt: skip
    assert entries
    device = describe_device("cpu")
    return Plan(
        target="t", mode="inference", device_kind="cpu", device_name=device.name, torch=torch.__version__,
        entries=list(entries.values()), memory_format=memory_format,
    )  # fmt: skip
