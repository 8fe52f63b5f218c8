"""Plain-data graphs: JSON keeps the key, and every fact that decides what is computed is in it."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusescout.ir import Const
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import refs
from fusescout.ir import substitute

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def specs(draw: Any) -> TensorSpec:
    shape = draw(shapes)
    stride = draw(st.tuples(*(st.integers(0, 99) for _ in shape)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
    return TensorSpec(shape, dtype, stride, draw(st.booleans()), draw(st.booleans()))


constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from(["float32", "float16"]).map(lambda v: Const("dtype", v)),
)  # fmt: skip


@st.composite
def subgraphs(draw: Any) -> Subgraph:
    inputs = tuple(draw(st.lists(specs(), min_size=1, max_size=3)))
    ops: list[Op] = []
    for k in range(draw(st.integers(1, 4))):
        known = st.integers(0, len(inputs) + k - 1).map(Ref)
        args = draw(st.lists(st.one_of(known, constants, st.tuples(known, constants)), max_size=3))
        kwargs = draw(st.dictionaries(st.sampled_from(["alpha", "dim"]), constants))
        out = draw(st.one_of(specs(), st.none(), st.tuples(specs(), st.none())))
        ops.append(Op(draw(st.sampled_from(["aten.add.Tensor", "getitem"])), tuple(args), tuple(kwargs.items()), out))
    return Subgraph(inputs, tuple(ops), (len(inputs) + len(ops) - 1,))


@given(subgraphs())
def test_json_round_trip(graph: Subgraph) -> None:
    again = Subgraph.from_json(graph.to_json())
    assert again == graph and again.key == graph.key


@given(subgraphs(), subgraphs())
def test_equal_keys_mean_equal_graphs(a: Subgraph, b: Subgraph) -> None:
    assert (a.key == b.key) == (a.to_json() == b.to_json())


SPEC = TensorSpec((2, 3), "float32", (3, 1))
BASE = Subgraph((SPEC,), (Op("aten.add.Tensor", (Ref(0), 1.0), (("alpha", 2),), SPEC),), (1,))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (3, 2)}, {"dtype": "float16"}, {"stride": (1, 2)}, {"requires_grad": True}, {"aligned": False},
    ],
)  # fmt: skip
def test_every_tensor_fact_is_in_the_key(change: dict[str, Any]) -> None:
    other = dataclasses.replace(SPEC, **change)
    assert dataclasses.replace(BASE, inputs=(other,)).key != BASE.key
    assert dataclasses.replace(BASE, ops=(dataclasses.replace(BASE.ops[0], out=other),)).key != BASE.key


@pytest.mark.parametrize(
    "constant",
    [1, True, 2.0, "1.0", None, math.inf, -math.inf, Const("dtype", "float32"), Ref(0), (1.0,), 1.0000000000000002],
)
def test_every_constant_is_in_the_key(constant: Any) -> None:
    for args, kwargs in (((Ref(0), constant), (("alpha", 2),)), ((Ref(0), 1.0), (("alpha", constant),))):
        assert dataclasses.replace(BASE, ops=(Op("aten.add.Tensor", args, kwargs, SPEC),)).key != BASE.key
    for target in ("aten.add.Scalar", "aten.sub.Tensor"):
        assert dataclasses.replace(BASE, ops=(dataclasses.replace(BASE.ops[0], target=target),)).key != BASE.key
    assert dataclasses.replace(BASE, outputs=(1, 0)).key != BASE.key


@given(specs())
def test_bytes_and_contiguity(spec: TensorSpec) -> None:
    assert 0 <= spec.nbytes <= spec.numel * 8
    plain = TensorSpec(spec.shape, spec.dtype, tuple(math.prod(spec.shape[k + 1 :]) for k in range(len(spec.shape))))
    assert plain.is_contiguous
    if spec.is_contiguous and spec.numel:
        assert all(s == p for n, s, p in zip(spec.shape, spec.stride, plain.stride, strict=True) if n != 1)


def node(name: str, *inputs: str) -> Node:
    return Node(name, "aten.add.Tensor" if inputs else "input", tuple(Ref(i) for i in inputs), (), SPEC)


GRAPH = Graph(
    0, (node("x"), node("w"), node("a", "x", "w"), node("b", "a", "a"), node("c", "b", "x"), node("d", "a")), ("c", "d")
)


def test_cutting_a_subgraph() -> None:
    assert GRAPH.users["a"] == ("b", "d")
    assert GRAPH.escapes({"a", "b"}) == ("a", "b")
    cut, inputs = GRAPH.subgraph(["c", "b"])
    assert inputs == ("a", "x")
    assert [o.args for o in cut.ops] == [(Ref(0), Ref(0)), (Ref(2), Ref(1))]
    assert cut.outputs == (3,) and cut.users(2) == (3,) and cut.op_of(1) is None


def test_names_do_not_matter() -> None:
    renamed = {n.name: f"other_{n.name}" for n in GRAPH.nodes}
    nodes = tuple(dataclasses.replace(n, name=renamed[n.name], args=substitute(n.args, renamed)) for n in GRAPH.nodes)
    other = Graph(3, nodes, tuple(renamed[o] for o in GRAPH.outputs))
    assert other.subgraph(["other_b", "other_c"])[0].key == GRAPH.subgraph(["b", "c"])[0].key


def test_refs_in_order_with_repeats() -> None:
    assert list(refs((Ref("a"), (1, Ref("b"), (Ref("a"),)), None))) == ["a", "b", "a"]


def test_no_torch_is_imported() -> None:
    code = "import sys, fusescout.ir; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
