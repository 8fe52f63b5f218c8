"""The GEMM templates: what they cover, the numbers on the CPU target, and the Hopper schedules' generated code."""

import re

import pytest
import torch
from cuda_on_cpu import compile_threads
from fusescout.templates import gated_mlp
from fusescout.templates import gemm_epilogue
from gemm_chains import CPU
from gemm_chains import check
from gemm_chains import conv1d
from gemm_chains import meta
from gemm_chains import subgraph
from lowering import HOPPER
from lowering import lowered
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusescout import reference
from fusescout.capture.encode import encode_graph
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.tilelang import TileLang
from fusescout.environment import nvcc_path
from fusescout.regions import find_regions
from fusescout.tolerance import Allowance


def new_gelu(h):
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))


X, W, WT, B = (2, 5, 24), (17, 24), (24, 17), (17,)
CHAINS = {
    "bias and exact gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), X, W, B),
    "tanh gelu in pieces, Conv1D": (lambda x, w, b: new_gelu(conv1d(x, w, b)), X, WT, B),
    "Conv1D and residual": (lambda x, w, b, r: conv1d(x, w, b) + r, X, WT, B, (2, 5, 17)),
    "dropout in eval and residual": (
        lambda x, w, b, r: F.dropout(F.linear(x, w, b), 0.1, False) + r,
        X,
        W,
        B,
        (2, 5, 17),
    ),
    "position table (1, T, N)": (lambda x, w, b, p: F.linear(x, w, b) + p, X, W, B, (1, 5, 17)),
    "one row per batch (B, 1, N)": (lambda x, w, b, p: F.linear(x, w, b) * p, X, W, B, (2, 1, 17)),
    "column (B, T, 1)": (lambda x, w, b, p: F.linear(x, w, b) * p, X, W, B, (2, 5, 1)),
    "column per position (1, T, 1)": (lambda x, w, b, p: F.linear(x, w, b) * p, X, W, B, (1, 5, 1)),
    "column per batch (B, 1, 1)": (lambda x, w, b, p: F.linear(x, w, b) * p, X, W, B, (2, 1, 1)),
    "scalar tensor": (lambda x, w, b, p: F.linear(x, w, b) * p, X, W, B, ()),
    "before and after the activation": (lambda x, w, b: (h := F.linear(x, w, b), F.silu(h)), X, W, B),
    "alpha and beta": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0).relu(), (7, 24), WT, B),
    "matrix bias of a square result": (lambda x, w, b: torch.addmm(b, x, w).relu(), (17, 24), WT, (17, 17)),
    "column bias of a square result": (lambda x, w, b: torch.addmm(b, x, w).relu(), (17, 24), WT, (17, 1)),
    "transposed input": (lambda x, w, r: torch.mm(x.t(), w).relu() + r, (24, 7), WT, (7, 17)),
    "batched, transposed input": (lambda x, w: torch.bmm(x.transpose(1, 2), w).tanh(), (3, 24, 5), (3, 24, 17)),
    "transposed weight": (lambda x, w: torch.mm(x, w.t()).sigmoid(), (7, 24), W),
    "matmul and a computed vector": (lambda x, w, g, b: torch.matmul(x, w) * (1 + g) + b, X, WT, B, B),
    "residual of another shape": (lambda x, w, b, r: F.linear(x, w, b) + r.view(2, 5, 17), X, W, B, (10, 17)),
    "no epilogue": (lambda x, w: torch.matmul(x, w), X, WT),
    "batched": (lambda x, w: torch.bmm(x, w).tanh(), (3, 5, 24), (3, 24, 17)),
    "batched, transposed weight": (lambda x, w: x @ w.transpose(-1, -2) * 0.2, (2, 3, 5, 24), (2, 3, 17, 24)),
    "attention scores and mask": (
        lambda q, k, m: (q.view(2, 5, 3, 8).transpose(1, 2) @ k.view(2, 7, 3, 8).permute(0, 2, 3, 1)) * 0.3 + m,
        (2, 5, 24),
        (2, 7, 24),
        (2, 1, 1, 7),
    ),
    "batch as one dimension, mask with two": (
        lambda x, w, m: torch.bmm(x, w).view(2, 3, 5, 17) + m,
        (6, 5, 24),
        (6, 24, 17),
        (2, 1, 5, 17),
    ),
    "baddbmm with one bias for all": (
        lambda b, x, w: torch.baddbmm(b, x, w, beta=0.5, alpha=2.0).relu(),
        (1, 5, 17),
        (3, 5, 24),
        (3, 24, 17),
    ),
    "one weight for all, strided rows": (lambda x, w: F.gelu(x.transpose(0, 1) @ w), (4, 3, 24), WT),
    "weights of a batch, one input": (lambda x, w, b: (x @ w + b).relu(), (5, 24), (3, 24, 17), (3, 1, 17)),
    "row vector per matrix and residual": (
        lambda x, w, b, r: (x @ w + b) * 2 + r,
        (2, 3, 5, 24),
        (3, 24, 17),
        (3, 1, 17),
        (2, 3, 5, 17),
    ),
    "column per matrix": (lambda x, w, c: (x @ w) * c, (3, 5, 24), (3, 24, 17), (3, 5, 1)),
    "a batch of one": (lambda x, w: torch.bmm(x, w).sigmoid(), (1, 5, 24), (1, 24, 17)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_is_as_close_to_the_truth_as_eager(name, tmp_path):
    function, *shapes = CHAINS[name]
    torch.manual_seed(0)
    check(gemm_epilogue, function, *(torch.randn(s) for s in shapes), folder=tmp_path)


SIZES = [(1, 1, 1), (3, 7, 17), (17, 3, 64), (64, 129, 7), (100, 1, 129), (129, 100, 3), (7, 300, 1), (33, 257, 100)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_odd_sizes(size, tmp_path):
    m, n, k = size
    torch.manual_seed(m)
    inputs = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
    check(gemm_epilogue, lambda x, w, b, r: F.relu(F.linear(x, w, b)) + r, *inputs, folder=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_accumulates_in_float32(dtype, tmp_path):
    torch.manual_seed(0)
    inputs = (torch.randn(s).to(dtype) for s in ((9, 300), (20, 300), (20,)))
    check(gemm_epilogue, lambda x, w, b: F.gelu(F.linear(x, w, b)), *inputs, folder=tmp_path)


def test_nan_and_infinity_go_where_eager_lets_them(tmp_path):
    torch.manual_seed(0)
    x, w, r = torch.randn(6, 8), torch.randn(5, 8), torch.randn(6, 5)
    x[0, 0], x[1, 1], r[2, 2], r[3, 3] = torch.nan, torch.inf, torch.nan, -torch.inf
    check(gemm_epilogue, lambda x, w, r: F.relu(F.linear(x, w) + r), x, w, r, folder=tmp_path)


def chunked(x, w, *b):
    gate, up = F.linear(x, w, *b).chunk(2, -1)
    return F.silu(gate) * up


def sliced(x, w, b):
    both = F.linear(x, w, b)
    return both[..., :17] * F.gelu(both[..., 17:])


GATED = {
    "two weights": (lambda x, g, u, b: F.silu(F.linear(x, g, b)) * F.linear(x, u), W, W, B),
    "packed": (chunked, (34, 24)),
    "packed, the gate behind, bias": (sliced, (34, 24), (34,)),
    "packed, one column each, bias": (lambda x, w, b: chunked(x, w, b), (2, 24), (2,)),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_mlp(name, tmp_path):
    function, *shapes = GATED[name]
    torch.manual_seed(0)
    check(gated_mlp, function, *(torch.randn(s) for s in ((2, 5, 24), *shapes)), folder=tmp_path)


@pytest.mark.parametrize("name", GATED)
def test_gated_mlps_are_found(name):
    function, *shapes = GATED[name]
    inputs = [torch.empty(s, device="meta") for s in (X, *shapes)]
    graph = encode_graph(make_fx(function, pre_dispatch=True)(*inputs), 0)
    ops = {n.name for n in graph.nodes if n.is_op}
    assert ops in [set(r.nodes) for r in find_regions(graph) if r.family == "gated_mlp"]


def test_a_packed_gate_is_offered_to_all_templates_and_taken_by_one():
    variants = TileLang().variants(meta(chunked, (8, 64), (64, 64)), HOPPER, "quick")
    assert {v["template"] for v in variants} == {"gated_mlp"}


def test_a_packed_result_that_is_used_otherwise_is_not_gated():
    def both(x, w):
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up, up

    assert "1 matrix products, not 2" in gated_mlp.supports(meta(both, (8, 64), (64, 64)), HOPPER)
    rows = meta(lambda x, w: torch.mul(*F.linear(x, w).chunk(2, 0)), (8, 64), (64, 64))
    assert "1 matrix products, not 2" in gated_mlp.supports(rows, HOPPER)


REFUSED = {
    "2 matrix products": (lambda x, w, v: F.linear(x, w) * F.linear(x, v), (8, 64), (32, 64), (32, 64)),
    "not contiguous": (lambda x, w: torch.matmul(x.permute(2, 0, 1), w).relu(), (8, 64, 3), (64, 32)),
    "regroups its columns": (lambda x, w: F.linear(x, w).view(8, 4, 8).relu(), (8, 64), (32, 64)),
    "pointwise": (lambda x, w: F.linear(x, w).cumsum(-1), (8, 64), (32, 64)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_cover_has_a_reason(reason):
    function, *shapes = REFUSED[reason]
    assert reason in gemm_epilogue.supports(meta(function, *shapes), HOPPER)


def test_fp32_on_cuda_is_refused_as_tf32_but_for_a_few_rows():
    graph, few = (meta(lambda x, w: F.linear(x, w).relu(), (m, 64), (32, 64), dtype=torch.float32) for m in (16, 8))
    assert "TF32" in gemm_epilogue.supports(graph, HOPPER)
    assert gemm_epilogue.supports(graph, CPU) is None
    assert gemm_epilogue.supports(few, HOPPER) is None
    assert {c["schedule"] for c in gemm_epilogue.configs(few, HOPPER)} == {"vector"}


def test_configs_are_json_safe_and_start_with_schedules_that_fit_the_shape():
    big = meta(lambda x, w, b: F.gelu(F.linear(x, w, b)), (8192, 768), (3072, 768), (3072,))
    few = meta(lambda x, w, b: F.silu(F.linear(x, w, b)), (16, 4096), (4096, 4096), (4096,))
    first = gemm_epilogue.configs(big, HOPPER)
    assert len(first) > 8 and {c["schedule"] for c in first[:8]} >= {"pingpong", "coop"}
    assert gemm_epilogue.configs(few, HOPPER)[0]["BM"] == 16
    assert all(isinstance(v, int | str) for c in first for v in c.values())


def test_few_rows_get_schedules_of_their_own_and_not_one_alone():
    def schedules(m, n, k):
        graph = meta(lambda x, w: F.silu(F.linear(x, w)), (m, k), (n, k))
        return [c["schedule"] for c in gemm_epilogue.configs(graph, HOPPER)[:4]]

    assert schedules(1, 4096, 4096)[:2] == ["vector", "vector"] and "split" in schedules(1, 4096, 4096)
    assert schedules(16, 4096, 4096).count("split") == schedules(64, 1000, 2048).count("split") == 2
    assert schedules(512, 1024, 4096)[0] == "split"  # 32 tiles for 132 multiprocessors
    assert "split" not in schedules(512, 4096, 4096) + schedules(3152, 3072, 768)


def cuda_source(template, graph, schedule, cluster=1):
    kinds = ((c["schedule"], c.get("cluster", 1), c) for c in template.configs(graph, HOPPER))
    config = next(c for s, k, c in kinds if (s, k) == (schedule, cluster))
    return lowered(template.kernel(graph, config, HOPPER)).kernel_source


SCHEDULES = {
    "pingpong": False,
    "pingpong in pairs": True,
    "coop": True,
    "coop in pairs": False,
    "roles": False,
    "auto": True,
}


@pytest.mark.parametrize(("schedule", "residual"), SCHEDULES.items(), ids=SCHEDULES)
def test_hopper_schedules_use_the_copy_engine_and_wgmma(schedule, residual):
    if residual:
        graph = meta(lambda x, w, b, r: F.linear(x, w, b) + r, (8200, 776), (1536, 776), (1536,), (8200, 1536))
    else:
        graph = meta(lambda x, w, b: F.gelu(F.linear(x, w, b)), (8200, 776), (1536, 776), (1536,))
    cluster = 2 if schedule.endswith("pairs") else 1
    schedule = schedule.split()[0]
    source = cuda_source(gemm_epilogue, graph, schedule, cluster)
    assert "wgmma_ss<" in source and "tma_load(" in source and "tma_store(" in source
    assert ("tma_load_multicast(" in source) == (cluster == 2)
    if cluster == 2:  # once before barriers of the other block are used, once before a block leaves
        assert source.count("tl::cluster_sync()") == 2
    assert source.count("__syncthreads()") == 2 - cluster, (
        "a second block-wide barrier would dead-lock warp-specialised roles"
    )
    if schedule in ("pingpong", "coop"):
        # Before a tile is staged, all threads of its group wait until the last store has left the buffer; before it
        # is stored, each makes its writes visible to the copy engine and waits for the others.
        stage = r"__sync_thread_partial\(\d+, \d+\);(?:(?!__sync)[\s\S])*?stmatrix[\s\S]*?fence_proxy_async\(\);\s*"
        assert len(re.findall(stage + r"tl::__sync_thread_partial\(\d+, \d+\);[\s\S]*?tma_store\(", source)) >= 1
    if schedule == "pingpong":
        assert len(re.findall(r"turn\[\d\]\.wait", source)) == len(re.findall(r"turn\[\d\]\.arrive", source)) == 2


@pytest.mark.parametrize("kind", ["weight [N, K]", "weight [K, N]"])
def test_shared_steps_end_in_one_place_and_order(kind):
    """Blocks of a cluster meet when all have left their sums, and again before the first leaves its memory."""
    function, *shapes = {
        "weight [N, K]": (lambda x, w, b: F.relu(F.linear(x, w, b)), (13, 4104), (1001, 4104), (1001,)),
        "weight [K, N]": (lambda x, w, b: F.relu(conv1d(x, w, b)), (13, 4104), (4104, 1000), (1000,)),
    }[kind]
    graph = meta(function, *shapes)
    configs = [c for c in gemm_epilogue.configs(graph, HOPPER) if c["schedule"] == "split" and c["splits"] > 1]
    clustered = next(c for c in configs if c["join"] == "cluster")
    source = lowered(gemm_epilogue.kernel(graph, clustered, HOPPER)).kernel_source
    body = source[source.rindex('extern "C"') :]
    sums = body.index("a0[", body.index("warpgroup_wait"))
    assert "wgmma_ss<" in body and "tma_load(" in body and body.count("__syncthreads()") == 1
    assert sums < body.index("fs_meet()") < body.index("fs_peer(") < body.rindex("fs_peer(") < body.rindex("fs_meet()")
    peers = re.findall(r"\)\]\)\), (\d)\)", body)
    assert peers == [str(k) for k in range(clustered["splits"])] * (len(peers) // clustered["splits"])
    if kind == "weight [N, K]" and nvcc_path():
        report = cubin_report(gemm_epilogue.kernel(graph, next(c for c in configs if c["join"] == "memory"), HOPPER))
        assert report.spilled_bytes == 0 and "atomic" not in report.source[report.source.index('extern "C"') :]


DOTS = {
    "packed gate, tails": (chunked, (3, 1032), (74, 1032)),
    "weight [K, N], odd sizes, two results": (
        lambda x, w, r: (h := torch.mm(x, w), h.relu() + r),
        (2, 517),
        (517, 37),
        (2, 37),
    ),
}


@pytest.mark.parametrize("name", DOTS)
def test_dot_products_run_thread_by_thread_on_the_cpu(name, tmp_path):
    function, *shapes = DOTS[name]
    torch.manual_seed(0)
    graph, inputs = subgraph(function, *(torch.randn(s).bfloat16() for s in shapes))
    template = gated_mlp if function is chunked else gemm_epilogue
    assert template.supports(graph, HOPPER) is None
    configs = [c for c in template.configs(graph, HOPPER) if c["schedule"] == "vector"]
    beside = {c["threads"] // c["lanes"]: c for c in configs}  # columns side by side; with 32, lanes share nothing
    for side, config in {side: beside[side] for side in (min(beside), max(beside))}.items():
        kernel = template.kernel(graph, config, HOPPER)
        outputs = [torch.full(o.shape, torch.nan, dtype=getattr(torch, o.dtype)) for o in graph.output_specs]
        tensors = {"input": inputs, "output": outputs}
        columns = outputs[0].shape[-1]
        (folder := tmp_path / str(side)).mkdir()
        launch = compile_threads(lowered(kernel).kernel_source, [p.name for p in kernel.params], folder)
        launch([tensors[p.role][p.index] for p in kernel.params], -(-columns // config["BN"]), config["threads"])
        eager, truth = reference.build(graph)(inputs), reference.build(graph, "float64")(inputs)
        for out, e, t in zip(outputs, eager, truth, strict=True):
            assert not (reason := Allowance(e, t).judge(out).reason), f"{config}: {reason}"


@pytest.mark.parametrize("schedule", ["coop", "split"])
def test_an_input_whose_columns_are_contiguous_is_multiplied_as_it_lies(schedule):
    """As the weight's gradient has both of its operands."""
    sizes = ((776, 8200), (776, 1536)) if schedule == "coop" else ((4104, 24), (4104, 1000))
    graph = meta(lambda x, w: torch.mm(x.t(), w) * 0.5, *sizes)
    assert gemm_epilogue.supports(graph, HOPPER) is None
    source = cuda_source(gemm_epilogue, graph, schedule)
    assert re.search(r"wgmma_ss<.*, true, true, 1, 1>" if schedule == "coop" else r"wgmma_ss<", source)
    assert "tma_load(" in source and "__syncthreads()" in source


def heads(q, k, m):
    """Scores of attention over 12 heads that lie side by side in memory, and a mask."""
    return (q.view(4, 512, 12, 64).transpose(1, 2) @ k.view(4, 512, 12, 64).permute(0, 2, 3, 1)) * 0.125 + m


@pytest.mark.parametrize("schedule", ["pingpong", "coop", "auto"])
def test_a_batch_is_read_and_written_by_the_copy_engine(schedule):
    graph = meta(heads, (4, 512, 768), (4, 512, 768), (4, 1, 1, 512))
    assert gemm_epilogue.supports(graph, HOPPER) is None
    source = cuda_source(gemm_epilogue, graph, schedule)
    assert "wgmma_ss<" in source and "tma_store(" in source
    assert schedule == "auto" or "tma_load(" in source  # "auto" copies a single step itself
    assert source.count("__syncthreads()") == (1 if schedule != "auto" else source.count("__syncthreads()"))


def test_batches_that_do_not_line_up_are_refused():
    graph = meta(lambda x, w: (x @ w).reshape(4, 6, 8).transpose(0, 1) + 1, (3, 8, 64), (3, 64, 8))
    assert gemm_epilogue.supports(graph, HOPPER)


def test_a_refused_chain_hears_only_the_templates_that_are_meant_for_it():
    found = TileLang().variants(meta(*REFUSED["not contiguous"]), HOPPER, "quick")
    assert found.startswith("No template covers it. gemm_epilogue: ") and "not contiguous" in found
    assert not any(name in found for name in ("pointwise", "rowwise", "gated_mlp", ".."))
