"""Channels-last as a rewrite of a captured graph: same values, eager's strides outside, nothing where it can't be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusescout.capture import capture
from fusescout.hoisting import hoist
from fusescout.layout import choose
from fusescout.memory_format import channels_last
from fusescout.patching import patch
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.restride import copy_of
from fusescout.workload import Workload


class Net(nn.Module):
    """A convolution and what `tail` makes of its result."""

    def __init__(self, tail: Callable[[torch.Tensor], object], conv: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = conv or nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.tail = tail

    def forward(self, x: torch.Tensor) -> object:
        return self.tail(torch.relu_(self.norm(self.conv(x))))


TAILS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda y: y,
    "view": lambda y: y.view(y.shape[0], -1),
    "flatten": lambda y: y.flatten(1),
    "rows": lambda y: y.flatten(2).transpose(1, 2),
    "permuted": lambda y: y.permute(0, 2, 3, 1),
    "pooled": lambda y: F.adaptive_avg_pool2d(F.max_pool2d(y, 3, 2, 1), 1).flatten(1),
    "unfolded": lambda y: F.unfold(y, 3),
    "shuffled": lambda y: F.pixel_shuffle(y, 2),
    "joined": lambda y: torch.cat([y, F.interpolate(y, scale_factor=2)[:, :, ::2, ::2]], 1),
    "two": lambda y: (y.mean((2, 3)), {"map": y * 2}),
    "group norm": lambda y: F.group_norm(y, 4),
    "split": lambda y: y.chunk(2, 1)[0].contiguous().view(y.shape[0], 4, -1),
    "attention": lambda y: F.scaled_dot_product_attention(*(y.flatten(2).transpose(1, 2)[:, None],) * 3),
}


def leaves(value: object) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def same(got: object, expected: object) -> None:
    assert len(leaves(got)) == len(leaves(expected))
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", TAILS)
def test_values_and_strides_outside_are_eagers(tail: str) -> None:
    torch.manual_seed(0)
    model, x = Net(TAILS[tail]).eval(), torch.randn(2, 3, 8, 6)
    with torch.no_grad():
        expected = model(x)
    (graph,) = capture(Workload(model, (x,))).graphs
    module = copy_of(graph.module)
    assert channels_last(module) == ""
    convolution = next(n for n in module.graph.nodes if "conv2d" in str(n.target))
    assert convolution.meta["val"].is_contiguous(memory_format=torch.channels_last)
    hoisted = hoist(module)
    assert hoisted is not None
    with torch.no_grad():
        same(hoisted.bind(module)(*graph.inputs), leaves(expected))
        assert [t.stride() for t in leaves(graph.module(*graph.inputs))] == [t.stride() for t in leaves(expected)]


def test_fake_strides_are_the_real_ones() -> None:
    """Keys of chains hold strides, so what the pass foresees must be what runs."""
    model, x = Net(TAILS["pooled"], nn.Conv2d(3, 8, 3, groups=1)).eval(), torch.randn(2, 3, 9, 9)
    (graph,) = capture(Workload(model, (x,))).graphs
    module = copy_of(graph.module)
    channels_last(module)

    class Strides(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            out = super().run_node(n)
            if isinstance(out, torch.Tensor) and out.numel() and n.op == "call_function":
                real = [s for s, k in zip(out.stride(), out.shape, strict=True) if k > 1]
                seen = [s for s, k in zip(n.meta["val"].stride(), out.shape, strict=True) if k > 1]
                assert real == seen, n.name
            return out

    with torch.no_grad():
        Strides(module).run(*graph.inputs)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.conv(x)


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], str, str]] = {
    "no convolution": (nn.Linear(4, 4), (2, 4), "inference", "no 2-D or 3-D convolution"),
    "training": (nn.Conv2d(3, 8, 3), (1, 3, 5, 5), "training", "gradients"),
    "as_strided": (Net(lambda y: y.as_strided((2, 2), (1, 2))), (1, 3, 5, 5), "inference", "as_strided"),
    "write": (Counting(), (1, 3, 5, 5), "inference", "writes"),
    "gaps": (Net(lambda y: y[:, :, ::2, ::2]), (1, 3, 8, 8), "inference", "gaps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_graphs_stay_as_they_are(case: str) -> None:
    model, shape, mode, reason = REFUSED[case]
    (graph,) = capture(Workload(model.train(mode == "training"), (torch.randn(shape),), mode=mode)).graphs
    before = str(graph.module.graph)
    assert reason in channels_last(graph.module)
    assert str(graph.module.graph) == before


def layout_plan() -> Plan:
    device = describe_device("cpu")
    return Plan(
        target="t", mode="inference", device_kind="cpu", device_name=device.name, torch=torch.__version__,
        memory_format="channels_last",
    )  # fmt: skip


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_a_plan_of_nothing_but_the_layout_is_carried_out_and_undone(composition: str) -> None:
    torch._dynamo.reset()
    model, x = Net(TAILS["two"]).eval(), torch.randn(2, 3, 8, 6)
    plan = layout_plan()
    assert not plan.is_empty
    assert plan.emptied().is_empty
    handle = patch(model, plan, composition=composition)  # type: ignore[arg-type]
    with torch.no_grad():
        got = model(x)
        assert (handle.counters.relaid, handle.counters.sites) == (1, 0)
        model.conv.weight.mul_(2)
        again = model(x)
        handle.undo()
        same(again, model(x))
        model.conv.weight.mul_(0.5)
        same(got, model(x))
    assert model.conv.weight.is_contiguous()


def test_a_graph_that_refuses_runs_as_it_is_and_says_why() -> None:
    torch._dynamo.reset()
    model, x = Net(lambda y: y.as_strided((2, 2), (1, 2))).eval(), torch.randn(2, 3, 8, 6)
    handle = patch(model, layout_plan())
    with torch.no_grad():
        got = model(x)
        handle.undo()
        same(got, model(x))
    assert any("as_strided" in why for why in handle.counters.fallbacks.values())


def test_the_layout_is_only_tried_where_convolutions_matter() -> None:
    model, x = Net(TAILS["pooled"]).eval(), torch.randn(2, 3, 16, 16)
    workload = Workload(model, (x,))
    captured = capture(workload)
    little = choose(workload, captured, lambda _, name: 1.0 if "conv" in name else 0.0, 100.0)
    assert (little.memory_format, little.note, little.capture) == ("preserved", "", captured)
    tried = choose(workload, captured, lambda _, name: 90.0 if "conv" in name else 0.0, 100.0)
    assert "90%" in tried.note
    names = {n.name for n in captured.graphs[0].graph.nodes}
    assert names <= {n.name for n in tried.capture.graphs[0].graph.nodes}, "profiled times are found by node name"
