"""Row-wise chains and chains of pieces, from structure alone."""

from __future__ import annotations

import pytest
from graphs import Builder
from graphs import spec

from fusescout.ir import Graph
from fusescout.ir import Ref
from fusescout.regions import find_regions
from fusescout.regions.rows import RowForm
from fusescout.regions.rows import row_form


def chains(graph: Graph, family: str) -> list[tuple[str, ...]]:
    return [graph.subgraph(r.nodes)[0].chain for r in find_regions(graph) if r.family == family]


@pytest.mark.parametrize(
    ("op", "args", "out", "form"),
    [
        ("layer_norm", ((3, 4),), (2, 3, 4), RowForm((2, 3, 4), (1, 2))),
        ("group_norm", (3,), (2, 3, 4), RowForm((2, 3, 4), (1, 2), 3)),
        ("instance_norm", (None, None, None, None, True), (2, 3, 4), RowForm((2, 3, 4), (2,))),
        ("log_softmax", (-2,), (2, 3, 4), RowForm((2, 3, 4), (1,))),
        ("mean", ((-1, 1), False), (2,), RowForm((2, 3, 4), (1, 2))),
        ("sum", (), (), RowForm((2, 3, 4), (0, 1, 2))),
        ("linalg_vector_norm", (2, (1,)), (2, 4), RowForm((2, 3, 4), (1,))),
        ("logsumexp", ((2,), True), (2, 3, 1), RowForm((2, 3, 4), (2,))),
        ("adaptive_avg_pool1d", ((1,),), (2, 3, 1), RowForm((2, 3, 4), (2,))),
        ("adaptive_avg_pool1d", ((2,),), (2, 3, 2), None),
        ("cumsum", (1,), (2, 3, 4), None),
        ("mean", ((0,), True), (1, 3, 4), RowForm((2, 3, 4), (0,))),
    ],
)
def test_what_an_operator_reduces(op, args, out, form) -> None:
    b = Builder()
    y = b.op(op, spec(*out), b.input(spec(2, 3, 4)), *args)
    assert row_form(b.graph(y).nodes[-1], b.graph(y)) == form


def test_reductions_of_integers_or_of_one_element_are_none() -> None:
    b = Builder()
    y = b.op("sum", spec(2, dtype="int64"), b.input(spec(2, 3, dtype="int64")), (1,))
    z = b.op("mean", spec(2), b.input(spec(2, 1)), (1,))
    graph = b.graph(y, z)
    assert [row_form(n, graph) for n in graph.nodes if n.is_op] == [None, None]


@pytest.mark.parametrize("place", [0, 1])
def test_extremes_are_a_reduction_while_nobody_reads_their_places(place: int) -> None:
    b = Builder()
    x = b.op("relu", spec(2, 3, 4), b.input(spec(2, 3, 4)))
    pair = b.op("aten.max.dim", (spec(2, 4), spec(2, 4, dtype="int64")), x, 1)
    y = b.op("tanh", spec(2, 4), b.op("getitem", spec(2, 4), pair, 0))
    z = b.op("getitem", spec(2, 4), pair, place)
    assert chains(b.graph(y, z), "rowwise") == ([("relu", "max", "getitem", "tanh", "getitem")] if place == 0 else [])


def test_a_group_norm_takes_what_is_in_front_and_behind() -> None:
    b = Builder()
    x, w = b.input(spec(2, 8, 4, 4)), b.input(spec(8))
    y = b.op("add", spec(2, 8, 4, 4), x, b.input(spec(1, 8, 1, 1)))
    y = b.op("silu", spec(2, 8, 4, 4), b.op("group_norm", spec(2, 8, 4, 4), y, 4, w, w, 1e-5))
    assert chains(b.graph(y), "rowwise") == [("add", "group_norm", "silu")]


def test_a_dropped_dimension_is_followed_into_the_tail() -> None:
    b = Builder()
    x = b.op("relu", spec(2, 8, 4, 4), b.input(spec(2, 8, 4, 4)))
    y = b.op("mean", spec(2, 8), x, (2, 3))
    z = b.op("sigmoid", spec(2, 8, 1, 1), b.op("view", spec(2, 8, 1, 1), b.op("mul", spec(2, 8), y, 2.0), (2, 8, 1, 1)))
    found = chains(b.graph(z), "rowwise")
    assert ("relu", "mean", "mul", "view", "sigmoid") in found
    assert ("relu", "mean", "mul") in found, "offered without the view too"


def test_a_loss_takes_the_cast_and_the_view_in_front() -> None:
    b = Builder()
    logits, target = b.input(spec(2, 4, 9, dtype="bfloat16")), b.input(spec(8, dtype="int64"))
    x = b.op("_to_copy", spec(2, 4, 9), logits)
    x = b.op("view", spec(8, 9), x, (8, 9))
    loss = b.op("cross_entropy_loss", spec(), x, target)
    assert ("_to_copy", "view", "cross_entropy_loss") in chains(b.graph(loss), "rowwise")


def rotary(b: Builder, q: str, cos: str, sin: str, *shape: int) -> str:
    whole, half = spec(*shape), spec(*shape[:-1], shape[-1] // 2)
    left = b.op("aten.slice.Tensor", half, q, 3, 0, shape[-1] // 2)
    right = b.op("aten.slice.Tensor", half, q, 3, shape[-1] // 2, 1 << 60)
    turned = b.op("cat", whole, (Ref(b.op("neg", half, right)), Ref(left)), -1)
    return b.op("add", whole, b.op("mul", whole, q, cos), b.op("mul", whole, turned, sin))


def test_rotary_embeddings_are_one_region_and_keys_of_equal_shape_join_queries() -> None:
    turned = ("slice", "slice", "neg", "cat", "mul", "mul", "add")
    for heads, expected in ((4, [turned]), (2, [turned, turned])):
        b = Builder()
        cos, sin = b.input(spec(2, 5, 8)), b.input(spec(2, 5, 8))
        cos, sin = (b.op("unsqueeze", spec(2, 1, 5, 8), x, 1) for x in (cos, sin))
        q = rotary(b, b.input(spec(2, 4, 5, 8)), cos, sin, 2, 4, 5, 8)
        k = rotary(b, b.input(spec(2, heads, 5, 8)), cos, sin, 2, heads, 5, 8)
        found = [c for c in chains(b.graph(q, k), "pointwise") if "cat" in c]
        if heads == 4:
            assert [c.count("cat") for c in found] == [2]
        else:
            assert found == expected


def test_pooling_takes_what_is_in_front_and_behind() -> None:
    b = Builder()
    x = b.op("tanh", spec(2, 3, 8, 8), b.input(spec(2, 3, 8, 8)))
    y = b.op("clamp", spec(2, 3, 4, 4), b.op("max_pool2d", spec(2, 3, 4, 4), x, (2, 2)), 0.0, 1.0)
    assert ("tanh", "max_pool2d", "clamp") in chains(b.graph(y), "pointwise")
