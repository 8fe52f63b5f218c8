"""A residual stream that begins transposed, laid out row-major: same values, same strides outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import nn

from fusescout.capture import capture
from fusescout.hoisting import hoist
from fusescout.layout import choose
from fusescout.patching import patch
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.restride import copy_of
from fusescout.row_major import row_major
from fusescout.row_major import transposed
from fusescout.workload import Workload

FRAMES, WIDTH = 12, 16


class Encoder(nn.Module):
    """What a speech encoder begins with, and two of its layers."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(FRAMES, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.normed = normed

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(0, 2, 1) + self.positions
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return self.norms[0](x) if self.normed else x


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(FRAMES, FRAMES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        x = x + self.linear(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


SPEECH, PATCHES = torch.randn(2, 4, FRAMES), torch.randn(2, WIDTH, 3, 4)
MODELS = {
    "encoder": (lambda: Encoder(), SPEECH),
    "its stream is the output": (lambda: Encoder(normed=False), SPEECH),
    "mixer": (Mixer, PATCHES),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_strides_outside_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, x = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        expected = model(x)
    (graph,) = capture(Workload(model, (x,))).graphs
    assert transposed(graph.module)
    module = copy_of(graph.module)
    assert row_major(module) == ""
    assert not transposed(module)
    hoisted = hoist(module)
    with torch.no_grad():
        (got,) = (module if hoisted is None else hoisted.bind(module))(*graph.inputs)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)


def test_only_the_stream_is_copied() -> None:
    torch._dynamo.reset()
    (graph,) = capture(Workload(Encoder().eval(), (SPEECH,))).graphs
    module = copy_of(graph.module)
    row_major(module)
    assert sum("clone" in str(n.target) for n in module.graph.nodes) == 1


@pytest.mark.parametrize("shown", [lambda x: (x.reshape(2, -1), x.contiguous()), lambda x: (x, x.mT)])
def test_outputs_that_would_share_memory_otherwise_keep_the_layout(shown: Callable[[Tensor], object]) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> object:
            return shown(x.transpose(1, 2) * 2)

    torch._dynamo.reset()
    (graph,) = capture(Workload(Two().eval(), (SPEECH,))).graphs
    assert "share memory" in row_major(copy_of(graph.module))


def test_row_major_pointwise_operators_leave_a_graph_alone() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).eval()
    (graph,) = capture(Workload(model, (torch.randn(3, WIDTH),))).graphs
    assert "row-major" in row_major(copy_of(graph.module))


def test_it_is_chosen_by_measuring_and_carried_out_by_the_patch() -> None:
    """Ten layers over a transposed stream of 2 MB, whose norms would each copy it."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(768)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(1, 2) * 2
            for _ in range(10):
                x = x + self.norm(x)
            return self.norm(x)

    torch._dynamo.reset()
    model, x = Deep().eval(), torch.randn(2, 768, 384)
    workload = Workload(model, (x,))
    found = choose(workload, capture(workload), lambda index, name: 1.0, 20.0)
    assert found.memory_format == "row_major", found.note
    assert "row-major the eager graphs are" in found.note
    plan = Plan(
        target="model", mode="inference", device_kind="cpu", device_name=describe_device("cpu").name,
        torch=torch.__version__, memory_format="row_major",
    )  # fmt: skip
    with torch.no_grad():
        expected = model(x)
        handle = patch(model, plan)
        torch.testing.assert_close(model(x), expected)
    assert (handle.counters.relaid, handle.counters.described) == (1, "0 sites, pointwise operators row-major")
    handle.undo()
