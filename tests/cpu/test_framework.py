"""The framework contender finds its built-ins however a model spells them, and leaves alone what only looks alike."""

from __future__ import annotations

import math

import pytest
import torch

from fusescout import reference
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework import rewrites
from fusescout.device import Device
from fusescout.flops import op_class
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.reference import spec_of
from fusescout.verify import Verifier

CPU, CUDA = Device("cpu", "test", "x86", 1), Device("cuda", "test", "sm_90a", 132)


def graph_of(
    inputs: list[torch.Tensor], *ops: tuple[str, tuple[object, ...]], outputs: tuple[int, ...] = ()
) -> Subgraph:
    """A sub-graph from (operator, args); shapes come from running it."""
    values, made = list(inputs), []
    for target, args in ops:
        _, name, overload = target.split(".")
        real = [values[a.to] if isinstance(a, Ref) else list(a) if isinstance(a, tuple) else a for a in args]
        values.append(getattr(getattr(torch.ops.aten, name), overload)(*real))
        made.append(Op(target, args, (), spec_of(values[-1])))
    specs = tuple(spec_of(t) for t in inputs)
    assert all(isinstance(s, TensorSpec) for s in specs)
    return Subgraph(specs, tuple(made), outputs or (len(values) - 1,))  # type: ignore[arg-type]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def spelled_gelu(c: float = 0.044715, dtype: torch.dtype = torch.float32) -> Subgraph:
    return graph_of(
        [x(8, 64, dtype=dtype)],
        ("aten.mul.Tensor", (Ref(0), Ref(0))),
        ("aten.mul.Tensor", (Ref(1), Ref(0))),
        ("aten.mul.Tensor", (Ref(2), c)),
        ("aten.add.Tensor", (Ref(0), Ref(3))),
        ("aten.mul.Tensor", (Ref(4), math.sqrt(2 / math.pi))),
        ("aten.tanh.default", (Ref(5),)),
        ("aten.add.Tensor", (Ref(6), 1.0)),
        ("aten.mul.Tensor", (Ref(7), Ref(0))),
        ("aten.mul.Tensor", (Ref(8), 0.5)),
    )


def erf_gelu() -> Subgraph:
    return graph_of(
        [x(8, 64)],
        ("aten.div.Tensor", (Ref(0), math.sqrt(2))),
        ("aten.erf.default", (Ref(1),)),
        ("aten.add.Tensor", (Ref(2), 1)),
        ("aten.mul.Tensor", (Ref(0), Ref(3))),
        ("aten.mul.Tensor", (Ref(4), 0.5)),
    )


def swish(beta: float) -> Subgraph:
    return graph_of(
        [x(8, 64)],
        ("aten.mul.Tensor", (Ref(0), beta)),
        ("aten.sigmoid.default", (Ref(1),)),
        ("aten.mul.Tensor", (Ref(0), Ref(2))),
    )


def spelled_softmax() -> Subgraph:
    return graph_of(
        [x(4, 8, 64)],
        ("aten.amax.default", (Ref(0), (-1,), True)),
        ("aten.sub.Tensor", (Ref(0), Ref(1))),
        ("aten.exp.default", (Ref(2),)),
        ("aten.sum.dim_IntList", (Ref(3), (-1,), True)),
        ("aten.div.Tensor", (Ref(3), Ref(4))),
    )


def spelled_rms_norm(eps: float = 1e-6) -> Subgraph:
    return graph_of(
        [x(4, 8, 64), x(64)],
        ("aten.pow.Tensor_Scalar", (Ref(0), 2)),
        ("aten.mean.dim", (Ref(2), (-1,), True)),
        ("aten.add.Tensor", (Ref(3), eps)),
        ("aten.rsqrt.default", (Ref(4),)),
        ("aten.mul.Tensor", (Ref(0), Ref(5))),
        ("aten.mul.Tensor", (Ref(1), Ref(6))),
    )


def spelled_layer_norm() -> Subgraph:
    return graph_of(
        [x(8, 64), x(64), x(64)],
        ("aten.mean.dim", (Ref(0), (-1,), True)),
        ("aten.sub.Tensor", (Ref(0), Ref(3))),
        ("aten.pow.Tensor_Scalar", (Ref(4), 2)),
        ("aten.mean.dim", (Ref(5), (-1,), True)),
        ("aten.add.Tensor", (Ref(6), 1e-5)),
        ("aten.sqrt.default", (Ref(7),)),
        ("aten.div.Tensor", (Ref(4), Ref(8))),
        ("aten.mul.Tensor", (Ref(9), Ref(1))),
        ("aten.add.Tensor", (Ref(10), Ref(2))),
    )


def attention(masked: bool, turned: tuple[int, int] = (-1, -2), dim: int = -1, extra: bool = False) -> Subgraph:
    heads = 16 if turned == (1, 3) else 3
    q, k, v = x(2, heads, 16, 16), x(2, heads, 16, 16), x(2, heads, 16, 16)
    inputs = [q, k, v, *([x(2, 1, 1, 16)] if masked else [])]
    n = len(inputs)
    ops: list[tuple[str, tuple[object, ...]]] = [
        ("aten.transpose.int", (Ref(1), *turned)),
        ("aten.matmul.default", (Ref(0), Ref(n))),
        ("aten.div.Tensor", (Ref(n + 1), 4.0)),
    ]
    if masked:
        ops.append(("aten.add.Tensor", (Ref(n + 2), Ref(3))))
    ops.append(("aten.softmax.int", (Ref(n + len(ops) - 1), dim)))
    ops.append(("aten.matmul.default", (Ref(n + len(ops) - 1), Ref(2))))
    last = n + len(ops) - 1
    return graph_of(inputs, *ops, outputs=(last - 1, last) if extra else (last,))


def causal_attention() -> Subgraph:
    """As minimal GPTs write it: what lies ahead is filled with -inf."""
    return graph_of(
        [x(2, 3, 16, 16), x(2, 3, 16, 16), x(2, 3, 16, 16), torch.ones(1, 1, 16, 16).triu(1).bool()],
        ("aten.transpose.int", (Ref(1), -2, -1)),
        ("aten.matmul.default", (Ref(0), Ref(4))),
        ("aten.mul.Tensor", (Ref(5), 0.25)),
        ("aten.masked_fill.Scalar", (Ref(6), Ref(3), -math.inf)),
        ("aten.softmax.int", (Ref(7), -1)),
        ("aten.matmul.default", (Ref(8), Ref(2))),
    )


def einsum_attention(crossed: bool = False, masked: bool = False) -> Subgraph:
    """As torch spells out einsums: dimensions of size 1 come and go, batch and heads are one."""
    k = int(masked)
    return graph_of(
        [x(6, 16, 8), x(6, 8, 16), x(6, 16, 8), *([x(2, 1, 1, 16)] if masked else [])],
        ("aten.bmm.default", (Ref(0), Ref(1))),
        ("aten.view.default", (Ref(3 + k), (2, 3, 16, 1, 16))),
        ("aten.permute.default", (Ref(4 + k), (0, 1, 4, 3, 2) if crossed else (0, 1, 2, 4, 3))),
        ("aten.reshape.default", (Ref(5 + k), (2, 3, 16, 16))),
        *([("aten.add.Tensor", (Ref(7), Ref(3)))] if masked else []),
        ("aten.mul.Tensor", (Ref(6 + 2 * k), 0.25)),
        ("aten.softmax.int", (Ref(7 + 2 * k), -1)),
        ("aten.permute.default", (Ref(8 + 2 * k), (0, 2, 1, 3))),
        ("aten.unsqueeze.default", (Ref(9 + 2 * k), 4)),
        ("aten.transpose.int", (Ref(10 + 2 * k), 1, 2)),
        ("aten.reshape.default", (Ref(11 + 2 * k), (6, 16, 16))),
        ("aten.bmm.default", (Ref(12 + 2 * k), Ref(2))),
    )


def packed_attention() -> Subgraph:
    """As `nn.MultiheadAttention` computes it: heads and batch in one dimension."""
    return graph_of(
        [x(6, 16, 8), x(6, 16, 8), x(6, 16, 8), x(6, 1, 16)],
        ("aten.transpose.int", (Ref(1), -2, -1)),
        ("aten.bmm.default", (Ref(0), Ref(4))),
        ("aten.add.Tensor", (Ref(5), Ref(3))),
        ("aten.softmax.int", (Ref(6), -1)),
        ("aten.bmm.default", (Ref(7), Ref(2))),
    )


@pytest.mark.parametrize(
    ("graph", "calls"),
    [
        (spelled_gelu(), ["gelu"]),
        (erf_gelu(), ["gelu"]),
        (swish(1.0), ["silu"]),
        (spelled_softmax(), ["softmax"]),
        (spelled_rms_norm(), ["rms_norm", "rms_norm weight"]),
        (spelled_layer_norm(), ["layer_norm", "layer_norm weight", "layer_norm bias"]),
        (attention(masked=False), ["scaled_dot_product_attention"]),
        (attention(masked=True), ["scaled_dot_product_attention"]),
        (einsum_attention(), ["scaled_dot_product_attention"]),
    ],
    ids=[
        *("tanh-gelu", "erf-gelu", "silu", "softmax", "rms_norm", "layer_norm", "attention", "masked attention"),
        "attention by einsum",
    ],
)
def test_spelled_out_built_ins_are_found_and_pass(graph: Subgraph, calls: list[str]) -> None:
    variants = Framework().variants(graph, CPU, "quick")
    assert variants == [{"calls": calls[:n]} for n in range(len(calls), 0, -1)]
    built = Framework().build(graph, variants[0], CPU)
    reason = Verifier(graph, None, "cpu").check(built.run, "full").reason
    # torch's exact GELU has a coarser erf on some CPUs than torch.erf, and is refused for that where it has.
    assert reason == "" or (graph.ops[1].name == "erf" and "an error of" in reason)
    before, after = (
        [op for op in g.ops if op_class(op.target) != "view"] for g in (graph, rewrites(graph, CPU)[-1][1])
    )
    assert len(after) < len(before)
    compile(Framework().repro(graph, variants[0], CPU), "repro", "exec")


@pytest.mark.parametrize(
    "graph",
    [
        spelled_gelu(c=0.05),
        swish(1.702),
        attention(masked=False, dim=-2),
        attention(masked=False, extra=True),
        causal_attention(),
        einsum_attention(crossed=True),
        einsum_attention(masked=True),
        graph_of([x(4, 4)], ("aten.tanh.default", (Ref(0),))),
    ],
    ids=[
        "other constant",
        "quick gelu",
        "softmax over rows",
        "weights escape",
        "a filled score may have been NaN",
        "rows and columns change places",
        "a mask in another shape than the product",
        "one op",
    ],
)
def test_what_only_looks_alike_is_left_alone(graph: Subgraph) -> None:
    assert isinstance(Framework().variants(graph, CPU, "quick"), str)


def test_a_matmul_with_another_permutation_of_k_is_not_turned_into_attention_over_the_wrong_key() -> None:
    straight, crossed = attention(masked=False), attention(masked=False, turned=(1, 3))
    assert crossed.tensor(3).shape == (2, 16, 16, 16)
    assert [op.name for op in rewrites(straight, CPU)[0][1].ops] == ["scaled_dot_product_attention", "contiguous"]
    wrong = Verifier(crossed, None, "cpu")
    assert all(wrong.check(reference.build(r), "full").reason == "" for _, r in rewrites(crossed, CPU))


def test_attention_of_three_dimensions_gets_the_fourth_that_fused_kernels_need() -> None:
    graph = packed_attention()
    ((name, rewritten),) = rewrites(graph, CPU)
    call = next(op for op in rewritten.ops if op.name == name == "scaled_dot_product_attention")
    assert all(len(rewritten.tensor(i).shape) == 4 for i in call.inputs)
    assert Verifier(graph, None, "cpu").check(reference.build(rewritten), "full").reason == ""


def test_eps_is_read_off_the_chain() -> None:
    for eps in (1e-5, 1e-6, 1e-2):
        rewritten = rewrites(spelled_rms_norm(eps), CPU)[-1][1]
        assert rewritten.ops[0].args[-1] == eps


@pytest.mark.parametrize("rank", [2, 3])
def test_linear_and_activation_become_one_cublaslt_call_on_cuda_only(rank: int) -> None:
    lead = (4, 8)[: rank - 1]
    linear = ("aten.linear.default", (Ref(0), Ref(1), Ref(2)))
    graph = graph_of([x(*lead, 32), x(16, 32), x(16)], linear, ("aten.relu.default", (Ref(3),)))
    assert isinstance(Framework().variants(graph, CPU, "quick"), str)
    assert [name for name, _ in rewrites(graph, CUDA)] == ["_addmm_activation"]
    built = Framework().build(graph, {"calls": ["_addmm_activation"]}, CUDA)
    assert Verifier(graph, None, "cpu").check(built.run, "full").reason == ""
