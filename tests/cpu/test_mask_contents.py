"""Causal masks that a model keeps in a buffer: what is known of them, what rests on it, and what when they change."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from fusescout.templates.attention_problem import read
from patched_models import plan_of
from patched_models import same
from patched_models import step
from torch import Tensor
from torch import nn
from torch.nn import functional as F

from fusescout.capture import capture
from fusescout.capture.activations import record
from fusescout.causal import without_order
from fusescout.contenders.framework import Framework
from fusescout.contenders.tilelang import TileLang
from fusescout.ir import Subgraph
from fusescout.patching import OTHER_MASKS
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import Plan
from fusescout.precompute import precompute
from fusescout.probe import describe_device
from fusescout.reference import make_inputs_source
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import build

LONGEST, LENGTH, HEADS, WIDTH = 40, 32, 4, 8
MIN = torch.finfo(torch.float32).min
Mask = Callable[["Attend", Tensor, int], Tensor]


class Attend(nn.Module):
    """minGPT's attention; `fill` hides scores by the buffer `bias`."""

    def __init__(self, fill: Mask, kept: Tensor) -> None:
        super().__init__()
        self.fill = fill
        self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.register_buffer("bias", kept)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, HEADS, WIDTH).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        scores = self.fill(self, (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(WIDTH)), length)
        y = F.dropout(F.softmax(scores, dim=-1), 0.1, training=False) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


def triangle() -> Tensor:
    return torch.ones(LONGEST, LONGEST).tril().view(1, 1, LONGEST, LONGEST)


def equals_zero(m: Attend, scores: Tensor, n: int) -> Tensor:
    return scores.masked_fill(m.bias[:, :, :n, :n] == 0, float("-inf"))


def window() -> Tensor:
    at = torch.arange(LONGEST)
    return (at[:, None] >= at) & (at[:, None] - at < 5)


RECOGNISED: dict[str, tuple[Mask, Tensor]] = {
    "minGPT": (equals_zero, triangle()),
    "a boolean view": (lambda m, s, n: s.masked_fill(m.bias[:n, :n], -1e9), torch.ones(LONGEST, LONGEST).triu(1) > 0),
    "where": (lambda m, s, n: torch.where(m.bias[:n, :n], s, MIN), triangle()[0, 0] > 0),
    "where of a tensor": (
        lambda m, s, n: torch.where(m.bias[:, :, :n, :n], s, torch.full([], MIN, dtype=s.dtype)), triangle() > 0,
    ),
    "made of numbers": (
        lambda m, s, n: s.masked_fill(torch.ones(n, n).tril() == 0, float("-inf")), torch.ones(1),
    ),
}  # fmt: skip
LEFT: dict[str, tuple[Mask, Tensor]] = {
    "a window": (lambda m, s, n: s.masked_fill(~m.bias[:n, :n], float("-inf")), window()),
    "the diagonal hidden too": (
        lambda m, s, n: s.masked_fill(m.bias[:n, :n], float("-inf")), torch.ones(LONGEST, LONGEST).triu(0) > 0,
    ),
    "the past hidden": (lambda m, s, n: s.masked_fill(m.bias[:n, :n], float("-inf")), triangle()[0, 0] > 0),
    "not hidden enough": (lambda m, s, n: s.masked_fill(m.bias[:, :, :n, :n] == 0, -100.0), triangle()),
    "read backwards": (
        lambda m, s, n: s.transpose(-1, -2).masked_fill(m.bias[:, :, :n, :n] == 0, float("-inf")).transpose(-1, -2),
        triangle(),
    ),
    "scaled behind": (lambda m, s, n: equals_zero(m, s, n) * 0.5, triangle()),
    "written to in each call": (lambda m, s, n: (m.bias.mul_(1), equals_zero(m, s, n))[1], triangle()),
}  # fmt: skip
X = torch.randn(4, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(0))
CALL = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def chain(model: nn.Module, x: Tensor) -> tuple[Subgraph, list[Tensor]]:
    """The attention without what moves its result, and its inputs."""
    (graph,) = precompute(capture(build(model, (x,))))[0].graphs
    region = next(r for r in find_regions(graph.graph) if r.family == "attention")
    subgraph, names = graph.graph.subgraph(region.nodes)
    values = record(graph, set(names))
    return subgraph, [values[n] for n in names]


def calls(subgraph: Subgraph) -> list[str]:
    found = Framework().variants(subgraph, describe_device("cpu"), "quick")
    return [] if isinstance(found, str) else found[0]["calls"]


def planned(model: nn.Module, x: Tensor, mode: str = "inference") -> Plan:
    """All written-out attention by the framework's own."""
    plan = plan_of(model.eval(), x, mode=mode, families=["attention"])
    entries = [
        e.model_copy(update={"contender": "framework", "variant": {"calls": [CALL]}})
        for e in plan.entries
        if calls(Subgraph.from_json(e.subgraph)) == [CALL]
    ]
    assert entries
    return plan.model_copy(update={"entries": entries, "computed_once": True})


@pytest.mark.parametrize("name", RECOGNISED)
def test_causal_order_in_a_buffer_is_read(name: str) -> None:
    subgraph, inputs = chain(Attend(*RECOGNISED[name]).eval(), X)
    assert calls(subgraph) == [CALL]
    contender = Framework().build(subgraph, {"calls": [CALL]}, describe_device("cpu"))
    assert ", None, 0.0, True" in contender.source
    level = "full" if name == "minGPT" else "quick"
    assert not Verifier(subgraph, inputs, "cpu").check(contender.run, level).reason


@pytest.mark.parametrize("name", LEFT)
def test_nothing_else_is_taken_for_it(name: str) -> None:
    (graph,) = precompute(capture(build(Attend(*LEFT[name]).eval(), (X,))))[0].graphs
    assert graph.graph.by_name["softmax"]
    for region in find_regions(graph.graph):
        subgraph, _ = graph.graph.subgraph(region.nodes)
        assert CALL not in calls(subgraph)
        assert not without_order(subgraph)[1]


class Layers(nn.Module):
    """Several attentions, each with a buffer of its own."""

    def __init__(self, *layers: Attend) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def minGPT(count: int = 2) -> Layers:
    return Layers(*(Attend(equals_zero, triangle()) for _ in range(count)))


def close(model: nn.Module, patched: nn.Module, x: Tensor = X) -> bool:
    with torch.no_grad():
        return torch.allclose(patched(x), model(x), atol=1e-5)


def test_a_mask_that_changes_is_heeded(composition: Composition = "eager") -> None:
    model = minGPT().eval()
    plain = copy.deepcopy(model)
    handle = patch(model, planned(model, X), composition=composition)
    counters = handle.counters

    def both(change: Callable[[nn.Module], object]) -> bool:
        with torch.no_grad():
            change(plain), change(model)
        return close(plain, model)

    assert both(lambda m: None)
    assert counters.sites == 2 and not counters.fallbacks and not counters.framework_calls
    assert both(lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())))
    assert not counters.fallbacks, "the same contents were written"
    assert both(lambda m: m.layers[1].bias.copy_(window().float()))
    assert list(counters.fallbacks.values()) == [OTHER_MASKS] and counters.framework_calls == 1
    assert both(lambda m: None) and counters.framework_calls == 2
    assert both(lambda m: m.layers[1].bias.copy_(triangle())) and counters.framework_calls == 2
    assert both(lambda m: setattr(m.layers[0], "bias", triangle() + 1)) and counters.framework_calls == 3
    assert both(lambda m: setattr(m.layers[0], "bias", triangle())) and counters.framework_calls == 3
    assert both(lambda m: m.layers[0].bias.data.fill_(1)) is False, "torch doesn't count that, as README says"
    handle.refresh()
    assert close(plain, model) and counters.framework_calls == 4
    handle.undo()


def test_a_mask_that_changed_before_the_plan_was_applied_is_heeded() -> None:
    model = minGPT(1).eval()
    plan = planned(model, X)
    with torch.no_grad():
        model.layers[0].bias.copy_(window().float())
    plain = copy.deepcopy(model)
    handle = patch(model, plan)
    assert close(plain, model)
    assert handle.counters.sites == 0
    assert OTHER_MASKS in handle.counters.fallbacks.values()
    handle.undo()


def test_gradients_and_other_lengths_pass_through() -> None:
    model = minGPT()
    plan = planned(model, X, "training")
    model.train()
    plain = copy.deepcopy(model)
    handle = patch(model, plan)
    same(
        step(plain, (X.clone().requires_grad_(),), {}, "training"),
        step(model, (X.clone().requires_grad_(),), {}, "training"),
        exact=False,
    )
    assert handle.counters.sites == 2
    assert close(plain, model, torch.randn(4, LENGTH + 3, HEADS * WIDTH))
    assert handle.counters.sites == 2
    handle.undo()


@pytest.mark.parametrize("name", ["minGPT", "where"])
def test_scripts_that_stand_alone_hold_the_order(name: str) -> None:
    subgraph, inputs = chain(Attend(*RECOGNISED[name]).eval(), X)
    scope: dict[str, object] = {"torch": torch}
    exec(make_inputs_source(subgraph), scope)
    made = scope["make_inputs"]("cpu")
    (place,) = [k for k, s in enumerate(subgraph.inputs) if s.content]
    assert torch.equal(made[place], inputs[place])
    assert made[place].stride() == inputs[place].stride()


def test_the_kernel_of_our_own_needs_no_mask() -> None:
    subgraph, inputs = chain(Attend(*RECOGNISED["minGPT"]).eval(), X)
    problem = read(subgraph)
    assert problem.causal and problem.plain and not problem.operands
    kernel = TileLang().build(subgraph, {"template": "attention", "schedule": "serial"}, describe_device("cpu"))
    assert not Verifier(subgraph, inputs, "cpu").check(kernel.run, "full").reason
