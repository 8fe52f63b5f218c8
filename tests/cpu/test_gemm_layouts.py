"""GEMM chains whose operands or results lie where the copy engine or a row-by-row kernel has no use for them."""

from dataclasses import replace

import pytest
import torch
from fusescout.templates import gemm_epilogue
from gemm_chains import CPU
from gemm_chains import check
from gemm_chains import conv1d
from gemm_chains import meta
from gemm_chains import subgraph
from lowering import HOPPER
from lowering import lowered
from torch.nn import functional as F

from fusescout import reference
from fusescout.contenders.tilelang import TileLang
from fusescout.tolerance import Allowance

X, W, WT, B = (2, 5, 24), (17, 24), (24, 17), (17,)
CHAINS = {
    "rows of results in other places": (lambda x, w, r: F.linear(x, w) + r.t(), (7, 24), W, (17, 7)),
    "results column by column": (lambda x, w, b, r: r.t() + F.linear(x, w, b), (7, 24), W, B, (17, 7)),
    "a batch of results column by column": (
        lambda x, w, b, r, p, g: (r.transpose(1, 2) + F.linear(x, w, b) + p) * (1 + g),
        X,
        W,
        B,
        (2, 17, 5),
        (1, 5, 17),
        B,
    ),
    "Conv1D, column by column, in a batch": (
        lambda x, w, b, r: r.transpose(1, 2) + conv1d(x, w, b),
        X,
        WT,
        B,
        (2, 17, 5),
    ),
    "tokens mixed: transposed before and behind": (
        lambda x, w, b, r: r + F.linear(x.transpose(1, 2), w, b).transpose(1, 2),
        (2, 24, 5),
        W,
        B,
        (2, 17, 5),
    ),
    "channels first again, scaled": (
        lambda x, w, b, g, r: r + (F.linear(x, w, b) * g).permute(0, 3, 1, 2),
        (2, 4, 3, 24),
        W,
        B,
        B,
        (2, 17, 4, 3),
    ),
    "transposed results, also where columns stay adjacent": (
        lambda x, w, b, r: r.transpose(1, 2) + F.linear(x, w, b).transpose(1, 2),
        X,
        W,
        B,
        (2, 5, 17),
    ),
    "the input is factor and summand": (lambda x, w: torch.addmm(x.t(), x.t(), w).relu(), (24, 24), (24, 24)),
    "both factors in a batch, column by column": (
        lambda r, x, w: r.transpose(2, 3) + x @ w,
        (2, 3, 17, 5),
        (2, 3, 5, 24),
        (3, 24, 17),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_is_as_close_to_the_truth_as_eager(name, tmp_path):
    function, *shapes = CHAINS[name]
    torch.manual_seed(0)
    check(gemm_epilogue, function, *(torch.randn(s) for s in shapes), folder=tmp_path)


def uneven(x, w, b):
    """Rows of 26 bytes in both factors; the input lies column by column."""
    return F.gelu(F.linear(x.transpose(1, 2), w, b))


def test_a_weight_whose_rows_are_uneven_is_prepared_with_even_ones(tmp_path):
    torch.manual_seed(0)
    graph, inputs = subgraph(uneven, torch.randn(2, 13, 6), torch.randn(17, 13), torch.randn(17))
    weight = next(k for k, t in enumerate(inputs) if t.shape == (17, 13))
    specs = [replace(spec, constant=k == weight) for k, spec in enumerate(graph.inputs)]
    graph = replace(graph, inputs=tuple(specs))
    config = {"template": "gemm_epilogue", **gemm_epilogue.configs(graph, CPU)[0], "weight": "prepared"}
    built = TileLang(cache_dir=tmp_path).build(graph, config, CPU)
    for _ in range(2):
        eager, truth = reference.build(graph)(inputs), reference.build(graph, "float64")(inputs)
        (out,) = built.run(inputs)
        assert not (reason := Allowance(eager[0], truth[0], slack=2.0).judge(out).reason), reason
        inputs[weight].mul_(2.0)  # it is made again
    split = gemm_epilogue.prepared(graph, config)
    assert [(s.shape, s.stride) for s in split.prepare.output_specs] == [((17, 16), (16, 1))]


def test_what_the_copy_engine_cannot_load_is_prepared_or_copied_ahead():
    def forms(x, w):
        graph = meta(lambda x, w: F.linear(x, w).relu(), x, w)
        fixed = replace(graph, inputs=tuple(replace(s, constant=s.shape == w) for s in graph.inputs))
        assert gemm_epilogue.supports(fixed, HOPPER) is None
        return fixed, gemm_epilogue.configs(fixed, HOPPER)

    graph, configs = forms((4096, 415), (1024, 415))
    assert configs[0]["weight"] == "prepared" and not any("cluster" in c for c in configs)
    steady = gemm_epilogue.prepared(graph, configs[0]).steady
    roles = {p.name: p.role for p in gemm_epilogue.kernel(steady, configs[0], HOPPER).params}
    assert roles == {"x_in": "input", "w0": "input", "y0": "output", "x": "scratch"}
    bare = [c for c in configs if "weight" not in c]
    source = lowered(gemm_epilogue.kernel(graph, bare[0], HOPPER)).kernel_source
    assert source.count('extern "C" __global__ void __launch_bounds__') == 3 and "tma_load(" in source

    batch = meta(lambda x, w: (x @ w).relu(), (2, 3, 200, 101), (3, 101, 99))
    params = gemm_epilogue.kernel(batch, gemm_epilogue.configs(batch, HOPPER)[0], HOPPER).params
    copies = {p.name: (p.shape, p.stride) for p in params if p.role == "scratch"}
    assert copies["x"] == ((2, 3, 200, 101), (62400, 20800, 104, 1))
    assert copies["w0"] == ((3, 101, 99), (10504, 104, 1))

    graph, configs = forms((4096, 13), (512, 13))
    kernel = gemm_epilogue.kernel(graph, configs[0], HOPPER)
    assert configs[0]["BK"] == 16 and [p.role for p in kernel.params] == ["input", "input", "output"]
    body = lowered(kernel).kernel_source
    assert "wgmma_ss<" in body and "tma_load(" not in body

    graph, configs = forms((3, 415), (1024, 415))
    assert {c["schedule"] for c in configs} == {"vector"}


def test_a_residual_that_the_copy_engine_cannot_bring_is_read_ahead_of_the_product():
    """Tokens of a mixer lie side by side, 196 of them: rows of 392 bytes, in tiles of 208."""
    x, w, r = (8, 196, 264), (768, 264), (8, 768, 196)
    graph = meta(lambda x, w, r: r.transpose(1, 2) + F.linear(x, w), x, w, r)
    config = next(c for c in gemm_epilogue.configs(graph, HOPPER) if (c["schedule"], c["BN"]) == ("coop", 208))
    assert config["residual"] == "registers"
    source = lowered(gemm_epilogue.kernel(graph, config, HOPPER)).kernel_source
    body = source[source.rindex("warpgroup_reg_alloc") :]
    assert "= *(uint1*)(e0 +" in body[: body.index("wgmma_ss<")], "two elements at a time"
    assert "(e0 +" not in body[body.index("wait_wgmma<0>") :]
