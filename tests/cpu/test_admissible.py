"""Errors that the framework may make though eager happens not to: TF32 where it is allowed, and fewer roundings."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import ON_CPU
from row_cases import ROWS
from template_cases import ROWWISE
from template_cases import SHARED
from template_cases import Case
from torch import Tensor
from torch import nn

from fusescout import modelcheck
from fusescout import numerics
from fusescout import verify
from fusescout.admissible import CutToTF32
from fusescout.admissible import Evaluation
from fusescout.admissible import cut
from fusescout.admissible import evaluations
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.modelcheck import ModelJudge
from fusescout.mutants import ACCEPTED
from fusescout.mutants import REJECTED
from fusescout.mutants import self_test
from fusescout.reference import UNROUNDED
from fusescout.reference import build
from fusescout.verify import Verifier
from fusescout.workload import Workload

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
Settings = Callable[..., None]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Sets what the user allows on a device that has TF32, and puts it back."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    def allow(convolutions: bool = True, matmul: str = "highest") -> None:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(matmul)

    monkeypatch.setattr(numerics, "has_tf32", lambda device: True)
    yield allow
    allow(*before)


def spec(*shape: int, dtype: str, **more: Any) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape).stride(), **more)


def conv_chain(
    dtype: str, *tail: tuple[str, tuple[Any, ...]], n: int = 2, size: int = 14, pad: int = 0, **more: Any
) -> Subgraph:
    """A convolution of 8 channels to 16 with bias, and operators that keep its shape."""
    x, w, b = spec(n, 8, size, size, dtype=dtype, **more), spec(16, 8, 3, 3, dtype=dtype), spec(16, dtype=dtype)
    out = spec(n, 16, size - 2 + 2 * pad, size - 2 + 2 * pad, dtype=dtype)
    ops = [Op("aten.conv2d.default", (Ref(0), Ref(1), Ref(2), (1, 1), (pad, pad)), (), out)]
    for target, args in tail:
        ops.append(Op(target, (Ref(2 + len(ops)), *args), (), out))
    return Subgraph((x, replace(w, constant=True), replace(b, constant=True)), tuple(ops), (2 + len(ops),))


SIGMOID = (("aten.mul.Tensor", (0.5,)), ("aten.sigmoid.default", ()))
NORM = (("aten.relu.default", ()), ("aten.group_norm.default", (4, None, None, 1e-5)))
KINK = (("aten.sub.Tensor", (0.5,)), ("aten.hardswish.default", ()))


def linear_gelu(dtype: str) -> Subgraph:
    x, w, b, out = (spec(*s, dtype=dtype) for s in ((32, 768), (64, 768), (64,), (32, 64)))
    linear = Op("aten.linear.default", (Ref(0), Ref(1), Ref(2)), (), out)
    return Subgraph((x, w, b), (linear, Op("aten.gelu.default", (Ref(3),), (), out)), (4,))


def nearest(t: Tensor) -> Tensor:
    """The nearest numbers in TF32, as some kernels round them."""
    return ((t.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def in_tf32(tail: Callable[[Tensor], Tensor], to_tf32: Callable[[Tensor], Tensor] = cut) -> Run:
    """A convolution in TF32 that sums in another order, and what follows."""

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, w, b = inputs
        x, w = to_tf32(x), to_tf32(w)
        parts = [F.conv2d(x[:, k : k + 4], w[:, k : k + 4]) for k in (0, 4)]
        return (tail(parts[0] + parts[1] + b.view(-1, 1, 1)),)

    return run


@pytest.mark.parametrize(
    ("tail", "same"),
    [(SIGMOID, lambda y: torch.sigmoid(y * 0.5)), (NORM, lambda y: F.group_norm(y.relu(), 4))],
    ids=["sigmoid", "norm"],
)
@pytest.mark.parametrize("to_tf32", [cut, nearest])
def test_convolutions_may_be_in_tf32_exactly_where_that_is_allowed(
    tail: Any, same: Any, to_tf32: Any, settings: Settings
) -> None:
    graph, run = conv_chain("float32", *tail), in_tf32(same, to_tf32)
    settings(True)
    outcome = Verifier(graph, None, "cpu").check(run, "full")
    assert (outcome.reason, outcome.stats.against) == ("", "TF32")
    assert "torch.backends.cudnn.allow_tf32" in outcome.stats.measure
    settings(False, "high")
    outcome = Verifier(graph, None, "cpu").check(run, "full")
    assert "an error of" in outcome.reason and outcome.stats.worst > 100


def test_products_may_be_in_tf32_exactly_where_that_is_allowed(settings: Settings) -> None:
    graph = linear_gelu("float32")
    run = lambda i: (F.gelu(F.linear(nearest(i[0]), nearest(i[1]), i[2])),)  # noqa: E731
    settings(False, "high")
    assert Verifier(graph, None, "cpu").check(run, "full").stats.against == "TF32"
    settings(True, "highest")
    assert "an error of" in Verifier(graph, None, "cpu").check(run, "full").reason


def test_a_device_without_tf32_computes_none() -> None:
    assert torch.backends.cudnn.allow_tf32
    assert numerics.tf32_kinds("cpu") == frozenset()
    assert evaluations(conv_chain("float32", *SIGMOID), "cpu") == ()


def cuda_eager(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`KINK` as eager runs it on a GPU: the bias is added by another kernel, which rounds once more."""
    x, w, b = inputs
    return (F.hardswish((F.conv2d(x, w) + b.view(-1, 1, 1)) - 0.5),)


def fused(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`KINK` with the convolution's result rounded and nothing else."""
    x, w, b = inputs
    return (F.hardswish(F.conv2d(x, w).float() + b.float().view(-1, 1, 1) - 0.5).to(x.dtype),)


def at_the_kink() -> list[Tensor]:
    """Inputs of `KINK` whose sums lie around -2.5, and a bias that is lost in rounding them."""
    normal = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(0))  # noqa: E731
    x, w = 1 + 0.1 * normal(12, 8, 16, 16), -2.5 / 72 * (1 + 0.1 * normal(16, 8, 3, 3))
    return [x.bfloat16(), w.bfloat16(), torch.full((16,), 2.0**-8).bfloat16()]


def test_rounding_less_than_eager_is_no_fault() -> None:
    graph, inputs = conv_chain("bfloat16", *KINK, n=12, size=16), at_the_kink()
    dropped = lambda i: cuda_eager([i[0], i[1], torch.zeros_like(i[2])])  # noqa: E731
    verifier = Verifier(graph, inputs, "cpu")
    verifier.eager = cuda_eager
    outcome = verifier.check(fused, "quick")
    assert (outcome.reason, outcome.stats.against) == ("", "unrounded")
    assert verifier.check(cuda_eager, "quick").stats.against == "eager"
    assert verifier.check(dropped, "quick").reason
    alone = Verifier(graph, inputs, "cpu")
    alone.eager, alone.evaluations = cuda_eager, ()
    assert "an error of" in alone.check(fused, "quick").reason


@pytest.mark.parametrize("jump", ["floor", "ge_", "remainder"])
def test_where_an_operator_jumps_only_eager_counts(jump: str) -> None:
    graph = linear_gelu("bfloat16")
    assert [e.name for e in evaluations(graph, "cpu")] == [UNROUNDED]
    last = replace(graph.ops[-1], target=f"aten.{jump}.default")
    assert evaluations(replace(graph, ops=(*graph.ops[:-1], last)), "cpu") == ()


def test_only_contractions_and_outputs_are_rounded() -> None:
    h = spec(2, 4, 8, 8, dtype="bfloat16")
    ops = (
        Op("aten.matmul.default", (Ref(0), Ref(1)), (), h),
        Op("aten.softmax.int", (Ref(2), -1, Const("dtype", "float32")), (), spec(2, 4, 8, 8, dtype="float32")),
        Op("aten.to.dtype", (Ref(3), Const("dtype", "bfloat16")), (), h),
        Op("aten.mul.Tensor", (Ref(4), 3.0), (), h),
        Op("aten.scaled_dot_product_attention.default", (Ref(0), Ref(5), Ref(1)), (), h),
        Op("aten.tanh.default", (Ref(6),), (), h),
    )
    graph = Subgraph((h, h), ops, (7, 4))
    q, k = torch.randn(2, 2, 4, 8, 8).bfloat16()
    weights = torch.softmax((q @ k).float(), -1)
    out = F.scaled_dot_product_attention(q, (weights * 3).bfloat16(), k).float().tanh().bfloat16()
    found = build(graph, UNROUNDED)([q, k])
    assert torch.equal(found[0], out) and torch.equal(found[1], weights.bfloat16())
    (kink,) = build(conv_chain("bfloat16", *KINK, n=12, size=16), UNROUNDED)(at_the_kink())
    assert torch.equal(kink, fused(at_the_kink())[0])


NAMES = ("add_rms_norm", "cross_entropy", "group_norm", "qkv_grouped", "rotary", "padded", "capped")
CASES = [case for case in (*ROWWISE, *ROWS, *SHARED, *ON_CPU) if case.name in NAMES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_unrounded_form_computes_the_same_and_no_worse(case: Case, dtype: torch.dtype) -> None:
    graph, inputs = case.traced(dtype=dtype)
    verifier = Verifier(graph, inputs, "cpu")
    (evaluation,) = verifier.evaluations
    with torch.no_grad():
        allowances = verifier._allowances("captured", inputs)
        samples = verifier._sample("captured", inputs, allowances, evaluation)
    for allowance, sample in zip(allowances, samples, strict=True):
        assert sample.rms <= 1.2 * allowance.sample.rms


def planted(graph: Subgraph) -> dict[str, Run]:
    """Bugs of a padded convolution with a norm behind, by name."""
    eager, rest = build(graph), tuple(_renamed(op) for op in graph.ops[1:])
    behind = build(Subgraph((graph.output_specs[0],), rest, (len(rest),)))

    def low_sum(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, w, b = inputs
        total = b.view(-1, 1, 1).bfloat16()
        for k in range(8):
            total = total + F.conv2d(x[:, k : k + 1], w[:, k : k + 1], padding=1).bfloat16()
        return behind([total.to(x.dtype)])

    return {
        "padded at one side": lambda i: eager([F.pad(i[0], (2, 0, 2, 0))[..., :-2, :-2], *i[1:]]),
        "wrong eps": build(replace(graph, ops=tuple(_with_eps(op) for op in graph.ops))),
        "bias dropped": lambda i: eager([i[0], i[1], torch.zeros_like(i[2])]),
        "a tap left out": lambda i: eager([i[0], i[1].index_fill(3, torch.tensor([2]), 0.0), i[2]]),
        "bfloat16 accumulation": low_sum,
    }


def _renamed(op: Op) -> Op:
    return replace(op, args=tuple(Ref(a.to - 3) if isinstance(a, Ref) else a for a in op.args))


def _with_eps(op: Op) -> Op:
    return replace(op, args=tuple(1e-2 if a == 1e-5 else a for a in op.args))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_bugs_are_seen_beside_the_other_evaluations(dtype: str, settings: Settings) -> None:
    """All of them with TF32 allowed for everything; only bugs smaller than its own error would not be."""
    settings(True, "high")
    norm = conv_chain(dtype, *NORM, pad=1)
    verifier = Verifier(norm, None, "cpu")
    passed = [name for name, run in planted(norm).items() if not verifier.check(run, "full").reason]
    assert passed == []
    for graph, bugs in ((norm, []), (linear_gelu(dtype), ["ignores input 2", "low-precision sum"])):
        found = self_test(graph, None, "cpu")
        must = ["zeros", "missing tile", "last row unwritten", "columns off by one", "NaN swallowed", *bugs]
        if dtype == "float32":
            must.append("bfloat16 arithmetic")
        assert [name for name, result in found.items() if result == ACCEPTED] == []
        assert {name: found[name] for name in must if not found[name].startswith(REJECTED)} == {}


def test_other_evaluations_are_made_where_eagers_error_is_too_small_and_once_a_case(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, run = conv_chain("float32", *SIGMOID), in_tf32(lambda y: torch.sigmoid(y * 0.5))
    ran: list[str] = []

    def counted(graph: Subgraph, device: str) -> tuple[Evaluation, ...]:
        def noted(e: Evaluation) -> Evaluation:
            return replace(e, run=lambda inputs: (ran.append(e.name), e.run(inputs))[1])

        return tuple(noted(e) for e in evaluations(graph, device))

    monkeypatch.setattr(verify, "evaluations", counted)
    settings(True)
    verifier = Verifier(graph, None, "cpu")
    assert verifier.check(verifier.eager, "full").reason == ""
    assert verifier.check(lambda i: (verifier.eager(i)[0].fill_(float("nan")),), "full").reason
    assert ran == []
    for _ in range(2):
        assert verifier.check(run, "quick").reason == ""
        assert ran == ["TF32"] * len(verifier.inputs.names("quick"))


def test_an_evaluation_for_which_there_is_no_memory_is_none(settings: Settings) -> None:
    def greedy(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.empty(1 << 60),)

    settings(True)
    verifier = Verifier(conv_chain("float32", *SIGMOID), None, "cpu")
    verifier.evaluations = (Evaluation("TF32", greedy),)
    assert "an error of" in verifier.check(in_tf32(lambda y: torch.sigmoid(y * 0.5)), "quick").reason


@pytest.mark.parametrize("allowed", [True, False])
def test_gradients_are_held_to_the_same_rule(allowed: bool, settings: Settings) -> None:
    settings(allowed)
    graph = conv_chain("float32", *SIGMOID, requires_grad=True)
    verifier = Verifier(graph, None, "cpu", gradients=True)

    class ExactForwards(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(x, w, b)
            return verifier.eager([x, w, b])[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            x, w, b = ctx.saved_tensors
            y = F.conv2d(x, w, b).mul(0.5).sigmoid()
            before = cut(grad * y * (1 - y) * 0.5)
            return F.conv_transpose2d(before, cut(w)), None, None

    outcome = verifier.check(lambda i: (ExactForwards.apply(*i),), "quick")
    assert (outcome.stats.against == "TF32") == allowed
    assert ("gradient of input 0" in outcome.reason) == (not allowed), outcome.reason


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Way(nn.Module):
    """The model in TF32, forwards and backwards."""

    def __init__(self, model: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        net = self.model
        assert isinstance(net, Net)
        y = Cut.apply(F.conv2d(Cut.apply(x), Cut.apply(net.conv.weight), net.conv.bias))
        return net.norm(y).relu().mean((2, 3)) * self.factor


class Cut(torch.autograd.Function):
    """Numbers and gradients to the nearest in TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return nearest(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return nearest(grad)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_whole_models_may_be_in_tf32_too(mode: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net().train(mode == "training")
    workload = Workload(model, (torch.randn(4, 8, 14, 14),), mode=mode, loss=lambda out: out.square().sum())
    steps: list[object] = []
    collect = modelcheck.collect
    monkeypatch.setattr(modelcheck, "collect", lambda w: (steps.append(w.model), collect(w))[1])
    settings(True)
    judge = ModelJudge(workload)
    assert not isinstance(judge.check(model), str)
    made = len(steps)
    for way in (judge.check(Way(model)), judge.check(Way(model))):
        assert not isinstance(way, str), way
        assert way.against == "TF32"
    assert len(steps) == made + 3, "the model is run in TF32 once, and only for what fails eager's rule"
    assert judge.hear("compile", Way(model)) == ""
    assert isinstance(judge.check(Way(model, factor=1.01)), str)
    settings(False, "high")
    assert isinstance(ModelJudge(workload).check(Way(model)), str)


def test_backward_operators_are_cut_as_well() -> None:
    x, w = torch.randn(1, 8, 6, 6, requires_grad=True), torch.randn(4, 8, 3, 3, requires_grad=True)
    with CutToTF32(frozenset({"conv"}), "cpu") as mode:
        F.conv2d(x, w).square().sum().backward()
    grad = cut(2 * F.conv2d(cut(x), cut(w)))
    assert mode.cut == 5
    assert torch.allclose(x.grad, F.conv_transpose2d(grad, cut(w)), rtol=1e-5)
