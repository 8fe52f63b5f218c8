"""The tolerance rule and the planted bugs: what must be rejected is, and what is merely another rounding isn't."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusescout import tolerance
from fusescout.inputs import InputSource
from fusescout.inputs import place
from fusescout.inputs import raw
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.mutants import ACCEPTED
from fusescout.mutants import REJECTED
from fusescout.mutants import self_test
from fusescout.tolerance import Allowance
from fusescout.verify import DRAWS
from fusescout.verify import Verifier
from fusescout.verify import check_model_outputs
from fusescout.verify import randomness


def spec(*shape: int, dtype: str = "float32", grad: bool = False) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape).stride(), grad)


def chain(x: TensorSpec, *ops: tuple[str, tuple[object, ...]]) -> Subgraph:
    """Ops of one input that all have its shape."""
    return Subgraph((x,), tuple(Op(target, args, (), x) for target, args in ops), (len(ops),))


def new_gelu(dtype: str) -> Subgraph:
    return chain(
        spec(32, 256, dtype=dtype),
        ("aten.pow.Tensor_Scalar", (Ref(0), 3)),
        ("aten.mul.Tensor", (Ref(1), 0.044715)),
        ("aten.add.Tensor", (Ref(0), Ref(2))),
        ("aten.mul.Tensor", (Ref(3), 0.7978845608028654)),
        ("aten.tanh.default", (Ref(4),)),
        ("aten.add.Tensor", (Ref(5), 1.0)),
        ("aten.mul.Tensor", (Ref(0), 0.5)),
        ("aten.mul.Tensor", (Ref(7), Ref(6))),
    )


def linear_gelu(dtype: str, grad: bool = False, inner: int = 768) -> Subgraph:
    x, w = spec(32, inner, dtype=dtype, grad=grad), spec(64, inner, dtype=dtype, grad=grad)
    b, out = spec(64, dtype=dtype, grad=grad), spec(32, 64, dtype=dtype, grad=grad)
    linear = Op("aten.linear.default", (Ref(0), Ref(1), Ref(2)), (), out)
    return Subgraph((x, w, b), (linear, Op("aten.gelu.default", (Ref(3),), (), out)), (4,))


def layer_norm(dtype: str) -> Subgraph:
    x, w = spec(32, 384, dtype=dtype), spec(384, dtype=dtype)
    op = Op("aten.layer_norm.default", (Ref(0), (384,), Ref(1), Ref(2), 1e-5), (), x)
    return Subgraph((x, w, w), (op,), (3,))


def softmax(columns: int, dtype: str) -> Subgraph:
    return chain(spec(1, columns, dtype=dtype), ("aten.softmax.int", (Ref(0), -1)))


MUST_REJECT = (
    "zeros", "a constant", "missing tile", "last row unwritten", "last column unwritten", "columns off by one",
    "NaN swallowed", "wider output", "transposed memory", "previous output", "writes its input", "ignores input 0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "also"),
    [
        (new_gelu("float32"), ["rows off by one", "infinity clamped", "float16 arithmetic", "bfloat16 arithmetic"]),
        (new_gelu("bfloat16"), ["rows off by one", "infinity clamped"]),
        (layer_norm("float32"), ["ignores input 1", "ignores input 2", "rows off by one", "float16 arithmetic"]),
        (linear_gelu("float32"), ["ignores input 2", "low-precision sum", "float16 arithmetic", "1 % too large"]),
        (linear_gelu("bfloat16"), ["ignores input 2", "low-precision sum", "infinity clamped"]),
    ],
    ids=["gelu-f32", "gelu-bf16", "norm-f32", "linear-f32", "linear-bf16"],
)
def test_every_planted_bug_is_rejected(graph: Subgraph, also: list[str]) -> None:
    found = self_test(graph, None, "cpu")
    assert not [name for name, result in found.items() if result == ACCEPTED]
    missed = [name for name in (*MUST_REJECT, *also) if not found[name].startswith(REJECTED)]
    assert not missed, {name: found[name] for name in missed}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bugs_in_the_tiny_outputs_of_a_wide_softmax_are_rejected(dtype: str) -> None:
    bugs = ["zeros", "a constant", "missing tile", "last column unwritten", "returns its input's memory"]
    found = self_test(softmax(100_000, dtype), None, "cpu", names=bugs)
    assert [name for name, result in found.items() if not result.startswith(REJECTED)] == []


def _chunked_linear(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same product summed in float32 in another order."""
    x, w, b = inputs
    parts = [x[:, k : k + 96].float() @ w[:, k : k + 96].float().T for k in range(0, x.shape[1], 96)]
    return (torch.nn.functional.gelu(sum(parts) + b.float()).to(x.dtype),)


def _spelled_softmax(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    raised = (inputs[0] - inputs[0].amax(-1, True)).exp()
    return (raised / raised.sum(-1, True),)


def _float32_inside(chained: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    return lambda inputs: (chained(inputs[0].float()).to(inputs[0].dtype),)


@pytest.mark.parametrize(
    ("graph", "run"),
    [
        (linear_gelu("float32"), _chunked_linear),
        (linear_gelu("bfloat16"), _chunked_linear),
        (new_gelu("float32"), _float32_inside(lambda x: torch.nn.functional.gelu(x, approximate="tanh"))),
        (new_gelu("bfloat16"), _float32_inside(lambda x: torch.nn.functional.gelu(x, approximate="tanh"))),
        (softmax(100_000, "float32"), _spelled_softmax),
        (softmax(1000, "float16"), _float32_inside(lambda x: x.softmax(-1))),
    ],
    ids=["linear-f32", "linear-bf16", "gelu-f32", "gelu-bf16", "softmax-1e5", "softmax-f16"],
)  # fmt: skip
def test_another_correct_implementation_passes(graph: Subgraph, run: Callable[..., tuple[Tensor, ...]]) -> None:
    for seed in (0, 1):
        outcome = Verifier(graph, None, "cpu", seed).check(run, "full")
        assert outcome.reason == ""
        assert outcome.stats.worst <= 1
        assert outcome.stats.cases == len(InputSource(graph, None, "cpu", 0).names("full"))


def test_tiny_outputs_cannot_hide_behind_large_ones() -> None:
    truth = torch.cat(
        [torch.rand(5000, dtype=torch.float64) + 0.5, (torch.rand(5000, dtype=torch.float64) + 0.5) * 1e-6]
    )
    eager = truth.float() * (1 + 1e-7 * torch.randn(10_000))
    wrong = eager.clone()
    wrong[5000:] = 0
    assert Allowance(eager, truth).judge(truth.float()).reason == ""
    assert "an error of" in Allowance(eager, truth).judge(wrong).reason


def test_errors_of_second_order_are_no_errors() -> None:
    truth = torch.cat([torch.randn(5000, dtype=torch.float64), torch.full((5000,), 1e-7, dtype=torch.float64)])
    eager = truth.bfloat16()
    flushed, wrong = eager.clone(), eager.clone()
    flushed[5000:] = 0
    wrong[5000:] = 1e-3
    assert Allowance(eager, truth).judge(flushed).reason == ""
    assert Allowance(eager, truth).judge(wrong).reason != ""
    in_float32 = torch.cat([truth[:5000].float(), torch.zeros(5000)])
    assert Allowance(truth.float(), truth).judge(in_float32).reason != ""


def test_float16_may_overflow_as_eager_or_as_the_truth_but_not_otherwise() -> None:
    truth = torch.tensor([1e6, 7.0, 70000.0] * 400, dtype=torch.float64)
    eager = torch.tensor([float("inf"), float("inf"), float("inf")] * 400, dtype=torch.float16)
    fine = torch.tensor([float("inf"), 7.0, float("inf")] * 400, dtype=torch.float16)
    clamped = torch.tensor([65504.0, 7.0, float("inf")] * 400, dtype=torch.float16)
    assert Allowance(eager, truth).judge(fine).reason == ""
    assert Allowance(eager, truth).judge(eager).reason == ""
    assert "class" in Allowance(eager, truth).judge(clamped).reason


@pytest.mark.parametrize("elements", [1, 3, 17])
def test_eager_passes_its_own_rule_where_other_inputs_were_kinder(elements: int) -> None:
    truth = torch.full((elements,), 10.0, dtype=torch.float64)
    allowance = Allowance(truth.float() + 2e-5, truth)
    for _ in range(7):
        allowance.add(truth.float(), truth)
    assert allowance.judge(truth.float() + 2e-5).reason == ""
    assert allowance.judge(truth.float() + 6e-5).reason != ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_nearest_to_the_truth_passes_whatever_eager_gives(dtype: torch.dtype) -> None:
    """Also just above a power of two, where a rounding is largest, and where eager overflows."""
    for value in (1 + torch.finfo(dtype).eps / 2.001, 1.7, 1.99):
        truth = torch.tensor(value, dtype=torch.float64)
        for eager in (truth.to(dtype), torch.tensor(float("inf"), dtype=dtype)):
            assert Allowance(eager, truth).judge(truth.to(dtype)).reason == ""
            assert Allowance(eager, truth).judge(truth.to(dtype) * (1 + 4 * torch.finfo(dtype).eps)).reason != ""


def test_a_scalar_that_errs_as_eager_does_is_hardly_ever_refused() -> None:
    """Nine errors of one kind: eight are eager's on as many inputs, one the contender's. One far larger always is."""
    truth = torch.full((1,), 10.0, dtype=torch.float64)
    errors = torch.randn(200, DRAWS + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2e-5
    refused = caught = 0
    for *eager, mine in errors.tolist():
        allowance = Allowance((truth + eager[0]).float(), truth)
        for error in eager[1:]:
            allowance.add((truth + error).float(), truth)
        refused += allowance.judge((truth + mine).float()).reason != ""
        caught += allowance.judge((truth + 1.5e-3).float()).reason != ""
    assert refused <= 2
    assert caught == 200


def test_integer_outputs_must_be_equal() -> None:
    eager = torch.arange(10)
    assert Allowance(eager, eager).judge(eager.clone()).reason == ""
    assert "differ" in Allowance(eager, eager).judge(eager + 1).reason


def test_a_graph_on_which_eager_gives_only_nan_proves_nothing() -> None:
    graph = chain(spec(8, 8), ("aten.mul.Tensor", (Ref(0), float("nan"))))
    outcome = Verifier(graph, None, "cpu").check(lambda i: (i[0] * float("nan"),), "full")
    assert "proved by no case" in outcome.reason


def test_running_out_of_memory_is_a_failure() -> None:
    def greedy(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.empty(1 << 60),)

    outcome = Verifier(new_gelu("float32"), None, "cpu").check(greedy, "quick")
    assert "ran out of memory" in outcome.reason


def test_an_unsteady_contender_is_called_not_deterministic() -> None:
    calls: list[int] = []

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        calls.append(1)
        out = torch.nn.functional.gelu(inputs[0], approximate="tanh")
        return (torch.where(out.abs() > 1, torch.nextafter(out, out * 2), out) if len(calls) % 2 else out,)

    outcome = Verifier(new_gelu("float32"), None, "cpu").check(run, "quick")
    assert outcome.reason == ""
    assert not outcome.stats.deterministic


def test_gradients_are_held_to_the_rule() -> None:
    graph = linear_gelu("float32", grad=True, inner=64)
    verifier = Verifier(graph, None, "cpu", gradients=True)
    assert verifier.check(verifier.eager, "quick").reason == ""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):  # type: ignore[no-untyped-def]
            return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return torch.ones(32, 64), torch.ones(64, 64), grad.sum(0)

    wrong = verifier.check(lambda i: (Wrong.apply(*i),), "quick")
    assert "gradient of input 0" in wrong.reason
    without = verifier.check(lambda i: tuple(o.detach() for o in verifier.eager(i)), "quick")
    assert "no gradients" in without.reason and without.status == "unsupported"


@pytest.mark.parametrize(
    "layout",
    [
        TensorSpec((4, 6), "float32", (12, 2)),
        TensorSpec((4, 6), "float32", (1, 4)),
        TensorSpec((4, 6), "float32", (0, 1)),
        TensorSpec((4, 6), "float32", (6, 1), aligned=False),
        TensorSpec((3, 4), "float32", (2, 1)),
        TensorSpec((), "float32", ()),
        TensorSpec((0, 3), "float32", (3, 1)),
        TensorSpec((5,), "int64", (2,)),
    ],
)  # fmt: skip
def test_inputs_have_exactly_the_captured_layout(layout: TensorSpec) -> None:
    base = torch.arange(1, 65).as_strided(layout.shape, layout.stride).to(getattr(torch, layout.dtype))
    placed = place(base, layout, "cpu")
    assert placed.stride() == layout.stride
    assert torch.equal(placed, base)
    assert (placed.data_ptr() % 16 == 0) == (layout.aligned or placed.numel() == 0)
    other = InputSource(Subgraph((layout,), (), ()), [base], "cpu", 0)
    assert torch.equal(other.make("captured")[0], base)
    for case in other.names("full"):
        assert torch.equal(raw(other.make(case)[0]), raw(other.make(case)[0])), case


def test_reads_between_the_elements_of_a_view_are_seen() -> None:
    layout = TensorSpec((8, 16), "float32", (32, 1))
    graph = Subgraph((layout,), (Op("aten.relu.default", (Ref(0),), (), spec(8, 16)),), (1,))
    sloppy = lambda i: (i[0].as_strided((8, 16), (16, 1)).relu(),)  # noqa: E731
    assert Verifier(graph, None, "cpu").check(sloppy, "quick").reason


def test_random_operators_are_recognised() -> None:
    drop = lambda train: chain(spec(4, 4), ("aten.dropout.default", (Ref(0), 0.1, train)))  # noqa: E731
    assert "random" in (randomness(drop(True)) or "")
    assert randomness(drop(False)) is None
    assert randomness(new_gelu("float32")) is None


def test_whole_model_outputs_use_the_same_rule() -> None:
    truth = [torch.randn(100, 50, dtype=torch.float64)]
    eager = [truth[0].float()]
    passed = check_model_outputs([eager[0].clone()], eager, truth)
    assert not isinstance(passed, str)
    assert isinstance(check_model_outputs([eager[0] * 1.01], eager, truth), str)
    assert isinstance(check_model_outputs([], eager, truth), str)
    assert isinstance(check_model_outputs([eager[0].double()], eager, truth), str)


def test_peaks_are_the_same_in_one_table_and_in_many():
    torch.manual_seed(0)
    bucket, error = torch.randint(0, 2048, (5003,)), torch.rand(5003, dtype=torch.float64)
    one = tolerance._peaks(bucket, error, 1)
    assert one[bucket[17]] == error[bucket == bucket[17]].max()
    assert torch.equal(tolerance._peaks(bucket, error, 256), one)
