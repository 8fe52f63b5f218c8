"""Whole models against float64: eager's error is the measure, and the compiler's where that is larger but sane."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fusescout.modelcheck import ModelJudge
from fusescout.workload import Workload


class Noisy(nn.Module):
    """A model whose result is `exact` plus an error of a given size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Way(nn.Module):
    """Another way to run a model."""

    def __init__(self, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def off_by(model: nn.Module, size: float, seed: int = 0) -> nn.Module:
    def call(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (out.double() + size * noise).float()

    return Way(model, call)


def judged() -> tuple[ModelJudge, nn.Module, float]:
    """A judge, the model, and the size of eager's error."""
    torch.manual_seed(0)
    model = Noisy()
    workload = Workload(model, (torch.randn(128, 64),), dtype="float32", name="noisy")
    judge = ModelJudge(workload)
    size = float((judge.eager[0].double() - judge.truth[0]).square().mean().sqrt())
    return judge, model, size


def test_a_way_as_exact_as_a_less_exact_compiler_passes() -> None:
    judge, model, size = judged()
    assert isinstance(judge.check(off_by(model, 6 * size, 1)), str)
    assert judge.hear("compile", off_by(model, 6 * size)), "it is reported that the compiler itself is off"
    passed = judge.check(off_by(model, 6 * size, 1))
    assert not isinstance(passed, str)
    assert passed.against == "compile"
    exact = judge.check(model)
    assert not isinstance(exact, str)
    assert exact.against == "eager"


def test_it_must_not_be_further_off_than_the_compiler() -> None:
    judge, model, size = judged()
    judge.hear("compile", off_by(model, 6 * size))
    assert isinstance(judge.check(off_by(model, 12 * size, 1)), str)
    wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "1 % too large": lambda x: model(x) * 1.01,
        "a row of zeros": lambda x: model(x).index_fill(0, torch.tensor([3]), 0.0),
        "float16": lambda x: (x.half() @ model.weight.half()).float(),
        "NaN": lambda x: model(x).index_fill(0, torch.tensor([3]), float("nan")),
    }
    for name, fault in wrong.items():
        assert isinstance(judge.check(Way(model, fault)), str), name


def test_a_compiler_that_is_wrong_is_no_measure() -> None:
    for fault in (100.0, 1e4):
        judge, model, size = judged()
        assert judge.hear("compile", off_by(model, fault * size))
        assert judge.opinions == {}
        assert isinstance(judge.check(off_by(model, fault * size, 1)), str)


def test_an_exact_compiler_changes_nothing() -> None:
    judge, model, size = judged()
    assert judge.hear("compile", model) == ""
    assert isinstance(judge.check(off_by(model, 6 * size, 1)), str)


def test_untrained_batch_norm_tilts_sums_that_lie_half_way() -> None:
    """Why a second opinion is needed: eager rounds them to even, who doesn't round before rounds all of them down."""
    rounded = lambda t: t.bfloat16().float()  # noqa: E731
    scale = 1 / torch.tensor(1 + 1e-5).sqrt()
    large, other = torch.arange(256.0, 448.0, 2.0), torch.tensor(65.0)
    exact = large.double() + other.double() * scale.double()
    eager = rounded(large + rounded(other * scale))
    fused = rounded(large + other * scale)
    assert abs(float((eager - exact).mean())) < 0.05
    assert float((fused - exact).mean()) < -0.95
