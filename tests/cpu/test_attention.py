"""Attention: how sub-graphs are read, the kernels for both targets proved on the CPU, and bugs that must be found out.

The CPU's kernel is a scalar loop. What the GPU's computes, tile by tile, is run on NumPy (`tile_interpreter.py`).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import ATTENTION
from attention_cases import ON_CPU
from attention_cases import attend
from attention_cases import heads
from attention_cases import padding
from attention_cases import qkv
from attention_cases import side_by_side
from attention_cases import windows
from fusescout.templates import attention as template
from fusescout.templates.attention_problem import Refused
from fusescout.templates.attention_problem import read
from lowering import HOPPER
from lowering import lowered
from role_interpreter import interpret_roles
from template_cases import randn
from template_cases import trace
from tile_interpreter import Buffer
from tile_interpreter import interpret
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusescout.candidates import rank
from fusescout.capture.encode import encode_graph
from fusescout.contenders.binding import bind
from fusescout.contenders.compile_cpu import compile_cpu
from fusescout.device import Device
from fusescout.inputs import InputSource
from fusescout.mutants import REJECTED
from fusescout.mutants import self_test
from fusescout.mutants_attention import attention_mutants
from fusescout.mutants_attention import without_bug
from fusescout.regions import find_regions
from fusescout.verify import Verifier

CPU = Device("cpu", "cpu", "x86_64", 2)
STREAM = {"schedule": "stream", "BM": 16, "BN": 16, "stages": 2, "threads": 128}
AHEAD = {**STREAM, "schedule": "ahead"}
WHOLE = {"schedule": "whole", "BM": 16, "BN": 32, "stages": 1, "threads": 128}
TILED = {
    "causal": (STREAM, lambda q, k, v: side_by_side(attend(q, k, v, is_causal=True)), lambda: qkv(1, 35, 35, 1, 16)),
    "padded": (STREAM, attend, lambda: (*qkv(2, 12, 35, 1, 24), padding(2, 35))),
    "long": (AHEAD, lambda q, k, v: attend(q, k, v, is_causal=True), lambda: qkv(1, 40, 60, 1, 16)),
    "bias_ahead": (AHEAD, lambda q, k, v, b: attend(q, k, v, b), lambda: (*qkv(1, 18, 72, 1, 16), randn(18, 72))),
    "windows": (WHOLE, windows, lambda: (*qkv(2, 17, 17, 1, 16), randn(17, 17), randn(1, 17, 17))),
}


def named(name):
    return next(c for c in ON_CPU if c.name == name)


@pytest.mark.parametrize(("name", "dtype"), [("repeated", torch.bfloat16), ("capped", torch.float16)], ids=str)
def test_the_scalar_loop_conforms(name, dtype, tmp_path):
    graph, inputs = named(name).traced(dtype=dtype)
    assert template.supports(graph, CPU) is None
    kernel = template.kernel(graph, template.configs(graph, CPU)[0], CPU)
    run = bind(graph, kernel, compile_cpu(kernel, tmp_path, "-O1"), CPU)
    outcome = Verifier(graph, inputs, "cpu").check(run, "full")
    assert not outcome.reason
    assert outcome.stats.deterministic


def on_numpy(kernel, spec):
    """A runner of the GPU's text."""

    def run(tensors):
        extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
        out, given = torch.full((extent,), float("nan")), []
        for p in kernel.params:
            if p.role == "output":
                memory = out
            else:
                t = tensors[p.index]
                dtype = torch.float32 if t.is_floating_point() else t.dtype
                memory = torch.empty_strided(t.shape, t.stride(), dtype=dtype).copy_(t)
            given.append(Buffer(memory.as_strided(p.shape, p.stride).numpy(), p.dtype))
        with np.errstate(all="ignore"):
            (interpret_roles if "get_thread_binding" in kernel.source else interpret)(kernel.source, "attention", given)
        return (out.bfloat16().as_strided(spec.shape, spec.stride),)

    return run


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TILED)
def test_tiles_conform(name):
    """Rows over several tiles of keys, tails of both, and special values; the exponentials' base changes on the way."""
    config, function, inputs = TILED[name]
    given = tuple(t.bfloat16() if t.is_floating_point() else t for t in inputs())
    graph, inputs = trace(function, given)
    run = on_numpy(template.kernel(graph, config, HOPPER), graph.output_specs[0])
    outcome = Verifier(graph, inputs, "cpu").check(run, "quick")
    assert not outcome.reason


@pytest.mark.parametrize("name", ["causal", "padded", "windows"])
def test_planted_bugs_are_found_out(name):
    graph, inputs = named(name).traced(dtype=torch.bfloat16)
    assert not Verifier(graph, inputs, "cpu").check(without_bug(graph), "quick").reason
    names = list(attention_mutants(graph))
    assert {"lost tile of keys", "sums of two bases"} <= set(names)
    assert ("causal order off by one" in names) == (name == "causal")
    assert ("nothing hidden" in names) == (name in ("causal", "padded"))
    found = self_test(graph, inputs, "cpu", names=names)
    assert all(v.startswith(REJECTED) for v in found.values()), found


def test_special_values_of_causal_attention_are_where_every_query_sees_them():
    graph, inputs = named("repeated").traced(dtype=torch.bfloat16)
    value = next(k for k, t in enumerate(inputs) if t is read_value(graph, inputs))
    for case in ("nan", "special"):
        made = InputSource(graph, inputs, "cpu", 0).make(case)
        assert not made[value][:, :, 0].isfinite().all()
        assert made[value][:, :, 1:].isfinite().all()
        assert not all(t.isfinite().all() for k, t in enumerate(made) if k != value)


@pytest.mark.parametrize("name", ["causal", "windows"])
def test_large_queries_and_keys_leave_scores_that_can_be_told_apart(name):
    graph, inputs = named(name).traced(dtype=torch.bfloat16)
    large = InputSource(graph, inputs, "cpu", 0).make("large")
    grown = [round(float(b.abs().max() / a.abs().max())) for a, b in zip(inputs, large, strict=True)]
    assert sorted(grown)[:2] == [8, 8]
    assert min(sorted(grown)[2:]) > 900


def test_a_block_of_one_step_waits_for_no_second():
    """TileLang made one trip of `steps - 1` trips that are none or one: the H200 hung. Here blocks have one or two."""
    (case,) = (c for c in ATTENTION if c.name == "causal_across")
    graph, _ = case.traced(dtype=torch.bfloat16)
    config = next(c for c in template.configs(graph, HOPPER) if c["schedule"] == "ahead" and c["BM"] == 64)
    lines = lowered(template.kernel(graph, config, HOPPER)).kernel_source.splitlines()
    (second,) = (k for k, line in enumerate(lines) if "k_full[1].wait(0)" in line)
    assert lines[second - 1].strip().startswith("if (")


def read_value(graph, inputs):
    return inputs[read(graph).v.index]


def test_repeated_heads_are_read_where_they_are_stored_once_and_written_side_by_side():
    graph, _ = named("repeated").traced()
    problem = read(graph)
    assert problem.batch == (2, 2, 2)
    assert problem.k.lead == problem.v.lead == (4480, 32, 0)
    assert problem.y.strides == (128, 1)
    assert problem.y.lead == (8960, 64, 32)
    assert problem.causal
    assert problem.safe


REFUSALS = {
    "dropout": lambda q, k, v: attend(q, k, v, dropout_p=0.1),
    "two results": lambda q, k, v: (attend(q, k, v), q + 1),
    "rows, not keys": lambda q, k, v: F.softmax(q @ k.mT, dim=-2) @ v,
    "rotated inside": lambda q, k, v: attend(q * 2, k, v),
    "weights read twice": lambda q, k, v: (p := F.softmax(q @ k.mT, dim=-1)) @ v + p @ q,
    "part of the keys": lambda q, k, v: attend(q, k[:, :, 3:40], v[:, :, 3:40]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_covered_is_refused(name):
    graph, _ = trace(REFUSALS[name], qkv(2, 48, 48, 2, 32))
    with pytest.raises(Refused):
        read(graph)
    assert template.supports(graph, HOPPER)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [((2, 48, 48, 2, 32), torch.float32, "16-bit"), ((2, 8, 48, 2, 32), torch.bfloat16, "queries"),
     ((2, 48, 1, 2, 32), torch.bfloat16, "one key"),
     ((2, 48, 48, 2, 36), torch.bfloat16, "width"), ((2, 48, 48, 2, 512), torch.bfloat16, "width")],
)  # fmt: skip
def test_what_a_gpu_has_no_tiles_for_is_refused(shape, dtype, reason):
    graph, _ = trace(attend, tuple(t.to(dtype) for t in qkv(*shape)))
    assert reason in template.supports(graph, HOPPER)


def test_a_tensor_at_an_odd_address_is_left_to_the_library():
    graph, _ = trace(attend, tuple(t.bfloat16() for t in qkv(2, 48, 48, 2, 32)))
    odd = replace(graph, inputs=(replace(graph.inputs[0], aligned=False), *graph.inputs[1:]))
    assert template.supports(graph, HOPPER) is None
    assert "16 bytes" in template.supports(odd, HOPPER)


class Grouped(nn.Module):
    def forward(self, q, k, v):
        k, v = (x[:, :, None].expand(2, 2, 2, 40, 16).reshape(2, 4, 40, 16) for x in (k, v))
        return side_by_side(attend(q, k, v, is_causal=True)) + 1


def captured(function, inputs):
    with torch.no_grad():
        module = make_fx(function, pre_dispatch=True)(*inputs)
    return encode_graph(module, 0, inputs)


def test_regions_are_the_operator_alone_and_with_the_copies_around_it():
    given = (randn(2, 4, 40, 16), heads(2, 40, 2, 16), heads(2, 40, 2, 16, 1))
    graph = captured(Grouped(), given)
    chains = [graph.subgraph(r.nodes)[0].chain for r in find_regions(graph) if r.family == "attention"]
    assert chains[0] == ("scaled_dot_product_attention",)
    assert "expand" in chains[1]
    assert chains[1][-3:] == ("scaled_dot_product_attention", "transpose", "reshape")
    assert len(chains) == 2


def test_scores_are_followed_where_they_are_not_the_first_operand():
    def masked(q, k, v, m):
        scores = torch.where(m, -1e4, q @ k.mT)
        return F.softmax(m.float() + scores, dim=-1) @ v

    graph = captured(masked, (*qkv(2, 40, 40, 2, 16), torch.ones(2, 2, 40, 40).tril().bool()))
    (region,) = (r for r in find_regions(graph) if r.family == "attention")
    assert graph.subgraph(region.nodes)[0].chain.count("matmul") == 2


def ranked(device, refusal):
    graph = captured(lambda q, k, v: attend(q, k, v), qkv(2, 40, 40, 2, 16))
    return rank([graph], lambda g, n: 100.0 if "attention" in n else 0.0, 100.0, device, refusal, top=5)


def test_attention_is_a_candidate_only_where_something_else_computes_it():
    hopper = Device("cuda", "H200", "sm_90a", 132, copy_bytes_per_s=4e12, flops_per_s={"float32": 1e15})
    (candidate,) = ranked(hopper, lambda family, graph: None).candidates
    assert candidate.family == "attention"
    for device, reason in ((hopper, "No template covers it."), (CPU, None)):
        found = ranked(device, lambda family, graph, reason=reason: reason)
        assert not found.candidates
        assert [(r.code, r.reason) for r in found.rejections] == [("one-op", "Attention is one fused kernel already.")]
