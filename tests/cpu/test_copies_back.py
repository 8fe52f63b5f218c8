"""What a channels-last model computes last is written in the order that comes out of it, without a copy of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from conv_models import captured
from one_entry import plan_of_kernel
from torch import nn

from fusescout.capture import activations
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.layout import without_copies_back
from fusescout.patching import patch
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.verify import Verifier

CPU, HOPPER = Device("cpu", "test", "x86", 1), Device("cuda", "NVIDIA H200", "sm_90a", 132)
TAIL = ("relu", "sigmoid", "mul", "clone")
X = torch.randn(2, 3, 11, 11, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 20, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.conv(x))
        return torch.sigmoid(y) * 2, self.other(y)


def chains() -> dict[tuple[str, ...], tuple[Subgraph, list[torch.Tensor]]]:
    graph = captured(Model().eval(), X, "channels_last")
    found = {}
    for region in find_regions(graph.graph):
        subgraph, names = graph.graph.subgraph(region.nodes)
        values = activations.record(graph, set(names))
        found[subgraph.chain] = subgraph, [values[n] for n in names]
    return found


def test_the_copy_is_part_of_the_chain_before_it(tmp_path: Path) -> None:
    found = chains()
    assert {TAIL, ("conv2d", "clone")} <= set(found)
    graph, inputs = found[TAIL]
    assert not inputs[0].is_contiguous()
    contender = TileLang(cache_dir=tmp_path)
    built = contender.build(graph, contender.variants(graph, CPU, "quick")[0], CPU)
    assert Verifier(graph, inputs, "cpu").check(built.run, "full").reason == ""
    walks = contender.variants(graph, HOPPER, "quick")
    assert {v["template"] for v in walks} == {"pointwise"}
    assert "tile_rows" in walks[0]  # turned in shared memory: it reads one order and writes the other
    joined, _ = found["conv2d", "clone"]
    assert "tile_rows" in contender.variants(joined, HOPPER, "quick")[0]  # with the bias


def gives_the_same(model: nn.Module, chain: Subgraph, folder: Path) -> None:
    """Run a channels-last model with one chain patched, and without."""
    variant = dict(TileLang(cache_dir=folder).variants(chain, CPU, "quick")[0])
    plan = plan_of_kernel(chain, "pointwise", variant, describe_device("cpu"))
    plan = plan.model_copy(update={"memory_format": "channels_last"})
    with torch.no_grad():
        wanted = model(X)
        with patch(model, plan) as handle:
            got = model(X)
            assert (handle.counters.sites, handle.counters.fallbacks) == (1, {})
    for one, other in zip(got, wanted, strict=True):
        assert one.stride() == other.stride()
        assert torch.allclose(one, other, atol=1e-5)


def test_a_patched_model_gives_the_same_strides(tmp_path: Path) -> None:
    gives_the_same(Model().eval(), chains()[TAIL][0], tmp_path)


def test_such_copies_do_not_count_when_layouts_are_compared() -> None:
    model = Model().eval()
    plain, relaid = captured(model, X), captured(model, X, "channels_last")
    made = without_copies_back(relaid, plain)
    assert [n.op for n in relaid.graph.nodes].count("clone") == 4
    left = [n for n in made.module.graph.nodes if "clone" in n.name]
    assert len(left) == 2  # the input's and the weight's
    for got, wanted in zip(made.module(*made.inputs), plain.module(*plain.inputs), strict=True):
        assert got.stride() != wanted.stride()
        assert torch.allclose(got, wanted, atol=1e-5)
