"""Rows that several blocks share: what their three CUDA kernels compute, with the CPU's loops in place of tiles."""

import pytest
import torch
from fusescout.templates import rowwise
from fusescout.templates import rowwise_parts
from fusescout.templates.body import signature
from fusescout.templates.dialect import Dialect
from fusescout.templates.operators import Unsupported
from fusescout.templates.rows_in_parts import lengths
from fusescout.templates.rows_in_parts import share
from fusescout.templates.rowwise_parts import bodies
from fusescout.templates.source import build
from lowering import HOPPER
from lowering import lowered
from parted_rows import CASES
from parted_rows import LAST
from parted_rows import traced
from template_cases import trace
from torch.nn import functional as F

from fusescout import reference
from fusescout.contenders.binding import bind
from fusescout.contenders.compile_cpu import compile_cpu
from fusescout.contenders.compile_cuda import cubin_report
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.inputs import InputSource
from fusescout.template import Kernel

CPU = Device("cpu", "cpu", "x86_64", 2)


@pytest.fixture
def one_thread(monkeypatch):
    """Blocks for the CPU's loops: a vector of rows is a matter of threads."""
    tile = rowwise_parts.tile
    monkeypatch.setattr(rowwise_parts, "tile", lambda stage: tile(stage) | {"threads": 1, "vector": 1})


def kernel(graph, length):
    """As the template's, for the CPU."""
    dialect = Dialect("cpu")
    shared = share(graph, length)
    texts = bodies(shared, {"part": length, "last_threads": 1, "last_items": 32}, dialect)
    operands = {o.buffer: o for s in shared.spaces for o in s.operands}.values()
    operands = tuple(sorted(operands, key=lambda o: ["input", "scratch", "output"].index(o.role)))
    name = f"fs_test_{graph.key[:8]}_{length}"
    text = dialect.header() + signature(name, operands, dialect) + "\n".join(texts)
    return Kernel(build(text, name), tuple(o.param for o in operands), text, dialect.pass_configs)


@pytest.mark.parametrize("name", CASES)
def test_they_compute_what_whole_rows_do(name, one_thread, tmp_path):
    graph, inputs = traced(name)
    found, _ = lengths(graph)
    assert found
    length = found[len(found) // 2]
    made = kernel(graph, length)
    run, eager = bind(graph, made, compile_cpu(made, tmp_path, "-O1"), CPU), reference.build(graph)
    truth = reference.build(graph, "float64")
    source = InputSource(graph, inputs, "cpu", 0)
    for case in ("captured", "shuffled", "nan", "+inf", "-inf", "large"):
        given = source.make(case)
        exact = truth([t.double() for t in given])
        for out, e, t in zip(run(given), eager(given), exact, strict=True):
            scale = float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 1.0
            odd = ~out.isfinite()
            same = (out == e) | (out.isnan() & e.isnan()) | (out == t.float()) | (out.isnan() & t.isnan())
            assert bool((same | ~odd).all()), case
            known = t.isfinite() & out.isfinite()
            torch.testing.assert_close(out[known].double(), t[known], rtol=1e-4, atol=1e-5 * scale)


def large(dtype, order=torch.channels_last_3d):
    x, w = torch.empty(16, 128, 34, 34, 34, device="meta", dtype=dtype), torch.empty(128, device="meta", dtype=dtype)
    return trace(lambda x, w, b: F.group_norm(F.relu(x), 8, w, b), (x.contiguous(memory_format=order), w, w.clone()))[0]


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_ones_are_read_and_written_in_vectors_without_spills(dtype):
    graph = large(dtype)
    configs = rowwise.configs(graph, HOPPER)
    assert [c["part"] for c in configs if "part" in c] == [136, 136, 68]
    found = cubin_report(rowwise.kernel(graph, configs[0], HOPPER))
    assert found.spilled_bytes == 0
    kernels = found.source.split("__launch_bounds__")[1:]
    wide = "*(uint4*)" if dtype == torch.bfloat16 else "*(float4*)"
    assert len(kernels) == 3 and wide in kernels[0] and wide in kernels[2]


def test_they_are_tried_where_whole_rows_are_too_few_or_lie_in_pieces():
    few = large(torch.bfloat16, torch.contiguous_format)
    assert "part" in rowwise.configs(few, HOPPER)[0]
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    graph, _ = trace(lambda x: F.layer_norm(x, (4096,)), (x,))
    assert not any("part" in c for c in rowwise.configs(graph, HOPPER))
    x = x.view(16, 1024, 32, 32).contiguous(memory_format=torch.channels_last)
    graph, _ = trace(lambda x: x.amax((2, 3)), (x,))
    assert lengths(graph) == ([], False)


def spelled(x):
    centred = x - x.mean((2, 3), keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean((2, 3), keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.group_norm(F.group_norm(x, 4) + 1, 4),
        lambda x: F.instance_norm(F.relu(F.instance_norm(x))),
        spelled,
        lambda x: (x - x.mean((2, 3), keepdim=True)).abs().mean((2, 3)),
    ],
    ids=["two norms", "two norms of channels", "spelled", "mean deviation"],
)
def test_sums_that_need_another_sum_first_are_not_offered(function):
    x = torch.empty(8, 64, 128, 128, device="meta").contiguous(memory_format=LAST)
    graph, _ = trace(function, (x,))
    assert lengths(graph) == ([], False)
    assert not any("part" in c for c in rowwise.configs(graph, HOPPER))
    with pytest.raises(Unsupported, match="needs another one's result"):
        share(graph, 64)


def test_integers_of_a_row_keep_their_bits(one_thread, tmp_path):
    x = torch.full((2, 16, 8, 12), 0.5).contiguous(memory_format=LAST)
    graph, inputs = trace(lambda x: (x * 0).long() + ((x.mean((2, 3), keepdim=True) * 2**26).to(torch.int64) + 1), (x,))
    made = kernel(graph, 24)
    run = bind(graph, made, compile_cpu(made, tmp_path, "-O1"), CPU)
    assert torch.equal(run(inputs)[0], torch.full((2, 16, 8, 12), 2**25 + 1))


def test_addresses_of_64_bits_are_left_to_whole_rows():
    x = torch.empty(40, 64, 1000, 1000, device="meta", dtype=torch.bfloat16).contiguous(memory_format=LAST)
    graph, _ = trace(lambda x: F.group_norm(x, 8), (x,))
    assert not any("part" in c for c in rowwise.configs(graph, HOPPER))


@pytest.mark.parametrize("name", ["groups of one channel", "what is true of a row"])
def test_bools_of_a_row_lower_to_cuda(name):
    graph, _ = traced(name)
    config = {"part": 8, "last_threads": 256, "last_items": 4}
    source = lowered(rowwise.kernel(graph, config, HOPPER)).kernel_source
    assert "signed char* __restrict__ row" in source
