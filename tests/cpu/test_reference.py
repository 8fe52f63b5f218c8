"""The reference computes what the captured operators compute, and its float64 form is never rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusescout import ir
from fusescout import reference
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec


def op(target: str, *args: Any, out: Any, **kwargs: Any) -> Op:
    return Op(target, args, tuple(kwargs.items()), out)


def spec(shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return reference.spec_of(torch.empty(shape, dtype=getattr(torch, dtype)))


H = spec((4, 8), "bfloat16")
MLP = Subgraph(
    (H, spec((8, 8), "bfloat16"), spec((8,), "bfloat16")),
    (
        op("aten.linear.default", Ref(0), Ref(1), Ref(2), out=H),
        op("aten.gelu.default", Ref(3), approximate="tanh", out=H),
        op("aten.softmax.int", Ref(4), -1, Const("dtype", "float32"), out=spec((4, 8))),
        op("aten.to.dtype", Ref(5), Const("dtype", "bfloat16"), out=H),
    ),
    (6, 4),
)


def test_runs_as_written_and_in_float64() -> None:
    x, w, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 8).bfloat16(), torch.randn(8).bfloat16()
    kept = [t.clone() for t in (x, w, b)]
    y, h = reference.build(MLP)([x, w, b])
    assert torch.equal(h, F.gelu(F.linear(x, w, b), approximate="tanh"))
    assert torch.equal(y, torch.softmax(h, -1, torch.float32).bfloat16())
    truth, mid = reference.build(MLP, "float64")([x, w, b])
    wanted = F.gelu(F.linear(x.double(), w.double(), b.double()), approximate="tanh")
    assert truth.dtype == mid.dtype == torch.float64
    assert torch.equal(mid, wanted) and torch.equal(truth, torch.softmax(wanted, -1))
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, w, b), strict=True))


def test_source_stands_alone_and_is_what_build_runs() -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(reference.to_source(MLP, "f") + reference.make_inputs_source(MLP), scope)
    inputs = scope["make_inputs"]("cpu", seed=3)
    assert [reference.spec_of(t) for t in inputs] == list(MLP.inputs)
    assert all(torch.equal(a, b) for a, b in zip(scope["f"](*inputs), reference.build(MLP)(inputs), strict=True))
    again = scope["make_inputs"]("cpu", seed=3)
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    assert "del " not in reference.to_source(MLP)


def test_gradients_flow() -> None:
    inputs = [torch.randn(s.shape).to(getattr(torch, s.dtype)).requires_grad_() for s in MLP.inputs]
    reference.build(MLP)(inputs)[1].float().square().sum().backward()
    assert all(t.grad is not None for t in inputs)


def test_multi_output_getitem_lists_and_special_constants() -> None:
    x, half = spec((2, 6)), TensorSpec((2, 3), "float32", (6, 1))
    graph = Subgraph(
        (x,),
        (
            op("aten.split.Tensor", Ref(0), 3, -1, out=(half, half)),
            op("getitem", Ref(1), 0, out=half),
            op("getitem", Ref(1), 1, out=half),
            op("aten.full.default", (2, 3), float("-inf"), device=Const("device", "cpu"), out=spec((2, 3))),
            op("aten.maximum.default", Ref(3), Ref(4), out=spec((2, 3))),
            op("aten.cat.default", (Ref(5), Ref(2)), -1, out=x),
            op("aten.clone.default", Ref(6), memory_format=Const("memory_format", "contiguous_format"), out=x),
            op("aten.index.Tensor", Ref(7), (None, Ref(8)), out=x),
        ),
        (9,),
    )
    graph = Subgraph((x, spec((6,), "int64")), tuple(_shift(o) for o in graph.ops), (9,))
    value, index = torch.randn(2, 6), torch.tensor([5, 4, 3, 2, 1, 0])
    a, b = value.split(3, -1)
    wanted = torch.cat([b, a], -1)[:, index]
    assert torch.equal(reference.build(graph)([value, index])[0], wanted)
    truth = reference.build(graph, "float64")([value, index])[0]
    assert truth.dtype == torch.float64 and torch.equal(truth, wanted.double())


def _shift(o: Op) -> Op:
    """Value numbers of a graph that has one more input; Ref(8) was already the new input's place holder."""
    to = {k: k + 1 for k in range(1, 8)} | {0: 0, 8: 1}
    return Op(o.target, ir.substitute(o.args, to), o.kwargs, o.out)


def test_float64_keeps_integers_and_refuses_bit_casts() -> None:
    x = spec((3,))
    counted = Subgraph((x,), (op("aten.to.dtype", Ref(0), Const("dtype", "int64"), out=spec((3,), "int64")),), (1,))
    assert reference.build(counted, "float64")([torch.tensor([1.5, 2.5, -1.5])])[0].tolist() == [1, 2, -1]
    bits = Subgraph((x,), (op("aten.view.dtype", Ref(0), Const("dtype", "int32"), out=spec((3,), "int32")),), (1,))
    assert reference.build(bits)([torch.ones(3)])[0].dtype == torch.int32
    with pytest.raises(ValueError, match="reinterprets bits"):
        reference.build(bits, "float64")


@pytest.mark.parametrize("target", ["aten.nonsense.default", "higher_order.cond", "torch._C._set_grad_enabled"])
def test_what_is_no_operator_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="operator"):
        reference.build(Subgraph((H,), (op(target, Ref(0), out=H),), (1,)))


def test_spec_of_and_inputs_keep_layout() -> None:
    tensor = torch.randn(40)[1:].as_strided((3, 4), (1, 5)).requires_grad_()
    described = reference.spec_of(tensor)
    assert described == TensorSpec((3, 4), "float32", (1, 5), requires_grad=True, aligned=False)
    graph = Subgraph((described,), (op("aten.relu.default", Ref(0), out=described),), (1,))
    scope: dict[str, Any] = {"torch": torch}
    exec(reference.make_inputs_source(graph), scope)
    assert reference.spec_of(scope["make_inputs"]("cpu")[0]) == described


def test_embedding_indices_stay_in_range() -> None:
    table, ids = spec((2, 7)), spec((50,), "int64")
    graph = Subgraph((table, ids), (op("aten.embedding.default", Ref(0), Ref(1), out=spec((50, 7))),), (2,))
    scope: dict[str, Any] = {"torch": torch}
    exec(reference.make_inputs_source(graph), scope)
    assert reference.build(graph)(scope["make_inputs"]("cpu"))[0].shape == (50, 7)


def test_the_truth_of_a_quotient_of_integers_is_not_rounded_to_float32() -> None:
    graph = Subgraph((spec((64,), "int64"),), (op("aten.div.Tensor", Ref(0), 7, out=spec((64,))),), (1,))
    x = torch.arange(64)
    (truth,) = reference.build(graph, "float64")([x])
    assert torch.equal(truth, x.double() / 7)
    assert reference.build(graph)([x])[0].dtype == torch.float32
