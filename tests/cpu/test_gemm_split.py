"""Blocks that share a tile's steps along K: the kernels' text, run on NumPy, gives what the chain gives."""

import numpy as np
import pytest
import torch
from fusescout.templates import gated_mlp
from fusescout.templates import gemm_epilogue
from template_cases import randn
from template_cases import trace
from tile_interpreter import Buffer
from tile_interpreter import interpret
from torch.nn import functional as F

from fusescout import reference
from fusescout.device import Device
from fusescout.tolerance import Allowance

HOPPER = Device("cuda", "H200", "sm_90a", 132)


def two_results(x, w, b, r):
    return (h := F.linear(x, w, b)), F.gelu(h) + r


def packed(x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return gate.sigmoid() * up


def scores(q, k, m):
    return q @ k.transpose(-1, -2) * 0.125 + m


CASES = {
    "two results, odd columns": (two_results, (13, 104), (70, 104), (70,), (13, 70)),
    "weight [K, N], two blocks of rows": (
        lambda x, w, b: F.sigmoid(torch.addmm(b, x, w)), (20, 104), (104, 72), (72,),
    ),
    "transposed input": (lambda x, w: torch.mm(x.t(), w).sigmoid(), (104, 16), (104, 72)),
    "packed gate": (packed, (13, 104), (140, 104), (140,)),
    "uneven rows in both factors, column by column": (
        lambda x, w, r: r.t() + F.linear(x, w), (37, 101), (19, 101), (19, 37)
    ),
    "uneven rows, transposed input, batch": (
        lambda x, w: F.sigmoid(x.transpose(1, 2) @ w), (2, 101, 17), (2, 101, 40),
    ),
    "batch and mask": (scores, (2, 3, 18, 64), (2, 3, 37, 64), (2, 1, 1, 37)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("join", "splits"), [("cluster", 4), ("memory", 3)])
def test_sums_meet(name, join, splits):
    function, *shapes = CASES[name]
    graph, inputs = trace(function, tuple(randn(*s).bfloat16() for s in shapes))
    template = gated_mlp if function is packed else gemm_epilogue
    assert template.supports(graph, HOPPER) is None
    if "uneven" in name and join == "cluster":
        return  # not offered: the copies would be launched as clusters too
    tile = {"BM": 16, "BN": 64, "BK": 16, "stages": 2, "threads": 128}  # smaller than any that is offered
    kernel = template.kernel(graph, {"schedule": "split", "splits": splits, "join": join, **tile}, HOPPER)
    outputs = [torch.empty_strided(o.shape, o.stride).fill_(torch.nan) for o in graph.output_specs]
    buffers = []
    for p in kernel.params:
        if p.role == "scratch":
            array = np.full(p.shape, np.nan, np.float32)
        else:
            tensor = inputs[p.index].float() if p.role == "input" else outputs[p.index]
            array = tensor.as_strided(p.shape, p.stride).numpy()
        buffers.append(Buffer(array, p.dtype))
    interpret(kernel.source, template.NAME, buffers)
    eager, truth = reference.build(graph)(inputs), reference.build(graph, "float64")(inputs)
    for out, e, t in zip(outputs, eager, truth, strict=True):
        assert not (reason := Allowance(e, t).judge(out.to(e.dtype)).reason), reason
