"""Costs, bounds and the op graph, from hand-made graphs: no torch."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusescout.device import Device
from fusescout.flops import cost
from fusescout.flops import is_viewable
from fusescout.flops import op_class
from fusescout.flops import op_name
from fusescout.graph import OpGraph
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec
from fusescout.profiling import KernelTime
from fusescout.profiling import NodeTime
from fusescout.profiling import Profile
from fusescout.session import Interval

DEVICE = Device("cuda", "test", "sm_90a", 132, 4e12, {"bfloat16": 6e14, "float32": 5e13}, launch_us=4.0)


def spec(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    full, step = [], 1
    for n in reversed(shape):
        full.insert(0, step)
        step *= n
    return TensorSpec(shape, dtype, stride or tuple(full))


def price(target: str, out: TensorSpec, *args: object, **kwargs: object) -> tuple[float, float]:
    """Cost of an operator; tensor specs among the arguments stand for inputs."""
    refs = [Ref(f"i{k}") if isinstance(a, TensorSpec) else a for k, a in enumerate(args)]
    node = Node("n", target, tuple(refs), tuple(kwargs.items()), out)  # type: ignore[arg-type]
    return cost(node, [a for a in args if isinstance(a, TensorSpec)])


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten.linear.default", "gemm"), ("aten.add_.Tensor", "pointwise"), ("aten.max.other", "pointwise"),
        ("aten.max.dim", "reduction"), ("aten.__and__.Tensor", "pointwise"), ("aten.__ior__.Tensor", "pointwise"),
        ("getitem", "view"), ("_operator.getitem", "view"), ("aten.batch_norm.default", "norm"),
        ("aten.scaled_dot_product_attention.default", "attention"), ("aten.conv2d.padding", "conv"),
        ("aten.clone.default", "copy"), ("aten.bernoulli_.float", "random"), ("aten.cat.default", "other"),
        ("aten._to_copy.default", "pointwise"), ("aten.special_expit.default", "pointwise"),
        ("aten.special_softmax.default", "softmax"), ("mylib.add.default", "other"), ("aten.sym_size.int", "view"),
    ],
)  # fmt: skip
def test_op_class(target: str, kind: str) -> None:
    assert op_class(target) == kind


def test_op_name_drops_in_place_marks() -> None:
    assert [op_name(t) for t in ("aten.add_.Tensor", "aten.__ixor__.Scalar", "aten._softmax.default", "getitem")] == [
        "add", "__xor__", "_softmax", "getitem",
    ]  # fmt: skip


def test_gemm_costs() -> None:
    x, w, b = spec(8, 32, 64), spec(128, 64), spec(128)
    out = spec(8, 32, 128)
    flops = 2 * 8 * 32 * 128 * 64
    assert price("aten.linear.default", out, x, w) == (flops, 4 * (8 * 32 * 64 + 128 * 64 + 8 * 32 * 128))
    assert price("aten.linear.default", out, x, w, b)[0] == flops + 8 * 32 * 128
    assert price("aten.addmm.default", spec(4, 6), spec(6), spec(4, 5), spec(5, 6))[0] == 2 * 4 * 5 * 6 + 24
    assert price("aten.baddbmm.default", spec(2, 4, 6), spec(2, 4, 6), spec(2, 4, 5), spec(2, 5, 6))[0] == 2 * 240 + 48
    assert price("aten.matmul.default", spec(2, 4, 6), spec(2, 4, 5), spec(5, 6))[0] == 2 * 240
    assert price("aten.mv.default", spec(4), spec(4, 5), spec(5))[0] == 40


def test_einsum_flops_come_from_the_equation() -> None:
    a, b = spec(2, 3, 5), spec(2, 5, 7)
    node = Node("n", "aten.einsum.default", ("bij, bjk -> bik", (Ref("a"), Ref("b"))), (), spec(2, 3, 7))
    assert cost(node, [a, b]).flops == 2 * 2 * 3 * 5 * 7


def test_conv_costs() -> None:
    image, weight = spec(2, 8, 10, 10), spec(16, 4, 3, 3)
    assert price("aten.conv2d.default", spec(2, 16, 8, 8), image, weight, None)[0] == 2 * 2 * 16 * 64 * 4 * 9
    transposed = price("aten.conv_transpose2d.input", spec(2, 6, 12, 12), image, spec(8, 6, 3, 3), None)
    assert transposed[0] == 2 * image.numel * 6 * 9


def test_attention_costs_halve_when_causal() -> None:
    q, k = spec(2, 4, 16, 8), spec(2, 4, 32, 8)
    full = 4 * 2 * 4 * 16 * 32 * 8
    target = "aten.scaled_dot_product_attention.default"
    assert price(target, q, q, k, k)[0] == full
    assert price(target, q, q, k, k, None, 0.0, True)[0] == full / 2
    assert price(target, q, q, k, k, is_causal=True)[0] == full / 2


def test_broadcast_operands_count_once() -> None:
    bias = spec(64, 128, stride=(0, 1))
    assert price("aten.add.Tensor", spec(64, 128), spec(64, 128), bias) == (64 * 128, 4 * (2 * 64 * 128 + 128))


def test_embedding_reads_only_its_rows() -> None:
    out = spec(4, 16)
    assert price("aten.embedding.default", out, spec(50000, 16), spec(4, dtype="int64")) == (0, 2 * out.nbytes + 32)


def test_relabelling_is_free_and_copying_is_not() -> None:
    x = spec(2, 16, 4, 8)
    turned = spec(2, 4, 16, 8, stride=(512, 8, 32, 1))
    assert price("aten.transpose.int", turned, x, 1, 2) == (0, 0)
    assert price("aten.reshape.default", spec(2, 512), x, (2, 512)) == (0, 0)
    assert price("aten.reshape.default", spec(2, 64, 8), turned, (2, 64, 8)) == (0, 2 * turned.nbytes)
    assert price("aten.contiguous.default", x, x) == (0, 0)
    assert price("aten.contiguous.default", spec(2, 4, 16, 8), turned) == (0, 2 * x.nbytes)
    assert price("aten.dropout.default", x, x, 0.1, False) == (0, 0)
    assert price("aten.dropout.default", x, x, 0.1, True)[1] > 0
    assert price("aten.to.dtype", x, x, "float32") == (0, 0)
    assert price("aten._to_copy.default", spec(2, 16, 4, 8, dtype="float16"), x)[1] == x.nbytes * 1.5


def test_unknown_operators_still_have_bytes() -> None:
    assert price("mylib.magic.default", spec(8), spec(8)) == (0, 64)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_contiguous_tensors_can_take_any_shape(shape: list[int]) -> None:
    x = spec(*shape)
    assert is_viewable(x, [x.numel])
    assert is_viewable(x, [1, x.numel, 1])


def model() -> Graph:
    x, w = (
        Node("x", "input", (), (), spec(4096, 4096, dtype="bfloat16")),
        Node("w", "attr", (), (), spec(4096, 4096, dtype="bfloat16"), is_parameter=True),
    )
    linear = Node("linear", "aten.linear.default", (Ref("x"), Ref("w")), (), x.out, "mlp.fc", "model.py:3")
    relu = Node("relu", "aten.relu.default", (Ref("linear"),), (), x.out, "mlp", "model.py:4")
    view = Node("view", "aten.view.default", (Ref("relu"), (-1,)), (), spec(4096 * 4096, dtype="bfloat16"))
    tiny = Node("tiny", "aten.sum.default", (Ref("view"), (0,)), (), spec(1, dtype="bfloat16"))
    small = Node("small", "aten.neg.default", (Ref("tiny"),), (), spec(1, dtype="bfloat16"))
    return Graph(0, (x, w, linear, relu, view, tiny, small), ("small",))


def profile() -> Profile:
    nodes = (NodeTime(0, "linear", 250.0, 1, 500.0, 2), NodeTime(0, "relu", 20.0, 1), NodeTime(0, "small", 2.0, 1))
    kernels = (KernelTime("gemm", 1, 250.0, ("0:linear",)), KernelTime("other", 4, 550.0, ("0:linear", "0:relu")))
    return Profile(
        "cuda", Interval(mid=1000.0, low=990.0, high=1010.0, samples=9), nodes, kernels, 800.0, 772.0, 28.0, 790.0, 5,
        150.0, 50.0, 10.0, False, 5, "kernels",
    )  # fmt: skip


def test_op_graph_joins_times_costs_and_bounds() -> None:
    graph = OpGraph.build([model()], profile(), DEVICE)
    nodes = graph.digraph.nodes
    assert "0:x" not in nodes
    linear, relu = nodes["0:linear"], nodes["0:relu"]
    assert linear["bound"] == "compute"
    assert linear["bound_us"] == pytest.approx(2 * 4096**3 / 6e14 * 1e6)
    assert linear["bound_share"] == pytest.approx(linear["bound_us"] / 250)
    assert linear["backward_us"] == graph.backward_us(0, "linear") == 500.0
    assert (relu["bound"], relu["bound_us"]) == ("memory", pytest.approx(4 * 4096**2 / 4e12 * 1e6))
    assert nodes["0:view"]["bound"] == "free"
    assert nodes["0:small"]["bound"] == "launch"
    assert graph.time_us(0, "relu") == 20.0
    assert graph.time_us(0, "x") == graph.time_us(3, "relu") == 0.0
    assert [(e.source, e.target) for e in graph.edges()][:2] == [("linear", "relu"), ("relu", "view")]


def test_rows_and_frame() -> None:
    graph = OpGraph.build([model()], profile(), DEVICE)
    rows = graph.rows()
    assert [r.node for r in rows] == ["linear", "relu", "view", "tiny", "small"]
    assert rows[0].share == 250 / 800
    assert rows[0].shapes == "bfloat16[4096,4096], bfloat16[4096,4096] → bfloat16[4096,4096]"
    frame = graph.to_pandas()
    assert frame.loc["0:linear", "module"] == "mlp.fc"
    assert frame["time_us"].sum() == 272.0


def test_without_profile_or_ceilings_nothing_is_invented() -> None:
    graph = OpGraph.build([model()], None, Device("cpu", "x", "x86_64", 2))
    assert {r.bound for r in graph.rows()} == {"", "free"}
    assert all(r.time_us == r.share == r.bound_share == 0 for r in graph.rows())


def test_two_graphs_may_reuse_names() -> None:
    a = model()
    b = Graph(1, a.nodes, a.outputs)
    graph = OpGraph.build([a, b], None, DEVICE)
    assert len(graph.digraph) == 10
    assert {e.graph for e in graph.edges()} == {0, 1}


def test_profile_record() -> None:
    found = profile()
    info = found.info(OpGraph.build([model()], found, DEVICE), 1)
    assert info.coverage == 772 / 800
    assert info.idle_share == 0.21
    assert [k.share for k in info.kernels] == [250 / 800, 550 / 800]
    assert found.time_us(0, "relu") == 20.0
    assert found.time_us(0, "nothing") == 0.0


def test_nothing_here_needs_torch() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import fusescout.graph, fusescout.flops, fusescout.probe, fusescout.profiling, fusescout.profiling.trace, "
        "fusescout.profiling.sequence\nassert 'networkx' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
