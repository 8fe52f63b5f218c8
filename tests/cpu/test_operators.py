"""A fused operator and the call path behind it: what reaches a kernel, what is refused, what skips the checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patched_models import fresh_outputs
from patched_models import plan_of
from template_cases import trace
from torch import Tensor
from torch import nn

from fusescout import operators
from fusescout.contenders import binding
from fusescout.contenders.binding import bind
from fusescout.contenders.binding import straight
from fusescout.device import Device
from fusescout.errors import OperatorMisused
from fusescout.ir import Subgraph
from fusescout.patching import patch
from fusescout.template import Kernel
from fusescout.template import Param

CPU = Device("cpu", "test", "x86", 1)
X, Y = torch.randn(4, 6), torch.randn(4, 6)


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, torch.relu(total)


def traced(*inputs: Tensor) -> Subgraph:
    return trace(chain, inputs)[0]


class Spy:
    """Runs the chain and keeps what reached it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, ...]] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(inputs)
        return chain(*inputs)


def defined(name: str, graph: Subgraph) -> tuple[Spy, object]:
    spy = Spy()
    return spy, operators.define(name, graph, lambda inputs: spy(*inputs), "cpu", spy)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, torch.randn(4, 5)),
        (1, torch.randn(6, 4)),
        (0, torch.randn(4, 6, 1)),
        (1, torch.randn(24)),
        (0, X.double()),
        (1, X.to(torch.int32)),
        (0, torch.empty(0, 6)),
    ],
)
def test_what_a_kernel_is_not_built_for_never_reaches_it(place: int, wrong: Tensor) -> None:
    spy, operator = defined("refusing", traced(X, Y))
    given = [X, Y]
    given[place] = wrong
    with pytest.raises(OperatorMisused, match=f"argument {place}"):
        operator(*given)
    assert spy.seen == []


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), wanted=st.booleans(), given_=st.booleans())
def test_a_kernel_gets_the_strides_it_was_built_for(rows: int, columns: int, wanted: bool, given_: bool) -> None:
    def made(transposed: bool) -> Tensor:
        return torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)

    x, y = made(wanted), made(wanted)
    graph = traced(x, y)
    spy, operator = defined(f"restrided_{rows}_{columns}_{wanted}", graph)
    a, b = made(given_), made(wanted)
    total, positive = operator(a, b)
    assert torch.equal(total, a + b)
    assert torch.equal(positive, torch.relu(a + b))
    (reached,) = spy.seen
    for tensor, spec in zip(reached, graph.inputs, strict=True):
        assert all(n == 1 or old == new for n, old, new in zip(spec.shape, tensor.stride(), spec.stride, strict=True))


def test_an_expanded_tensor_stands_only_for_one_that_was_expanded() -> None:
    row = torch.randn(1, 6)
    spy, operator = defined("expanded", traced(X, row.expand(4, 6)))
    assert torch.equal(operator(X, row.expand(4, 6))[0], X + row)
    with pytest.raises(OperatorMisused):
        operator(X, X)
    assert len(spy.seen) == 1


def test_a_function_is_called_directly_only_where_no_gradient_can_be_asked() -> None:
    spy, operator = defined("inference_chain", traced(X, Y))
    assert operators.direct(operator) is spy
    assert operators.direct(torch.ops.aten.relu.default) is None
    wanted, _ = trace(lambda x, y: x * y, (X.clone().requires_grad_(), X))
    if not wanted.output_specs[0].requires_grad:  # traced without gradients: say that they are wanted
        wanted = Subgraph(wanted.inputs, tuple(_differentiable(op) for op in wanted.ops), wanted.outputs)
    operator = operators.define("training_chain", wanted, lambda inputs: (inputs[0] * inputs[1],), "cpu")
    assert operators.direct(operator) is None


def _differentiable(op: object) -> object:
    from dataclasses import replace

    return replace(op, out=replace(op.out, requires_grad=True))  # type: ignore[attr-defined, type-var]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.relu(self.fc(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "through"), [("inference", False), ("training", True)])
def test_a_patched_model_goes_through_torchs_dispatcher_only_for_gradients(
    mode: str, through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = Net().train(mode == "training")
    plan = plan_of(model, X, mode=mode)
    calls = []
    fitted = operators._checked

    def counting(name: str, graph: Subgraph) -> operators.Call:
        inner = fitted(name, graph)
        return lambda *inputs: (calls.append(name), inner(*inputs))[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(operators, "_checked", counting)
    monkeypatch.setattr("fusescout.patching.operator_name", lambda e, m=mode: f"counted_{m}_{e.key[:12]}")
    with fresh_outputs(), torch.set_grad_enabled(mode == "training"):
        expected = model(X)
        with patch(model, plan) as handle:
            assert torch.equal(model(X), expected)
        assert handle.counters.sites > 0
    assert bool(calls) is through


def params(*shapes: tuple[int, ...]) -> tuple[Param, ...]:
    strides = [tuple(torch.empty(s).stride()) for s in shapes]
    roles = [("x", "input", 0), ("y", "input", 1), ("s", "scratch", 0), ("p", "output", 1), ("o", "output", 0)]
    return tuple(
        Param(name=name, role=role, index=index, shape=shape, dtype="float32", stride=stride)
        for (name, role, index), shape, stride in zip(roles, shapes, strides, strict=True)
    )


def test_every_parameter_gets_its_tensor_and_outputs_come_in_the_sub_graphs_order() -> None:
    graph = traced(X, Y)
    kernel = Kernel(func=None, params=params((4, 6), (4, 6), (3,), (4, 6), (4, 6)), source="")

    def launch(x: Tensor, y: Tensor, scratch: Tensor, positive: Tensor, total: Tensor) -> None:
        assert scratch.shape == (3,)
        total.copy_(x + y)
        positive.copy_(torch.relu(x + y))

    y = torch.randn(4, 6)
    for got in (straight(graph, kernel, launch, CPU)(X, y), bind(graph, kernel, launch, CPU)([X, y])):
        assert torch.equal(got[0], X + y)
        assert torch.equal(got[1], torch.relu(X + y))
        assert all(t.stride() == s.stride for t, s in zip(got, graph.output_specs, strict=True))
    first, second = straight(graph, kernel, launch, CPU)(X, y), straight(graph, kernel, launch, CPU)(X, y)
    assert first[0].data_ptr() != second[0].data_ptr()


def test_on_a_gpu_parameters_are_seen_in_their_own_shape_and_addresses_are_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding, "_empty", lambda kind: lambda *spec: torch.empty_strided(*spec[:2], dtype=spec[2]))
    graph = traced(X, Y)
    kernel = Kernel(func=None, params=params((24,), (2, 12), (3,), (4, 6), (24,)), source="")
    seen = []

    def launch(*tensors: Tensor) -> None:
        seen.append(tensors)
        tensors[4].copy_((X + Y).flatten())

    odd = torch.empty(25)[1:].view(4, 6).copy_(X)  # four bytes behind an aligned address
    assert odd.data_ptr() % 16 == 4
    total, _ = straight(graph, kernel, launch, Device("cuda", "test", "sm_90a", 1))(odd, Y)
    (x, y, _, positive, flat) = seen[0]
    assert (x.shape, y.shape, positive.shape, flat.shape) == ((24,), (2, 12), (4, 6), (24,))
    assert torch.equal(x, X.flatten())
    assert x.data_ptr() % 16 == 0
    assert y.data_ptr() == Y.data_ptr()
    assert flat.data_ptr() == total.data_ptr()
    assert torch.equal(total, X + Y)
