"""What a layout is chosen by: kernels that stay are timed, what will be fused is counted in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn

from fusescout.capture import capture
from fusescout.layout import choose
from fusescout.layout import with_tails
from fusescout.measure import Timings
from fusescout.memory_format import channels_last
from fusescout.restride import copy_of
from fusescout.tails import part
from fusescout.workload import Workload

X = torch.rand(2, 8, 12, 12)
PLANE = 2 * 10 * 10 * 4
"""Bytes of one channel behind the first convolution."""


class Net(nn.Module):
    """Convolution, bias, scale, sigmoid, group norm (4 channels a group), convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 32, 3), nn.Conv2d(32, 8, 1)
        self.bias, self.scale = nn.Parameter(torch.randn(32, 1, 1)), nn.Parameter(torch.randn(32, 1, 1))
        self.norm = nn.GroupNorm(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.sigmoid((self.first(x) + self.bias) * self.scale)))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_what_stays_runs_and_what_will_be_fused_is_one_pass() -> None:
    (graph,) = capture(Workload(Net().eval(), (X,))).graphs
    state = torch.random.get_rng_state()
    parted = part(graph.module)
    assert torch.equal(torch.random.get_rng_state(), state)
    ran = [str(n.target) for n in parted.module.graph.nodes if n.op == "call_function"]
    assert ran == ["aten.conv2d.default"] * 2
    first, second = (n for n in parted.module.graph.nodes if n.op == "call_function")
    assert first.args[2] is None, "what is behind it adds the bias"
    assert second.args[2] is not None
    assert parted.tail_bytes == 2 * 32 * PLANE + 4 * 32 * 4
    (result,) = parted.module(*graph.inputs, *parted.stand_ins)
    assert result.shape == (2, 8, 10, 10)
    last = copy_of(graph.module)
    assert channels_last(last) == ""
    turned = part(last)
    assert turned.stand_ins[0].is_contiguous(memory_format=torch.channels_last)
    assert turned.tail_bytes == parted.tail_bytes, "a norm in parts reads whole lines, whatever the channels of a group"


def test_results_that_are_given_back_and_views_need_no_stand_in() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.conv(x)).flatten(1)
            return y * 2, y.sum(1)

    (graph,) = capture(Workload(Given().eval(), (X,))).graphs
    parted = part(graph.module)
    assert not parted.stand_ins
    assert parted.tail_bytes == 4 * PLANE * 2 + 2 * 4
    parted.module(*graph.inputs)


@pytest.mark.parametrize(
    ("rate", "times"),
    [
        (1e15, "1.50 times"),  # the tail takes no time: the convolutions decide, which are faster
        (1e9, "1.33 times"),  # 52 µs of tail are the same in both layouts
        (0.0, "1.50 times"),  # no rate is known: as measured
    ],
)
def test_planted_times_and_rates_decide(rate: float, times: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(calls, inputs, device, **_):
        for call in calls:
            call(inputs)
        return Timings([[150.0, 151.0, 150.5] * 5, [100.0, 101.0, 100.5] * 5], "planted", {})

    monkeypatch.setattr("fusescout.layout.interleave", planted)
    workload = Workload(Net().eval(), (X,))
    found = choose(workload, capture(workload), lambda _, name: 30.0 if "conv" in name else 5.0, 100.0, rate)
    assert found.memory_format == "channels_last" and times in found.note
    assert ("one pass over memory" in found.note) == (rate > 0)


def test_a_tail_that_is_the_same_in_both_makes_a_gain_smaller_but_none_a_loss() -> None:
    before, after = [100.0, 101.0, 99.0] * 5, [80.0, 81.0, 79.0] * 5
    assert with_tails(before, after, 0.0, 0.0).mid == pytest.approx(1.25)
    assert with_tails(before, after, 300.0, 300.0).mid == pytest.approx(400 / 380)
    assert with_tails(before, after, 300.0, 300.0).low > 1
    assert with_tails(before, after, 300.0, 330.0).low < 1
