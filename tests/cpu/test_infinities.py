"""What an infinity becomes where rounding decides is excused; everything else about NaN and infinity is demanded."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusescout.infinities import HUGE
from fusescout.infinities import Infinities
from fusescout.infinities import without_infinities
from fusescout.inputs import place
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.verify import Verifier

INF, NAN = float("inf"), float("nan")
ROWS, COLUMNS, AT = 20_000, 64, 17
Wrong = Callable[[Tensor], Tensor]
Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape).stride())


def graph(
    inputs: Sequence[TensorSpec], *ops: tuple[str, tuple[object, ...]], out: TensorSpec | None = None
) -> Subgraph:
    made = tuple(Op(target, args, (), out or inputs[0]) for target, args in ops)
    return Subgraph(tuple(inputs), made, (len(inputs) + len(ops) - 1,))


X, W = spec(ROWS, COLUMNS), spec(COLUMNS)
NORM = graph((X, W, W), ("aten.layer_norm.default", (Ref(0), (COLUMNS,), Ref(1), Ref(2), 1e-5)))


def norm_inputs() -> list[Tensor]:
    """A weight that is infinite in one column, and there, in every 50th row, the mean of the row as near as may be."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)))
    others = torch.cat([x[:, :AT], x[:, AT + 1 :]], 1).double().mean(1)
    x[::50, AT] = others[::50].float()
    w[AT] = -INF
    return [x, w, b]


def other_norm(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Right, with the row's sum taken the other way round, one number at a time."""
    x, w, b = inputs
    total = torch.zeros(len(x))
    for column in reversed(x.unbind(1)):
        total = total + column
    centred = x - (total / COLUMNS)[:, None]
    return (centred * (centred.square().mean(1, True) + 1e-5).rsqrt() * w + b,)


def test_a_norm_whose_infinite_weight_meets_zero_within_rounding_may_round_otherwise(monkeypatch) -> None:
    inputs = norm_inputs()
    mine, eager = other_norm(inputs)[0], Verifier(NORM, inputs, "cpu").eager(inputs)[0]
    differ = ((mine != eager) & ~(mine.isnan() & eager.isnan()) & eager.isinf()).sum()
    assert differ > 20
    assert Verifier(NORM, inputs, "cpu").check(other_norm, "quick").reason == ""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Infinities, "_find", no_memory)
    assert "wrong class" in Verifier(NORM, inputs, "cpu").check(other_norm, "quick").reason


def test_classes_that_agree_or_a_finite_value_cost_no_evaluation(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Infinities, "undetermined", lambda self, case, inputs, output: asked.append(case))
    inputs = norm_inputs()
    verifier = Verifier(NORM, inputs, "cpu")
    assert verifier.check(verifier.eager, "quick").reason == ""
    finite = lambda i: (verifier.eager(i)[0].nan_to_num(),)  # noqa: E731
    assert "wrong class" in verifier.check(finite, "quick").reason
    assert asked == []


BUGS: dict[str, Wrong] = {
    "sign": lambda out: -out,
    "NaN": lambda out: torch.full_like(out, NAN),
    "zero": torch.zeros_like,
    "infinity": lambda out: torch.full_like(out, INF),
    "minus infinity": lambda out: torch.full_like(out, -INF),
    "finite": lambda out: out.nan_to_num(posinf=3e30, neginf=-3e30),
}
SILU = graph([spec(64, 64)], ("aten.silu.default", (Ref(0),)))
SPELLED_SILU = graph([spec(64, 64)], ("aten.sigmoid.default", (Ref(0),)), ("aten.mul.Tensor", (Ref(0), Ref(1))))
SOFTMAX = graph([spec(64, 64)], ("aten.softmax.int", (Ref(0), -1)))
SUM = graph([spec(64, 64)], ("aten.sum.dim_IntList", (Ref(0), (-1,))), out=spec(64))
LINEAR = graph([spec(32, 8), spec(64, 8)], ("aten.linear.default", (Ref(0), Ref(1))), out=spec(32, 64))
HALF_LINEAR = graph(
    [spec(32, 8, dtype="bfloat16"), spec(64, 8, dtype="bfloat16")],
    ("aten.linear.default", (Ref(0), Ref(1))),
    out=spec(32, 64, dtype="bfloat16"),
)


def planted(eager: Run, bug: Wrong) -> Run:
    """Right where the output is finite, and what the bug makes of it elsewhere."""

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (out,) = eager(inputs)
        return (torch.where(out.isfinite(), out, bug(out)),)

    return run


def with_special(chain: Subgraph, *values: tuple[int, tuple[int, ...], float]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in chain.inputs]
    for index, at, value in values:
        inputs[index][at] = value
    return inputs


MEETING = ((0, (0, 7), INF), (0, (3, 2), INF), (1, (5, 2), INF))
CASES = [
    ("norm", NORM, norm_inputs, ("sign", "NaN", "zero", "finite")),
    ("silu", SILU, lambda: with_special(SILU, (0, (3, 5), -INF)), ("zero", "infinity", "minus infinity")),
    ("spelled silu", SPELLED_SILU, lambda: with_special(SILU, (0, (3, 5), -INF)), ("zero", "infinity")),
    ("softmax", SOFTMAX, lambda: with_special(SOFTMAX, (0, (3, 5), INF)), ("zero", "infinity", "minus infinity")),
    ("sum", SUM, lambda: with_special(SUM, (0, (3, 5), INF), (0, (3, 9), -INF)), ("zero", "infinity")),
    ("linear", LINEAR, lambda: with_special(LINEAR, *MEETING), ("sign", "NaN")),
    ("linear in 16 bits", HALF_LINEAR, lambda: with_special(HALF_LINEAR, *MEETING), ("sign", "NaN")),
]


@pytest.mark.parametrize(("chain", "inputs", "bugs"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_wrong_class_that_no_rounding_makes_is_refused(chain, inputs, bugs) -> None:
    seen = inputs()
    verifier = Verifier(chain, seen, "cpu")
    assert verifier.check(verifier.eager, "quick").reason == ""
    for name in bugs:
        reason = verifier.check(planted(verifier.eager, BUGS[name]), "quick").reason
        assert reason.startswith("On captured inputs output 0 has") and "wrong class" in reason, (name, reason)


@pytest.mark.parametrize("chain", [LINEAR, HALF_LINEAR], ids=["float32", "bfloat16"])
def test_a_product_of_two_infinities_excuses_no_row_of_one(chain: Subgraph) -> None:
    seen = with_special(chain, *MEETING)
    verifier = Verifier(chain, seen, "cpu")
    (found,) = verifier._infinities._find(seen)
    size = verifier.truth(seen)[0].flatten()
    assert (~size[found].isfinite()).sum() <= 2


def test_a_row_is_told_from_its_own_rounding_where_infinities_cancel() -> None:
    seen = with_special(SUM, (0, (3, 5), INF), (0, (3, 9), -INF))
    (found,) = Verifier(SUM, seen, "cpu")._infinities._find(seen)
    assert 3 not in found.tolist()


def test_a_norm_that_takes_no_notice_of_the_infinite_weight_is_refused() -> None:
    inputs = norm_inputs()
    ignoring = lambda i: (F.layer_norm(i[0], (COLUMNS,), i[1].nan_to_num(posinf=1.0, neginf=1.0), i[2]),)  # noqa: E731
    assert "wrong class" in Verifier(NORM, inputs, "cpu").check(ignoring, "quick").reason


def test_infinities_alone_are_replaced_and_each_by_another_number() -> None:
    layout = TensorSpec((3, 4), "float16", (12, 2), aligned=False)
    value = torch.tensor([[INF, -INF, NAN, 1.0]] * 3)
    placed = place(value, layout, "cpu")
    ids = torch.arange(3)
    made = without_infinities([placed, ids])
    assert made is not None and made[1] is ids
    assert made[0].stride() == placed.stride() and made[0].storage_offset() == placed.storage_offset()
    assert placed.isinf().sum() == 6
    assert torch.equal(made[0].isnan(), placed.isnan())
    assert torch.equal(made[0][:, 3], placed[:, 3])
    replaced = made[0][:, :2].float()
    assert (replaced.sign() == torch.tensor([1.0, -1.0])).all()
    assert replaced.abs().unique().numel() == 6
    assert replaced.abs().min() >= HUGE[torch.float16] and replaced.abs().max() < 2 * HUGE[torch.float16]
    assert without_infinities([ids, torch.ones(3)]) is None
