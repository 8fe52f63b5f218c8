"""What no input decides is computed once: what is kept, that it follows its sources, and what is left alone."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import patched_models
import pytest
import torch
from patched_models import fresh_outputs
from patched_models import plan_of
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fusescout import once
from fusescout.capture import capture
from fusescout.hoisting import Hoisted
from fusescout.nest import tensors
from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.plan import Plan
from fusescout.precompute import describe
from fusescout.precompute import precompute
from fusescout.workload import build

LENGTH, WIDTH = 6, 16
Forward = Callable[["Model", Tensor], Any]
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.linear, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Embedding(32, WIDTH)
        self.bias = nn.Embedding(4, 2)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("count", torch.ones(WIDTH))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def rotary(m: Model, x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None].float() * m.frequencies
    table = torch.cat((angles, angles), dim=-1)[None]
    half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
    return x * table.cos() + half * table.sin()


def relative_bias(m: Model, x: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    bias = m.bias((places[None] - places[:, None]).abs().clamp(max=3)).permute(2, 0, 1)[None]
    heads = x.view(2, LENGTH, 2, 8).transpose(1, 2)
    for _ in range(2):
        heads = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias.contiguous())
    return heads


def autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.again(F.gelu(m.linear(x))) + m.linear(x)


def shared_memory(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    table = (m.frequencies * 2).cos()
    return x + table.sum(), table, table.view(2, -1), m.count, torch.arange(4), m.count.to(torch.float64)


def window(m: Model, x: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    near = (places[:, None] - places[None]).abs() < 3
    return x.masked_fill(~near.any(-1)[:, None], 0.0) + x.new_zeros(WIDTH) + near.float().sum()


KEPT: dict[str, tuple[Forward, int]] = {
    "positions": (lambda m, x: x + m.positions(torch.arange(x.shape[1])), 1),
    "a rotary table": (rotary, 2),
    "a bias read twice": (relative_bias, 1),
    "weights that autocast casts": (autocast, 4),
    "a parametrised weight": (lambda m, x: m.normed(x), 1),
    "a mask of literals": (window, 2),
    "outputs": (shared_memory, 2),
    "nothing but literals": (lambda m, x: (torch.arange(9.0).cos() + 1).sum(), 1),
    "a slice of it has gaps": (lambda m, x: x[..., :4] + m.positions.weight.exp()[:LENGTH, 2:6], 1),
    "it is expanded": (lambda m, x: torch.cat((m.first.exp().expand(2, -1, -1), x), 1), 1),
}


def random_table(m: Model, x: Tensor) -> Tensor:
    return x * torch.randn(WIDTH).cos() + F.dropout(m.frequencies, 0.5, training=True).sum()


def written_through_a_view(m: Model, x: Tensor) -> Tensor:
    table = torch.zeros(WIDTH).cos()
    table.view(2, -1)[0].mul_(x.mean())
    return x + table


def written_buffer(m: Model, x: Tensor) -> Tensor:
    before = m.count.cos()
    m.count.add_(1)
    return x * m.count.sin() + before


def written_through_a_broadcast(m: Model, x: Tensor) -> Tensor:
    (rows,) = torch.meshgrid(torch.zeros(4).exp(), indexing="ij")
    rows[1:].copy_(x[0, 0, 1:4])
    return x.sum() + rows


def decided_by_input(m: Model, x: Tensor) -> Tensor:
    return x + (x[0, 0].argsort() * 2).cos()


LEFT: dict[str, Forward] = {
    "random numbers": random_table,
    "written through a view": written_through_a_view,
    "written through an operator that declares no view": written_through_a_broadcast,
    "a buffer that is written": written_buffer,
    "decided by the input": decided_by_input,
    "expanded": lambda m, x: torch.cat((m.first.expand(2, -1, -1), x), 1) + torch.zeros(WIDTH),
}


def applied(model: nn.Module, *args: Any, composition: Any = None, mode: str = "inference") -> Patched:
    plan = plan_of(model, *args, mode=mode).model_copy(update={"entries": [], "computed_once": True})
    assert not plan.is_empty
    return patch(model, plan, composition=composition)


def unpatched(model: nn.Module, *args: Any) -> Any:
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = None
    return twin(*args)


def check(model: nn.Module, *args: Any, exact: bool = True) -> Any:
    """The patched model gives what the model itself would, from the same random state and buffers."""
    torch.manual_seed(7)
    expected = unpatched(model, *args)
    torch.manual_seed(7)
    got = model(*args)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(got, expected, **tolerance, check_stride=True)
    return got


def values(handle: Patched) -> list[Tensor]:
    return [v for lot in handle._backend.hoisted for v in lot.held()]


@pytest.mark.parametrize("name", KEPT)
def test_what_no_input_decides_is_made_once_and_follows_its_sources(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, kept = KEPT[name]
    model, made = Model(forward).eval(), []
    refresh = Hoisted._refresh
    monkeypatch.setattr(Hoisted, "_refresh", lambda self, sources: made.append(self) or refresh(self, sources))
    with torch.no_grad(), applied(model, X) as handle:
        for _ in range(2):
            for result in tensors(check(model, X)):
                result.zero_()  # whatever the caller does to what it gets
        assert handle.counters.computed_once
        addresses = [v.data_ptr() for v in values(handle)]
        assert (len(addresses), len(made)) == (kept, len(handle._backend.hoisted)), handle.counters.fallbacks
        for change in range(3):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(1.5) if change != 1 else tensor.copy_(tensor + 0.25)
            check(model, X)
        assert [v.data_ptr() for v in values(handle)] == addresses
        model.load_state_dict(Model(forward).state_dict())
        check(model, X)
        model.positions.weight = nn.Parameter(model.positions.weight.detach() * 2)
        model.bias.weight.data = model.bias.weight.data * 2
        model.linear.weight.data.mul_(2)
        handle.refresh()
        check(model, X)
    check(model, X)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("name", LEFT)
def test_everything_else_is_made_in_every_call(name: str) -> None:
    model = Model(LEFT[name]).eval()
    with torch.no_grad(), applied(model, X) as handle:
        for k in range(3):
            check(model, X + k)
    assert values(handle) == []


def test_the_caller_gets_no_kept_value() -> None:
    model = Model(lambda m, x: (lambda t: (x + t, t, t.view(2, -1)))((m.frequencies.repeat(2) * 2).cos())).eval()
    with torch.no_grad(), applied(model, X) as handle:
        _, table, view = check(model, X)
        assert len(values(handle)) == 1
        table.zero_()
        assert not view.any(), "the two shared memory in eager"
        check(model, X)


def test_a_value_larger_than_its_sources_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: x + m.first.expand(2, LENGTH, -1).contiguous() + m.positions.weight[:1].cos()).eval()
    monkeypatch.setattr(once, "MARGIN_BYTES", 2 * LENGTH * WIDTH * 4 - 1)
    with torch.no_grad(), applied(model, X) as handle:
        check(model, X)
        assert [v.numel() for v in values(handle)] == [WIDTH]


def test_other_shapes_share_what_does_not_depend_on_them() -> None:
    model = Model(lambda m, x: m.normed(x) + m.positions(torch.arange(x.shape[1]))).eval()
    with torch.no_grad(), applied(model, X) as handle:
        for length in (LENGTH, 3, LENGTH):
            check(model, X[:, :length])
    assert handle.counters.captures == 2
    assert len({v.data_ptr() for v in values(handle)}) == 1 + 2


def test_casts_follow_the_graph_not_what_autocast_is_in_force() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(float(LENGTH))[:, None] @ m.frequencies[None]
        return m.linear(x) + torch.cat((angles, angles), -1).cos()

    model = Model(forward).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), applied(model, X) as handle:
        check(model, X)
        assert len(values(handle)) == 3


def test_layers_that_share_a_graph_keep_a_set_each() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x * self.scale.exp()

    model = Model(lambda m, x: m.layers(x)).eval()
    model.layers = nn.Sequential(*(Layer() for _ in range(3)))
    with torch.no_grad(), applied(model, X) as handle:
        check(model, X)
        addresses = [v.data_ptr() for v in values(handle)]
        check(model, X)
        assert [v.data_ptr() for v in values(handle)] == addresses
        assert len(set(addresses)) == 3
        model.layers[1] = Layer()
        gc.collect()
        check(model, X)
        assert len({v.data_ptr() for v in values(handle)}) == 3


def test_in_training_nothing_is_kept_that_a_gradient_goes_through() -> None:
    model = Model(lambda m, x: rotary(m, m.linear(x)) + m.positions(torch.arange(LENGTH))).train()
    expected = torch.autograd.grad(model(X).pow(2).sum(), model.linear.weight)
    with applied(model, X, mode="training") as handle:
        loss = check(model, X).pow(2).sum()
        model.frequencies.mul_(2)
        check(model, X)  # makes another table while the first backward pass is still to come
        assert {tuple(v.shape) for v in values(handle)} == {(LENGTH,), (1, LENGTH, WIDTH)}
        torch.testing.assert_close(torch.autograd.grad(loss, model.linear.weight), expected)


def test_inductor_takes_kept_values_as_inputs() -> None:
    model = Model(lambda m, x: (rotary(m, m.normed(x)), (m.frequencies * 2).cos(), torch.arange(9.0).cos() + 1)).eval()
    with torch.no_grad(), applied(model, X, composition="inductor") as handle:
        for _ in range(2):
            check(model, X, exact=False)[1].zero_()
            model.normed.parametrizations.weight.original0.mul_(2)
            model.frequencies.mul_(2)
        assert len(values(handle)) == 5
        assert not handle.counters.fallbacks


def test_what_nobody_reads_and_repeated_casts_are_left_out() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        m.linear(x).mean()
        return x.to(torch.bfloat16) @ m.count.to(torch.bfloat16) + x.to(torch.bfloat16).sum()

    model = Model(forward).eval()
    found, done = precompute(capture(build(model, (X,))))
    (graph,) = found.graphs
    targets = [n.op for n in graph.graph.nodes if n.is_op]
    assert targets.count("to") == 1
    assert "linear" not in targets
    assert done[0].operators == 4
    assert "4 operators" in describe(done)
    assert torch.equal(graph.module(*graph.inputs)[0], model(X))
    assert [n.is_parameter for n in graph.graph.nodes if n.name.startswith("made")] == [True]


def test_a_copy_is_left_out_unless_somebody_writes_or_gets_it() -> None:
    def written(m: Model, x: Tensor) -> Tensor:
        kept, y = x.clone(), m.linear(x)
        y.unbind(1)[0].zero_()
        kept.select(1, 0).mul_(2)
        return kept + y

    def wanted(m: Model, x: Tensor) -> tuple[Tensor, ...]:
        y = m.linear(x)
        return y.clone(), y.transpose(1, 2).clone(), y[1:].clone().exp()

    cases: list[tuple[Forward, int]] = [
        (lambda m, x: m.linear((y := x.clone().detach()).view(-1, WIDTH)).view_as(y) + y, 0),
        (written, 1),
        (wanted, 3),
    ]
    for forward, copies in cases:
        model = Model(forward).eval()
        with torch.no_grad():
            (graph,) = precompute(capture(build(model, (X,))))[0].graphs
            assert [n.op for n in graph.graph.nodes].count("clone") == copies
            for _ in range(2):
                for made, true in zip(tensors(graph.module(*graph.inputs)), tensors(model(X)), strict=True):
                    assert torch.equal(made, true)
            with applied(model, X) as handle:
                check(model, X)
            assert handle.counters.computed_once == (copies == 0)


def test_reductions_of_one_element_are_left_out() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        total = m.linear(x).sum(-1, keepdim=True).clamp(-1, 1)
        most = total.max(-1, keepdim=True)[0].mean(-1, True)
        return most.logsumexp(-1, True).logsumexp(-1, True)

    def needed(m: Model, x: Tensor) -> tuple[Tensor, ...]:
        total = x.sum(-1, keepdim=True)
        return total, total.logsumexp(-1, True), total.max(-1, True)[1], total.sum(-1), total.view(2, -1).amax(-1, True)

    kept = ["sum", "logsumexp", "max", "getitem", "getitem", "sum", "view", "amax"]
    for function, operators in ((forward, ["linear", "sum", "clamp"]), (needed, kept)):
        model = Model(function).eval()
        with torch.no_grad():
            (graph,) = precompute(capture(build(model, (X,))))[0].graphs
            assert [n.op for n in graph.graph.nodes if n.is_op] == operators
            for special in (1.0, torch.inf, -torch.inf, torch.nan):
                x = X.clone()
                x[0, 0] = special
                given = [x if value.shape == x.shape else value for value in graph.inputs]
                made, true = tensors(graph.module(*given)), tensors(model(x))
                assert all(map(lambda a, b: torch.equal(a.nan_to_num(9), b.nan_to_num(9)), made, true))
            with applied(model, X):
                check(model, X)


def test_chains_are_found_where_the_analysis_found_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: rotary(m, F.gelu(m.normed(x)) * m.frequencies.exp().sum())).eval()
    monkeypatch.setattr(patched_models, "capture", lambda workload: precompute(capture(workload))[0])
    plan = plan_of(model, X).model_copy(update={"computed_once": True})
    with torch.no_grad(), fresh_outputs(), patch(model, plan) as handle:
        check(model, X)
        model.frequencies.mul_(2)
        check(model, X)
        assert plan.entries[0].id in handle.counters.replaced
        assert len(values(handle)) == 4


def test_a_plan_says_it() -> None:
    plan = plan_of(Model(rotary).eval(), X).model_copy(update={"entries": []})
    assert plan.is_empty
    carried = plan.model_copy(update={"computed_once": True})
    assert not carried.is_empty
    assert carried.emptied() == plan
    assert Plan.model_validate_json(carried.model_dump_json()) == carried
