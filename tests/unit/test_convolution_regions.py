"""Convolutions with what follows them as regions, and the constants such a region prepares; from structure alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import Builder
from graphs import spec

from fusescout.constants import split
from fusescout.convolution import read
from fusescout.ir import Graph
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.regions import find_regions

IMAGE = spec(2, 8, 6, 6)


def chains(graph: Graph) -> list[tuple[str, ...]]:
    return [graph.subgraph(r.nodes)[0].chain for r in find_regions(graph) if r.family == "conv_epilogue"]


def conv(b: Builder, x: str, out: TensorSpec = IMAGE, name: str = "conv2d") -> str:
    return b.op(name, out, x, b.input(spec(8, 8, 3, 3)))


def norm(b: Builder, x: str, training: bool = False) -> str:
    rows = [b.input(spec(8)) for _ in range(4)]
    return b.op("batch_norm", IMAGE, x, *rows, training, 0.1, 1e-5, True, mutates=training)


def test_a_convolution_takes_batch_norm_residual_and_activation() -> None:
    b = Builder()
    x, residual = b.input(IMAGE), b.input(IMAGE)
    y = b.op("relu", IMAGE, b.op("add", IMAGE, norm(b, conv(b, x)), residual))
    found = chains(b.graph(y))
    assert ("conv2d", "batch_norm", "add", "relu") in found
    assert ("conv2d", "batch_norm") in found, "the form without a large operand is offered too"


def test_the_shortcut_of_a_residual_block_is_taken_along() -> None:
    b = Builder()
    x, y = b.input(IMAGE), b.input(IMAGE)
    out = b.op("relu", IMAGE, b.op("add", IMAGE, norm(b, conv(b, x)), norm(b, conv(b, y))))
    found = chains(b.graph(out))
    assert any(sorted(c).count("conv2d") == 2 for c in found)
    assert ("conv2d", "batch_norm") in found


def test_convolutions_one_behind_the_other_are_two_regions() -> None:
    b = Builder()
    first = b.op("relu", IMAGE, conv(b, b.input(IMAGE)))
    second = b.op("relu", IMAGE, b.op("add", IMAGE, conv(b, first), first))
    assert all(c.count("conv2d") == 1 for c in chains(b.graph(second)))


def test_batch_norm_in_training_and_other_shapes_stay_outside() -> None:
    b = Builder()
    trained = norm(b, conv(b, b.input(IMAGE)), training=True)
    pooled = b.op("relu", spec(2, 8, 3, 3), b.op("max_pool2d", spec(2, 8, 3, 3), conv(b, b.input(IMAGE)), (2, 2)))
    assert chains(b.graph(trained, pooled)) == []


def test_a_bias_is_added_in_the_pass_of_what_follows_through_views_too() -> None:
    b = Builder()
    rows, weight = spec(2, 6, 6, 8), b.input(spec(8, 8, 3, 3))
    biased = b.op("conv2d", IMAGE, b.input(IMAGE), weight, b.input(spec(8)), (1, 1))
    normed = b.op("layer_norm", rows, b.op("permute", rows, biased, (0, 2, 3, 1)), (8,), b.input(spec(8)))
    plain = b.op("softmax", IMAGE, conv(b, b.input(IMAGE)), 1)
    read_twice = b.op("conv2d", IMAGE, b.input(IMAGE), weight, b.input(spec(8)), (1, 1))
    other = b.op("softmax", IMAGE, read_twice, 1)
    assert chains(b.graph(normed, plain, other, read_twice)) == [("conv2d", "permute", "layer_norm")]


def test_a_convolution_alone_is_no_region() -> None:
    b = Builder()
    assert chains(b.graph(conv(b, b.input(IMAGE)))) == []


@pytest.mark.parametrize(
    ("name", "args", "padding", "dilation", "groups", "transposed"),
    [
        ("conv2d.default", (None, (1, 1), (1, 1)), (1, 1), (1, 1), 1, False),
        ("conv2d.default", (None, (2,), (1,), (2,), 4), (1, 1), (2, 2), 4, False),
        ("conv2d.padding", (None, (1, 1), "same", (2, 2)), (2, 2), (2, 2), 1, False),
        ("conv2d.padding", (None, (1, 1), "valid"), (0, 0), (1, 1), 1, False),
        ("conv_transpose2d.input", (None, (2, 2), (1, 1), (1, 1), 2, (1, 1)), (1, 1), (1, 1), 2, True),
        ("convolution.default", (None, (1, 1), (0, 0), (1, 1), True, (0, 0), 8), (0, 0), (1, 1), 8, True),
    ],
)
def test_every_spelling_of_a_convolution_is_read(
    name: str, args: tuple, padding: tuple, dilation: tuple, groups: int, transposed: bool
) -> None:
    op = Op(f"aten.{name}", (Ref(0), Ref(1), *args), (), IMAGE)
    found = read(Subgraph((IMAGE, spec(8, 8, 3, 3)), (op,), (2,)), op)
    assert found is not None
    assert (found.padding, found.dilation, found.groups, found.transposed) == (padding, dilation, groups, transposed)


def test_padding_that_differs_between_the_sides_is_not_read() -> None:
    op = Op("aten.conv2d.padding", (Ref(0), Ref(1), None, (1, 1), "same"), (), IMAGE)
    assert read(Subgraph((IMAGE, spec(8, 8, 2, 2)), (op,), (2,)), op) is None


def chain_with_constants(requires_grad: bool = False) -> Subgraph:
    """relu(x * (w + w) + v) with x given and w, v constant."""
    row = replace(spec(8), constant=True)
    out = TensorSpec((4, 8), "float32", (8, 1), requires_grad)
    return Subgraph(
        (spec(4, 8), row, row),
        (
            Op("aten.add.Tensor", (Ref(1), Ref(1)), (), spec(8)),
            Op("aten.mul.Tensor", (Ref(0), Ref(3)), (), out),
            Op("aten.view.default", (Ref(2), (1, 8)), (), spec(1, 8)),
            Op("aten.add.Tensor", (Ref(4), Ref(5)), (), out),
        ),
        (6,),
    )


def test_work_on_constants_alone_is_parted_off() -> None:
    found = split(chain_with_constants())
    assert found is not None
    assert (found.prepare.chain, found.sources) == (("add",), (1,))
    assert (found.steady.chain, found.kept) == (("mul", "view", "add"), (0, 2)), "a view is no work"
    assert [s.constant for s in found.steady.inputs] == [False, True, True]
    assert found.steady.ops[0].args == (Ref(0), Ref(2))


def test_nothing_is_parted_off_where_gradients_are_wanted_or_nothing_is_constant() -> None:
    assert split(chain_with_constants(requires_grad=True)) is None
    graph = chain_with_constants()
    assert split(Subgraph(tuple(replace(s, constant=False) for s in graph.inputs), graph.ops, graph.outputs)) is None


def test_constants_are_part_of_a_chain_and_of_its_file_form() -> None:
    graph = chain_with_constants()
    assert Subgraph.from_json(graph.to_json()) == graph
    other = Subgraph(tuple(replace(s, constant=False) for s in graph.inputs), graph.ops, graph.outputs)
    assert other.key != graph.key
