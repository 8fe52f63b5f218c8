"""What nobody reads is no reader: chains go through it, and a patched model leaves it out."""

from __future__ import annotations

import pytest
import torch
from patched_models import check
from torch import Tensor
from torch import nn

from fusescout.capture import capture
from fusescout.ir import Graph
from fusescout.regions import find_regions
from fusescout.workload import build


class DropsWeights(nn.Module):
    """Attention that also averages its weights, for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result, _ = self.attention(x, x, x)
        return result + x


class Unread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x * 2)
        (y + 1).sigmoid()
        return y - 3


class UnreadDraw(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand_like(x)
        return torch.rand_like(x) + x * 2


def graph_of(model: nn.Module, x: Tensor) -> Graph:
    (found,) = capture(build(model, (x,))).graphs
    return found.graph


def test_attention_has_one_output_although_its_weights_are_averaged():
    graph = graph_of(DropsWeights(), torch.randn(5, 2, 16))
    assert {n.op for n in graph.nodes if n.dead} >= {"mean"}
    regions = [r for r in find_regions(graph) if r.family == "attention"]
    assert regions  # by itself, and with the copy of its heads side by side
    for region in regions:
        assert sum(graph.by_name[n].op == "bmm" for n in region.nodes) == 2
        subgraph, _ = graph.subgraph(region.nodes)
        assert len(subgraph.outputs) == 1


def test_an_unread_operator_is_in_no_region():
    graph = graph_of(Unread(), torch.randn(8))
    assert [n.op for n in graph.nodes if n.dead] == ["add", "sigmoid"]
    (region,) = find_regions(graph)
    assert [graph.by_name[n].op for n in region.nodes] == ["mul", "relu", "sub"]


def test_a_random_draw_is_never_dead():
    graph = graph_of(UnreadDraw(), torch.randn(8))
    assert not any(n.dead for n in graph.nodes)


CASES = [(DropsWeights, "inference"), (DropsWeights, "training"), (Unread, "inference"), (UnreadDraw, "inference")]


@pytest.mark.parametrize(("model", "mode"), CASES)
def test_patched_models_compute_the_same(model, mode):
    check(model(), torch.randn(5, 2, 16), mode=mode, sites=1)
