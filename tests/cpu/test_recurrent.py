"""Recurrent layers are one operator each where the user lets Dynamo take them; else they stay with the framework."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from patched_models import check
from torch import Tensor
from torch import nn

from fusescout.capture import capture
from fusescout.flops import cost
from fusescout.flops import op_class
from fusescout.randomness import draws
from fusescout.workload import build


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=dropout)
        self.gru = nn.GRU(16, 16, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, h: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x, h)
        y, state = self.gru(y)
        return torch.tanh(self.head(y[:, -1])) * 2, state


def inputs() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return torch.randn(3, 5, 8), (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16))


@pytest.fixture
def allowed() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def test_without_leave_the_reason_is_told():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    found = capture(build(Plain(), (torch.randn(5, 2, 8),)))
    assert not found.graphs
    (warning,) = found.warnings
    assert "GRU" in warning


@pytest.mark.usefixtures("allowed")
def test_each_layer_is_one_node_with_its_flops():
    found = capture(build(Recurrent(), inputs()))
    (captured,) = found.graphs
    assert not found.breaks
    layers = {n.op: n for n in captured.graph.nodes if op_class(n.target) == "rnn"}
    assert list(layers) == ["lstm", "gru"]
    specs = [captured.graph.by_name[i].out for i in layers["lstm"].inputs]
    weights = 4 * 16 * (8 + 16) + 4 * 16 * (16 + 16)
    assert cost(layers["lstm"], specs).flops == 2 * 3 * 5 * weights
    assert not any(draws(n) for n in layers.values())


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("dropout", "random"), [(0.0, False), (0.5, True)])
def test_a_layer_draws_only_with_dropout_in_training(dropout, random):
    found = capture(build(Recurrent(dropout), inputs(), mode="training"))
    (layer,) = (n for n in found.graphs[0].graph.nodes if n.op == "lstm")
    assert draws(layer) is random


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_the_tail_of_a_recurrent_model_is_patched(composition):
    handle = check(Recurrent(), *inputs(), sites=1, composition=composition)
    assert handle.counters.captures == 1
    assert any("unroll" in reason for reason in handle.counters.fallbacks.values()) == (composition == "inductor")
