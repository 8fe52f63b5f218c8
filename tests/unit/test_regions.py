"""Which chains are fusable, from structure alone."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from graphs import Builder
from graphs import spec
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from fusescout.ir import Const
from fusescout.ir import Graph
from fusescout.regions import find_regions


def chains(graph: Graph, family: str) -> list[tuple[str, ...]]:
    return [graph.subgraph(r.nodes)[0].chain for r in find_regions(graph) if r.family == family]


def linear(b: Builder, x: str, rows: int, n: int, k: int) -> str:
    return b.op("linear", spec(rows, n), x, b.input(spec(n, k)), b.input(spec(n)))


def test_a_gemm_takes_its_pointwise_tail_and_the_residual() -> None:
    b = Builder()
    x, residual = b.input(spec(8, 16)), b.input(spec(8, 32))
    y = b.op("gelu", spec(8, 32), linear(b, x, 8, 32, 16))
    z = b.op("add", spec(8, 32), y, residual)
    found = chains(b.graph(z), "gemm_epilogue")
    assert ("linear", "gelu", "add") in found
    assert ("linear", "gelu") in found, "the form without a large operand is offered too"


def test_a_bare_gemm_is_a_region_only_where_its_rows_are_misaligned_or_it_is_float32() -> None:
    for columns, dtype, found in ((50257, "bfloat16", True), (50304, "bfloat16", False), (50304, "float32", True)):
        b = Builder()
        x, w = b.input(spec(8, 16, dtype=dtype)), b.input(spec(columns, 16, dtype=dtype))
        y = b.op("linear", spec(8, columns, dtype=dtype), x, w)
        assert (chains(b.graph(y), "gemm_epilogue") == [("linear",)]) is found


def test_a_bare_gemm_is_a_region_where_rows_of_its_factors_are_misaligned() -> None:
    for depth, found in ((415, True), (416, False)):
        b = Builder()
        x, w = b.input(spec(8, depth, dtype="bfloat16")), b.input(spec(64, depth, dtype="bfloat16"))
        y = b.op("linear", spec(8, 64, dtype="bfloat16"), x, w)
        assert (chains(b.graph(y), "gemm_epilogue") == [("linear",)]) is found


def test_a_gemm_takes_what_follows_in_another_order_of_dimensions() -> None:
    b = Builder()
    h = b.op("linear", spec(2, 8, 32), b.input(spec(2, 8, 16)), b.input(spec(32, 16)))
    turned = b.op("aten.transpose.int", spec(2, 32, 8), h, 1, 2)
    y = b.op("aten.add.Tensor", spec(2, 32, 8), b.input(spec(2, 32, 8)), turned)
    last = b.op("aten.transpose.int", spec(2, 8, 32), y, 1, 2)
    assert chains(b.graph(last), "gemm_epilogue") == [("linear", "transpose", "add"), ("linear",)]
    assert chains(b.graph(turned), "gemm_epilogue") == [("linear",)], "a view alone is nothing to compute"


@pytest.mark.parametrize(("op", "weight", "found"), [
    ("mm", (16, 32), True), ("addmm", (16, 32), True), ("matmul", (16, 32), True),
    ("matmul", (2, 16, 32), False), ("bmm", (2, 16, 32), False), ("linear", (32, 16), True),
])  # fmt: skip
def test_a_float32_gemm_alone_is_a_region_if_its_weight_is_one_matrix(
    op: str, weight: tuple[int, ...], found: bool
) -> None:
    b = Builder()
    lead = (2, 8) if op in ("matmul", "bmm") else (8,)
    x, w = b.input(spec(*lead, 16)), b.input(spec(*weight))
    operands = (b.input(spec(32)), x, w) if op == "addmm" else (x, w)
    y = b.op(op, spec(*lead, 32), *operands)
    assert (chains(b.graph(y), "gemm_epilogue") == [(op,)]) is found


def test_a_float32_gemm_with_a_tail_is_no_region_without_it() -> None:
    b = Builder()
    h = linear(b, b.input(spec(8, 16)), 8, 32, 16)
    y = b.op("aten.add.Tensor", spec(8, 32), h, b.input(spec(8, 32)))
    assert chains(b.graph(y), "gemm_epilogue") == [("linear", "add")]
    both = chains(b.graph(y, h), "gemm_epilogue")
    assert set(both) == {("linear", "add"), ("linear",)}, "with two results the product alone is offered too"


def test_a_batched_gemm_takes_its_tail_through_a_view() -> None:
    b = Builder()
    scores = b.op("bmm", spec(6, 5, 8), b.input(spec(6, 5, 16)), b.input(spec(6, 16, 8)))
    heads = b.op("view", spec(2, 3, 5, 8), scores, (2, 3, 5, 8))
    y = b.op("tanh", spec(2, 3, 5, 8), b.op("aten.add.Tensor", spec(2, 3, 5, 8), heads, b.input(spec(2, 1, 1, 8))))
    assert ("bmm", "view", "add", "tanh") in chains(b.graph(y), "gemm_epilogue")


def test_an_intermediate_used_elsewhere_becomes_a_second_output() -> None:
    b = Builder()
    x, r = b.input(spec(8, 16)), b.input(spec(8, 16))
    h = b.op("add", spec(8, 16), x, r)
    y = b.op("layer_norm", spec(8, 16), h, (16,), b.input(spec(16)), b.input(spec(16)), 1e-5)
    graph = b.graph(y, h)
    (region,) = [r for r in find_regions(graph) if r.family == "rowwise"]
    subgraph, _ = graph.subgraph(region.nodes)
    assert subgraph.chain == ("add", "layer_norm")
    assert len(subgraph.outputs) == 2


def test_a_region_never_spans_a_path_that_leaves_and_comes_back() -> None:
    b = Builder()
    x = b.input(spec(8, 16))
    a = b.op("relu", spec(8, 16), x)
    other = b.op("sort", spec(8, 16), a)
    c = b.op("add", spec(8, 16), a, other)
    for region in find_regions(b.graph(c)):
        assert not {a, c} <= set(region.nodes)


def test_a_mutation_between_two_operators_keeps_them_apart() -> None:
    b = Builder()
    x = b.input(spec(8, 16))
    a = b.op("relu", spec(8, 16), x)
    b.op("aten.zero_.default", spec(8, 16), x, mutates=True)
    c = b.op("neg", spec(8, 16), a)
    assert all(not {a, c} <= set(r.nodes) for r in find_regions(b.graph(c)))


@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_over_any_dimension_is_a_row_reduction(dim: int) -> None:
    b = Builder()
    y = b.op("aten.softmax.int", spec(8, 16), b.op("relu", spec(8, 16), b.input(spec(8, 16))), dim)
    assert chains(b.graph(y), "rowwise") == [("relu", "softmax")]


def test_dropout_and_batch_norm_count_only_in_eval() -> None:
    for training in (False, True):
        b = Builder()
        x = b.input(spec(4, 8))
        y = b.op("dropout", spec(4, 8), b.op("relu", spec(4, 8), x), 0.1, training)
        assert (("relu", "dropout") in chains(b.graph(y), "pointwise")) is not training


def test_llama_rms_norm_spelled_out_is_one_region() -> None:
    b = Builder()
    x, r = b.input(spec(8, 64, dtype="bfloat16")), b.input(spec(8, 64, dtype="bfloat16"))
    h = b.op("add", spec(8, 64, dtype="bfloat16"), x, r)
    f = b.op("aten.to.dtype", spec(8, 64), h, Const("dtype", "float32"))
    m = b.op("aten.mean.dim", spec(8, 1), b.op("pow", spec(8, 64), f, 2), (-1,), True)
    s = b.op("rsqrt", spec(8, 1), b.op("add", spec(8, 1), m, 1e-6))
    n = b.op("aten.to.dtype", spec(8, 64, dtype="bfloat16"), b.op("mul", spec(8, 64), f, s), Const("dtype", "bfloat16"))
    y = b.op("mul", spec(8, 64, dtype="bfloat16"), b.input(spec(64, dtype="bfloat16")), n)
    assert ("add", "to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul") in chains(b.graph(y, h), "rowwise")


def test_a_gate_needs_both_products_of_one_input() -> None:
    for same in (True, False):
        b = Builder()
        x, other = b.input(spec(8, 16)), b.input(spec(8, 16))
        gate = b.op("silu", spec(8, 32), linear(b, x, 8, 32, 16))
        up = linear(b, x if same else other, 8, 32, 16)
        y = b.op("mul", spec(8, 32), gate, up)
        assert bool(chains(b.graph(y), "gated_mlp")) is same


def test_written_out_attention_is_found_whole() -> None:
    b = Builder()
    q, k, v = (b.input(spec(2, 4, 32, 16)) for _ in range(3))
    kt = b.op("transpose", spec(2, 4, 16, 32), k, 2, 3)
    scores = b.op("mul", spec(2, 4, 32, 32), b.op("matmul", spec(2, 4, 32, 32), q, kt), 0.25)
    p = b.op(
        "aten.softmax.int", spec(2, 4, 32, 32), b.op("add", spec(2, 4, 32, 32), scores, b.input(spec(2, 1, 32, 32))), -1
    )
    y = b.op("matmul", spec(2, 4, 32, 16), p, v)
    assert ("matmul", "mul", "add", "softmax", "matmul") in chains(b.graph(y), "attention")


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_every_region_of_a_random_graph_is_convex_and_cuttable(seed: int) -> None:
    rng = random.Random(seed)
    b = Builder()
    shape = (8, 16)
    values = [b.input(spec(*shape)) for _ in range(2)]
    for _ in range(rng.randint(1, 25)):
        kind = rng.choice(["relu", "add", "mul", "sort", "linear", "softmax", "view", "tanh"])
        a, c = rng.choice(values), rng.choice(values)
        if kind == "linear":
            values.append(linear(b, a, 8, 16, 16))
        elif kind == "softmax":
            values.append(b.op("aten.softmax.int", spec(*shape), a, -1))
        elif kind in ("add", "mul"):
            values.append(b.op(f"aten.{kind}.Tensor", spec(*shape), a, c))
        elif kind == "view":
            values.append(b.op("view", spec(*shape), a, shape))
        else:
            values.append(b.op(kind, spec(*shape), a))
    graph = b.graph(values[-1], rng.choice(values))
    flow = nx.DiGraph((i, n.name) for n in graph.nodes for i in n.inputs)
    flow.add_nodes_from(n.name for n in graph.nodes)
    for region in find_regions(graph):
        inside = set(region.nodes)
        below = set().union(*(nx.descendants(flow, n) for n in inside)) - inside
        above = set().union(*(nx.ancestors(flow, n) for n in inside)) - inside
        assert not below & above
        subgraph, inputs = graph.subgraph(region.nodes)
        assert len(inputs) == len(subgraph.inputs)
        assert subgraph.outputs, "a region that gives nothing is useless"


@pytest.mark.parametrize("times", [1, 3])
def test_equal_layers_give_equal_keys(times: int) -> None:
    b = Builder()
    x = b.input(spec(8, 16))
    for _ in range(times):
        x = b.op("gelu", spec(8, 16), linear(b, x, 8, 16, 16))
    graph = b.graph(x)
    keys = [graph.subgraph(r.nodes)[0].key for r in find_regions(graph) if r.family == "gemm_epilogue"]
    assert len(keys) == times
    assert len(set(keys)) == 1


def test_a_result_that_shares_memory_somebody_writes_is_no_region() -> None:
    def fused(write: bool) -> bool:
        b = Builder()
        h = linear(b, b.input(spec(8, 16)), 8, 32, 16)
        v = b.op("view", spec(4, 2, 32), h, (4, 2, 32))
        y = b.op("mul", spec(4, 2, 32), v, 2.0)
        if write:
            b.op("add_", spec(4, 2, 32), v, 1.0, mutates=True)
        z = b.op("sort", spec(8, 32), h)
        return ("linear", "view", "mul") in chains(b.graph(y, z), "gemm_epilogue")

    assert fused(False)
    assert not fused(True)


def test_a_random_draw_never_waits_for_a_region() -> None:
    b = Builder()
    x = b.input(spec(8, 16))
    a = b.op("mul", spec(8, 16), x, 2.0)
    dropped = b.op("dropout", spec(8, 16), a, 0.5, True)
    c = b.op("add", spec(8, 16), a, 1.0)
    assert not any({a, c} <= set(r.nodes) for r in find_regions(b.graph(c, dropped)))
