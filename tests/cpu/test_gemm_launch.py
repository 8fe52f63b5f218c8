"""What a GEMM kernel asks of a GPU: shared memory that there is, and clusters only where grids allow them."""

import pytest
import torch
from config_spread import spread
from fusescout.templates import gemm_epilogue
from fusescout.templates import linear_cross_entropy
from lowering import HOPPER
from lowering import lowered
from template_cases import trace
from torch.nn import functional as F

SHARED_BYTES = 227 * 1024


def meta(function, *shapes):
    return trace(function, tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes))[0]


def shared_bytes(artifact):
    return max(int(f.attrs.get("dyn_shared_memory_buf", 0)) for f in artifact.device_mod.functions.values())


@pytest.mark.parametrize("join", ["cluster", "memory"])
def test_blocks_with_fewer_steps_than_stages_hold_no_more_stages_than_steps(join):
    """3 steps and 4 stages of 64 KiB asked for 256 KiB, and the launch failed."""
    graph = meta(lambda x, w: F.relu(F.linear(x, w)), (801, 768), (768, 768))
    configs = [c for c in gemm_epilogue.configs(graph, HOPPER) if c["schedule"] == "split" and c["join"] == join]
    assert configs
    for config in spread(configs):
        assert config["stages"] * config["splits"] * config["BK"] <= 768
        assert shared_bytes(lowered(gemm_epilogue.kernel(graph, config, HOPPER))) <= SHARED_BYTES


def test_a_warpgroup_without_a_tile_waits_for_none():
    """221 tiles for 132 blocks: the second warpgroup of block 89 and those behind it has none."""
    graph = meta(lambda x, w: F.relu(F.linear(x, w)), (2104, 776), (1544, 776))
    config = next(c for c in gemm_epilogue.configs(graph, HOPPER) if c["schedule"] == "pingpong" and "cluster" not in c)
    assert (config["BM"], config["BN"], config["grid"]) == (128, 128, 132)
    source = lowered(gemm_epilogue.kernel(graph, config, HOPPER)).kernel_source
    second = source[source.index("turn[1].arrive") : source.index("turn[1].wait")]
    assert "if (((int)blockIdx.x) < 89) {" in second


def test_no_cluster_where_other_kernels_follow():
    """They would be launched as clusters too: a grid of one block gave CUDA_ERROR_INVALID_CLUSTER_SIZE."""
    labels = torch.empty(1000, dtype=torch.int64, device="meta")
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((1000, 264), (50257, 264)))
    graph, _ = trace(lambda x, w, labels: F.cross_entropy(F.linear(x, w).float(), labels), (x, w, labels))
    configs = linear_cross_entropy.configs(graph, HOPPER)
    assert {c["schedule"] for c in configs} == {"pingpong", "coop", "roles", "auto"}
    assert not any("cluster" in c for c in configs)
