"""Batch norm folded into convolutions, the library's fused convolutions, 1x1 convolutions as matrix products.

What a fold computes is held against float64, and wrong folds must be caught by the verifier.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_models import CPU
from conv_models import Block
from conv_models import captured
from conv_models import chain
from conv_models import image
from conv_models import trained
from torch import nn

from fusescout.capture import activations
from fusescout.capture import capture
from fusescout.constants import Parts
from fusescout.constants import split
from fusescout.contenders.convolution_tail import as_tail
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework import rewrites
from fusescout.contenders.pointwise_convolution import as_product
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.inputs import InputSource
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.plan import MemoryFormat
from fusescout.reference import build
from fusescout.regions import find_regions
from fusescout.verify import Verifier
from fusescout.workload import Workload

CUDA = Device("cuda", "test", "sm_90a", 132)
FOLD = "batch_norm folded into convolution"


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(8, 12, 3, padding=1, bias=False), lambda: nn.BatchNorm2d(12), (2, 8, 9, 7)),
    "bias": (lambda: nn.Conv2d(8, 12, 3, stride=2), lambda: nn.BatchNorm2d(12), (2, 8, 9, 7)),
    "no affine": (lambda: nn.Conv2d(8, 12, 1), lambda: nn.BatchNorm2d(12, affine=False), (1, 8, 5, 5)),
    "groups": (lambda: nn.Conv2d(8, 16, 3, groups=4), lambda: nn.BatchNorm2d(16), (3, 8, 5, 7)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), lambda: nn.BatchNorm2d(8), (2, 8, 6, 6)),
    "dilation": (lambda: nn.Conv2d(8, 4, 3, dilation=2, padding="same"), lambda: nn.BatchNorm2d(4), (2, 8, 9, 7)),
    "circular": (lambda: nn.Conv2d(8, 4, 3, 1, 1, padding_mode="circular"), lambda: nn.BatchNorm2d(4), (1, 8, 5, 5)),
    "one dimension": (lambda: nn.Conv1d(8, 12, 5, padding=2), lambda: nn.BatchNorm1d(12), (2, 8, 17)),
    "three dimensions": (lambda: nn.Conv3d(4, 6, 3, padding=1), lambda: nn.BatchNorm3d(6), (1, 4, 3, 5, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 2, stride=2), lambda: nn.BatchNorm2d(6), (2, 8, 5, 4)),
    "transposed groups": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), lambda: nn.BatchNorm2d(6), (2, 8, 5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_folded_weights_are_the_float64_fold_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """Prepared weights in float64 give batch norm's own values; in the model's dtype they are those, rounded."""
    torch.manual_seed(0)
    conv, norm, shape = KINDS[kind]
    model = trained(nn.Sequential(conv(), norm(), nn.SiLU())).to(dtype)
    graph = captured(model, image(*shape, dtype=dtype))
    names = [graph.graph.subgraph(r.nodes)[0].chain for r in find_regions(graph.graph) if r.family == "conv_epilogue"]
    subgraph, values = chain(graph, *names[0])
    folded = dict(rewrites(subgraph, CPU))[FOLD]
    wide = [v.double() for v in values]
    expected = build(subgraph, "float64")(wide)[0]
    assert torch.allclose(build(folded, "float64")(wide)[0], expected, rtol=1e-10, atol=1e-10)
    parts = split(folded)
    assert parts is not None
    sources = [values[k] for k in parts.sources]
    exact = build(parts.prepare, "float64")([s.double() for s in sources])
    for made, truth in zip(build(parts.prepare)(sources), exact, strict=True):
        assert made.dtype == dtype
        assert torch.equal(made, truth.to(dtype))


class Affine(nn.Module):
    """A convolution or linear, and factors and summands behind it."""

    def __init__(self, product: nn.Module, norm: nn.Module, behind: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        channels, rest = norm.num_features, [1] * (len(next(product.parameters()).shape) - 2)
        self.product, self.norm, self.behind = product, norm, behind
        self.row = nn.Parameter(torch.linspace(0.5, 1.5, channels).view(channels, *rest))
        self.one = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.product(x), self.norm, self.row, self.one)


AFFINE: dict[str, tuple[nn.Module, nn.Module, Callable[..., torch.Tensor], tuple[int, ...], str]] = {
    "linear": (
        nn.Linear(8, 12), nn.BatchNorm1d(12), lambda y, norm, row, one: norm(y * row).relu(), (16, 8),
        "mul, batch_norm folded into linear",
    ),
    "no bias": (
        nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), lambda y, norm, row, one: ((norm(y) + one) / 3).sigmoid(),
        (16, 8), "batch_norm, add, div folded into linear",
    ),
    "convolution": (
        nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), lambda y, norm, row, one: ((0.3 - y) * row - 2).tanh(), (2, 8, 9, 7),
        "rsub, mul, sub folded into convolution",
    ),
    "transposed": (
        nn.ConvTranspose3d(4, 6, 2, bias=False), nn.BatchNorm3d(6), lambda y, norm, row, one: (norm(y * 2) - one).exp(),
        (2, 4, 3, 5, 4), "mul, batch_norm, sub folded into convolution",
    ),
    "summands alone": (
        nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), lambda y, norm, row, one: (row + (y - 0.5)).relu(),
        (2, 8, 9, 7), "sub, add folded into convolution",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", AFFINE)
def test_factors_and_summands_of_channels_are_folded(kind: str) -> None:
    torch.manual_seed(0)
    product, norm, behind, shape, name = AFFINE[kind]
    graph = captured(trained(Affine(product, norm, behind)), image(*shape))
    families = ("gemm_epilogue", "conv_epilogue")
    region = max((r for r in find_regions(graph.graph) if r.family in families), key=lambda r: len(r.nodes))
    subgraph, names = graph.graph.subgraph(region.nodes)
    recorded = activations.record(graph, set(names))
    values = [recorded[n] for n in names]
    found, folded = rewrites(subgraph, CPU)[0]
    assert found == name
    wide = [v.double() for v in values]
    assert torch.allclose(
        build(folded, "float64")(wide)[0], build(subgraph, "float64")(wide)[0], rtol=1e-10, atol=1e-10
    )
    parts = split(folded)
    assert parts is not None
    assert len(parts.steady.ops) == 2
    assert len(parts.prepare.outputs) == (1 if kind == "summands alone" else 2), "the weight stays where nothing scales"
    if kind == "linear":
        contender = Framework()
        variants = contender.variants(subgraph, CPU, "quick")
        assert not isinstance(variants, str)
        assert (
            Verifier(subgraph, values, "cpu").check(contender.build(subgraph, variants[0], CPU).run, "full").reason
            == ""
        )


def test_operands_that_vary_or_have_gradients_are_not_folded() -> None:
    norm = nn.BatchNorm2d(12)
    model = trained(Affine(nn.Conv2d(8, 12, 3), norm, lambda y, norm, row, one: (y * y.mean(1, True)).tanh()))
    subgraph, _ = captured(model, image()).graph.subgraph(["conv2d", "mean", "mul", "tanh"])
    assert not any("folded" in name for name, _ in rewrites(subgraph, CPU))
    rows = nn.Sequential(nn.Linear(8, 12), nn.Flatten(), nn.BatchNorm1d(12))
    (graph,) = capture(Workload(rows.eval(), (image(16, 8),), mode="training")).graphs
    subgraph, _ = graph.graph.subgraph([n.name for n in graph.graph.nodes if n.op in ("linear", "batch_norm")])
    assert not any("folded" in name for name, _ in rewrites(subgraph, CPU))


@pytest.mark.parametrize("memory_format", ["preserved", "channels_last"])
def test_a_fold_passes_the_whole_check(memory_format: MemoryFormat) -> None:
    torch.manual_seed(0)
    graph = captured(trained(Block()), image(), memory_format)
    subgraph, values = chain(graph, "conv2d", "batch_norm", "add", "relu")
    contender = Framework()
    variants = contender.variants(subgraph, CPU, "quick")
    assert not isinstance(variants, str)
    assert variants[0]["calls"] == [FOLD, "mkldnn._convolution_pointwise"]
    verifier = Verifier(subgraph, values, "cpu")
    for variant in variants:
        built = contender.build(subgraph, variant, CPU)
        assert built.parts is not None
        assert verifier.check(built.run, "full").reason == ""


def test_checks_vary_parameters_within_what_the_model_has() -> None:
    subgraph, values = chain(captured(trained(Block()), image()), "conv2d", "batch_norm", "relu")
    source = InputSource(subgraph, values, "cpu", 0)
    cases = [c for c in source.names("full") if c != "captured"]
    for k, (spec, value) in enumerate(zip(subgraph.inputs, values, strict=True)):
        made = [source.make(case)[k] for case in cases]
        if spec.constant:
            assert all(torch.equal(m.sort().values, value.flatten().sort().values) for m in (m.flatten() for m in made))
            assert value.unique().numel() == 1 or not any(torch.equal(m, value) for m in made)
        else:
            assert any(m.isnan().any() for m in made)
            assert any(m.isinf().any() for m in made)


def wrong_folds(graph: Subgraph) -> dict[str, Subgraph]:
    """The folded sub-graph with one mistake each."""

    def edited(edit: Callable[[Op], Op]) -> Subgraph:
        return Subgraph(graph.inputs, tuple(edit(op) for op in graph.ops), graph.outputs)

    def without(name: str) -> Callable[[Op], Op]:
        return lambda op: (
            replace(op, target="aten.alias.default", args=op.args[:1], kwargs=()) if op.name == name else op
        )

    def other(name: str, target: str) -> Callable[[Op], Op]:
        return lambda op: replace(op, target=target) if op.name == name else op

    half = lambda op: replace(op, kwargs=(("dtype", type(op.kwargs[0][1])("dtype", "bfloat16")),)) if (  # noqa: E731
        op.name == "_to_copy" and op.kwargs[0][1].value == "float64"
    ) else op  # fmt: skip
    return {
        "no square root": edited(other("rsqrt", "aten.reciprocal.default")),
        "the mean's sign": edited(without("neg")),
        "eps forgotten": edited(lambda o: replace(o, args=(o.args[0], 0.0)) if o.target == "aten.add.Scalar" else o),
        "folded in bfloat16": edited(half),
        "no bias": edited(lambda o: replace(o, args=(*o.args[:2], None, *o.args[3:])) if o.name == "conv2d" else o),
    }  # fmt: skip


def test_wrong_folds_are_rejected() -> None:
    torch.manual_seed(0)
    subgraph, values = chain(captured(trained(Block()), image()), "conv2d", "batch_norm", "add", "relu")
    folded = dict(rewrites(subgraph, CPU))[FOLD]
    verifier = Verifier(subgraph, values, "cpu")
    assert verifier.check(build(folded), "full").reason == ""
    for name, graph in wrong_folds(folded).items():
        assert graph != folded, name
        assert verifier.check(build(graph), "full").reason, name


def test_training_and_changing_parameters_are_not_folded() -> None:
    model = trained(Block())
    (graph,) = capture(Workload(model, (image(),), mode="training")).graphs
    for region in find_regions(graph.graph):
        subgraph, _ = graph.graph.subgraph(region.nodes)
        assert FOLD not in [name for name, _ in rewrites(subgraph, CPU)]
    subgraph, _ = chain(captured(model, image()), "conv2d", "batch_norm", "relu")
    given = Subgraph(tuple(replace(s, constant=False) for s in subgraph.inputs), subgraph.ops, subgraph.outputs)
    assert rewrites(given, CPU) == []


def test_cudnn_gets_bias_and_residual_and_one_bias_for_both_convolutions() -> None:
    graph = captured(trained(Block()), image(dtype=torch.float32))
    subgraph, _ = chain(graph, "conv2d", "batch_norm", "relu")
    assert [n for n, _ in rewrites(subgraph, CUDA)] == [FOLD, "cudnn_convolution_relu"]
    twins = next(
        s for r in find_regions(graph.graph) if (s := graph.graph.subgraph(r.nodes)[0]).chain.count("conv2d") == 2
    )
    steps = rewrites(twins, CUDA)
    assert [n for n, _ in steps] == [FOLD, FOLD, "shared bias", "cudnn_convolution_add_relu"]
    parts = split(steps[-1][1])
    assert parts is not None
    assert sorted(parts.steady.chain) == ["conv2d", "cudnn_convolution_add_relu"]
    shortcut = next(op for op in parts.steady.ops if op.name == "conv2d")
    assert len(shortcut.args) < 3 or shortcut.args[2] is None
    values = [torch.rand(s.shape) + 0.5 for s in twins.inputs]
    shared, plain = steps[2][1], twins
    assert torch.allclose(build(shared)(values)[0], build(plain)(values)[0], rtol=1e-4, atol=1e-3)


def test_a_1x1_convolution_is_a_matrix_product_over_channels() -> None:
    torch.manual_seed(0)
    graph = captured(trained(Block()).bfloat16(), image(dtype=torch.bfloat16), "channels_last")
    subgraph, values = chain(graph, "conv2d", "batch_norm", "add", "relu")
    product = as_product(subgraph)
    assert not isinstance(product, str)
    assert product.inner.chain[0] == "linear"
    contender = TileLang()
    variants = contender.variants(subgraph, CPU, "quick")
    assert not isinstance(variants, str)
    built = contender.build(subgraph, variants[0], CPU)
    outcome = Verifier(subgraph, values, "cpu").check(built.run, "full")
    assert outcome.reason == ""
    assert outcome.stats.worst < 1
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(contender.repro(subgraph, variants[0], CPU), scope)
    got, expected = scope["contender"](*values), scope["reference"](*values)
    assert torch.allclose(got[0].float(), expected[0].float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("conv", "memory_format", "reason"),
    [
        (lambda: nn.Conv2d(8, 8, 1, bias=False), "preserved", "not in channels-last"),
        (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), "channels_last", "not 1x1"),
        (lambda: nn.Conv2d(8, 8, 1, stride=2, bias=False), "channels_last", "not 1x1"),
        (lambda: nn.Conv2d(8, 8, 1, groups=2, bias=False), "channels_last", "not 1x1"),
    ],
)
def test_other_convolutions_are_no_matrix_product(
    conv: Callable[[], nn.Module], memory_format: MemoryFormat, reason: str
) -> None:
    graph = captured(trained(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU())), image(), memory_format)
    subgraph, _ = chain(graph, "conv2d", "batch_norm", "relu")
    found = TileLang().variants(subgraph, CUDA, "quick")
    assert isinstance(found, str)
    assert reason in found
    assert "no bias that could join" in found


TAILS: dict[str, tuple[nn.Module, tuple[int, ...], tuple[str, ...]]] = {
    "pointwise": (nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.GELU(), nn.Tanh()), (2, 8, 9, 7), ("gelu", "tanh")),
    "transposed": (nn.Sequential(nn.ConvTranspose3d(4, 6, 2), nn.SiLU()), (2, 4, 3, 5, 4), ("silu",)),
    "norm": (nn.Sequential(nn.Conv3d(4, 6, 2), nn.GroupNorm(2, 6)), (2, 4, 3, 5, 4), ("group_norm",)),
    "mean": (nn.Sequential(nn.Conv1d(4, 6, 2), nn.AdaptiveAvgPool1d(1)), (2, 4, 9), ("adaptive_avg_pool1d",)),
    "channels last": (nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU(), nn.Tanh()), (2, 8, 9, 7), ("gelu", "tanh")),
}


@pytest.mark.parametrize("kind", TAILS)
def test_a_bias_joins_what_follows_its_convolution(kind: str, tmp_path: Path) -> None:
    """Offered on CUDA only, where the library adds the bias in a pass of its own; what it computes is checked here."""
    torch.manual_seed(0)
    model, shape, ops = TAILS[kind]
    graph = captured(trained(model), image(*shape), "channels_last" if "last" in kind else "preserved")
    region = next(r for r in find_regions(graph.graph) if r.family == "conv_epilogue" and len(r.nodes) == len(ops) + 1)
    subgraph, values = chain(graph, *graph.graph.subgraph(region.nodes)[0].chain)
    tail = as_tail(subgraph)
    assert not isinstance(tail, str)
    assert tail.inner.chain == ("view", "add", *ops)
    assert build(tail.convolutions)(values)[0].stride() == tail.convolutions.output_specs[0].stride
    contender = TileLang(cache_dir=tmp_path)
    assert "oneDNN" in contender.variants(subgraph, CPU, "quick")
    offered = contender.variants(subgraph, CUDA, "quick")
    assert not isinstance(offered, str)
    name = str(offered[0]["template"])
    variant = {"template": name, **contender.registry.templates[name].configs(tail.inner, CPU)[0]}
    assert Verifier(subgraph, values, "cpu").check(contender.build(subgraph, variant, CPU).run, "full").reason == ""
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(contender.repro(subgraph, variant, CPU), scope)
    assert torch.allclose(scope["contender"](*values)[0], build(subgraph)(values)[0], atol=1e-5)


def test_parts_prepare_again_only_for_sources_that_changed() -> None:
    subgraph, values = chain(captured(trained(Block()), image()), "conv2d", "batch_norm", "relu")
    parts = split(dict(rewrites(subgraph, CPU))[FOLD])
    assert parts is not None
    calls: list[Sequence[torch.Tensor]] = []

    def prepare(sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        calls.append(sources)
        return build(parts.prepare)(sources)

    both = Parts(parts, prepare, build(parts.steady))
    expected = build(subgraph)
    for change in (None, None, "in place", "another tensor"):
        if change == "in place":
            values[parts.sources[0]].mul_(2)
        elif change == "another tensor":
            values[parts.sources[0]] = values[parts.sources[0]] * 2
        assert torch.allclose(both.run(values)[0], expected(values)[0], atol=1e-4)
    assert len(calls) == 3
