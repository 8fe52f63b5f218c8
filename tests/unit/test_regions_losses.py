"""Vocabulary heads with their loss, from structure alone."""

from __future__ import annotations

import pytest
from graphs import Builder
from graphs import spec

from fusescout.ir import Graph
from fusescout.regions import find_regions

ROWS, CLASSES, WIDTH = 6, 50, 8


def chains(graph: Graph) -> list[tuple[str, ...]]:
    found = [r for r in find_regions(graph) if r.family == "linear_cross_entropy"]
    return [graph.subgraph(r.nodes)[0].chain for r in found]


def build(
    *path: tuple[str, tuple[int, ...], tuple[object, ...]], loss: str = "cross_entropy_loss"
) -> tuple[Builder, str, str]:
    """(builder, the scores before `path`, the loss) of a linear, the operators of `path` in turn, and a loss."""
    b = Builder()
    scores = value = b.op("linear", spec(2, 3, CLASSES), b.input(spec(2, 3, WIDTH)), b.input(spec(CLASSES, WIDTH)))
    for name, shape, args in path:
        value = b.op(name, spec(*shape), value, *args)
    return b, scores, b.op(loss, spec(), value, b.input(spec(ROWS, dtype="int64")))


FLAT = ("view", (ROWS, CLASSES), ((-1, CLASSES),))
PATHS = {
    "view": (FLAT,),
    "cast and cap": (
        ("_to_copy", (2, 3, CLASSES), ()),
        ("div", (2, 3, CLASSES), (30.0,)),
        ("tanh", (2, 3, CLASSES), ()),
        FLAT,
    ),
    "last position left out": (
        ("slice", (2, 2, CLASSES), (1, 0, -1)),
        ("contiguous", (2, 2, CLASSES), ()),
        ("view", (4, CLASSES), ((-1, CLASSES),)),
    ),
    "classes moved": (("transpose", (2, CLASSES, 3), (1, 2)),),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_loss_takes_everything_back_to_the_product(name: str) -> None:
    b, _, loss = build(*PATHS[name])
    assert chains(b.graph(loss)) == [("linear", *(op for op, _, _ in PATHS[name]), "cross_entropy_loss")]


def test_a_negative_log_likelihood_takes_the_softmax_too() -> None:
    b, _, loss = build(FLAT, ("log_softmax", (ROWS, CLASSES), (-1,)), loss="nll_loss_nd")
    assert chains(b.graph(loss)) == [("linear", "view", "log_softmax", "nll_loss_nd")]


def test_scores_that_are_returned_or_read_elsewhere_have_to_be_made() -> None:
    b, scores, loss = build(FLAT)
    assert chains(b.graph(loss, scores)) == []
    b, scores, loss = build(FLAT)
    most_likely = b.op("argmax", spec(2, 3, dtype="int64"), scores, -1)
    assert chains(b.graph(loss, most_likely)) == []


def test_scores_of_something_else_than_a_product_are_no_head() -> None:
    b, _, loss = build(FLAT, ("softmax", (ROWS, CLASSES), (-1,)))
    assert chains(b.graph(loss)) == []
