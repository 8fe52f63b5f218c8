"""Recurrent layers are captured as one operator each, and what follows them is patched."""

from __future__ import annotations

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


@pytest.mark.parametrize(("dropout", "random"), [(0.0, False), (0.5, True)])
def test_a_layer_draws_only_with_dropout_in_training(dropout, random):
    found = capture(build(Recurrent(dropout), inputs(), mode="training"))
    (layer,) = (n for n in found.graphs[0].graph.nodes if n.op == "lstm")
    assert draws(layer) is random


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_the_tail_of_a_recurrent_model_is_patched(composition):
    handle = check(Recurrent(), *inputs(), sites=1, composition=composition)
    assert handle.counters.captures == 1
    assert any("unroll" in reason for reason in handle.counters.fallbacks.values()) == (composition == "inductor")
    assert torch._dynamo.config.allow_rnn is False
