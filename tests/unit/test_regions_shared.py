"""Products of one input as regions, and what is made of them; from structure alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import Builder
from graphs import spec

from fusescout.candidates import rank
from fusescout.constants import split
from fusescout.device import Device
from fusescout.ir import Graph
from fusescout.ir import TensorSpec
from fusescout.regions import find_regions
from fusescout.shared_input import packed
from fusescout.shared_input import read

K = 16


class Model(Builder):
    """Inputs that are weights are parameters of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: set[str] = set()

    def weight(self, *shape: int, dtype: str = "float32") -> str:
        name = self.input(spec(*shape, dtype=dtype))
        self.parameters.add(name)
        return name

    def linear(self, x: str, n: int, *, bias: bool = False, module: str = "", rows: int = 8) -> str:
        operands = [self.weight(n, K), *([self.weight(n)] if bias else [])]
        return self.op("linear", spec(rows, n), x, *operands, module=module)

    def made(self, *outputs: str) -> Graph:
        graph = self.graph(*outputs)
        return replace(graph, nodes=tuple(replace(n, is_parameter=n.name in self.parameters) for n in graph.nodes))


def shared(graph: Graph) -> list[set[str]]:
    return [set(r.nodes) for r in find_regions(graph) if r.family == "gemm_shared_input"]


def test_query_key_and_value_are_one_region_whatever_their_widths_and_biases() -> None:
    b = Model()
    x = b.input(spec(8, K))
    q, k, v = b.linear(x, 32, bias=True), b.linear(x, 8), b.linear(x, 8, bias=True)
    graph = b.made(q, k, v)
    assert shared(graph) == [{q, k, v}]
    subgraph, _ = graph.subgraph((q, k, v))
    found = read(subgraph)
    assert not isinstance(found, str)
    assert found.columns == (32, 8, 8)
    assert found.starts(16) == (0, 32, 48)


def test_other_inputs_other_dtypes_and_weights_that_are_computed_are_left_out() -> None:
    b = Model()
    x, other = b.input(spec(8, K)), b.input(spec(8, K))
    first, second = b.linear(x, 32), b.linear(other, 32)
    own = b.op("linear", spec(8, 32), x, b.op("mul", spec(32, K), b.weight(32, K), 2.0))
    half = b.op("linear", spec(8, 32), x, b.weight(32, K, dtype="bfloat16"))
    batch = b.op("matmul", spec(3, 8, 32), x, b.weight(3, K, 32))
    scaled = b.op("addmm", spec(8, 32), b.input(spec(32)), x, b.weight(K, 32))
    assert shared(b.made(first, second, own, half, batch, scaled)) == []
    third = b.op("mm", spec(8, 24), x, b.weight(K, 24))
    assert shared(b.made(first, second, own, half, batch, scaled, third)) == [{first, third}]


def test_gradients_forbid_it() -> None:
    b = Model()
    x = b.input(spec(8, K))
    outs = [b.op("linear", replace(spec(8, 32), requires_grad=True), x, b.weight(32, K)) for _ in range(3)]
    assert shared(b.made(*outs)) == []


def test_a_gate_and_its_twin_are_a_gated_mlp_already() -> None:
    b = Model()
    x = b.input(spec(8, K))
    gate, up = b.linear(x, 32), b.linear(x, 32)
    y = b.op("mul", spec(8, 32), b.op("silu", spec(8, 32), gate), up)
    graph = b.made(y)
    assert shared(graph) == []
    assert "gated_mlp" in {r.family for r in find_regions(graph)}
    more = b.linear(x, 32)
    assert shared(b.made(y, more)) == [{gate, up, more}]


def test_what_every_layer_of_a_decoder_reads_is_taken_layer_by_layer() -> None:
    b = Model()
    x = b.input(spec(8, K))
    layers = [[b.linear(x, 32, module=f"layers.{n}.cross.{part}") for part in "kv"] for n in range(6)]
    assert shared(b.made(*(name for layer in layers for name in layer))) == [set(layer) for layer in layers]
    few = Model()
    x = few.input(spec(8, K))
    q, k, fc = (
        few.linear(x, 32, module="attn.q"),
        few.linear(x, 32, module="attn.k"),
        few.linear(x, 64, module="mlp.fc"),
    )
    assert shared(few.made(q, k, fc)) == [{q, k, fc}, {q, k}]


@pytest.mark.parametrize(("rows", "copies"), [(8, 3), (1, 0)])
def test_one_product_prepares_its_weight_and_copies_what_a_column_range_is(rows: int, copies: int) -> None:
    b = Model()
    x = b.input(spec(rows, K))
    names = (b.linear(x, 32, rows=rows), b.linear(x, 8, bias=True, rows=rows), b.linear(x, 12, rows=rows))
    graph, _ = b.made(*names).subgraph(names)
    found = read(graph)
    assert not isinstance(found, str)
    made = packed(graph, found, 16)
    assert made.output_specs == graph.output_specs
    parts = split(made)
    assert parts is not None
    weight, bias = parts.prepare.output_specs
    assert (weight.shape, bias.shape) == ((32 + 16 + 12, K), (60,)), "only what lies between two weights is padded"
    assert parts.kept == (0,)
    assert parts.steady.chain.count("linear") == 1
    assert parts.steady.chain.count("clone") == copies
    gradients = TensorSpec((rows, 32), "float32", (32, 1), requires_grad=True)
    assert isinstance(read(replace(graph, ops=(replace(graph.ops[0], out=gradients), *graph.ops[1:]))), str)


def test_it_is_priced_with_its_input_read_once() -> None:
    b = Model()
    x = b.input(spec(512, K))
    names = [b.linear(x, 64, rows=512) for _ in range(3)]
    device = Device("cpu", "cpu", "x86_64", 2, copy_bytes_per_s=1e9, flops_per_s={"float32": 1e15})
    ranking = rank([b.made(*names)], lambda _g, _n: 1000.0, 3000.0, device, lambda _f, _s: None, 12)
    (candidate,) = (c for c in ranking.candidates if c.family == "gemm_shared_input")
    assert candidate.launches_removed == 2
    assert candidate.time_us == 3000.0
    nbytes = 4 * (512 * K + 3 * 64 * K + 3 * 512 * 64)
    assert candidate.bound_us == pytest.approx(nbytes / 1e9 * 1e6)
