"""Products of tensors that don't begin at multiples of 16 bytes: each access is of one element, or they are refused."""

import re
from dataclasses import replace

import pytest
import torch
from fusescout.templates import attention
from fusescout.templates import gated_mlp
from fusescout.templates import gemm_epilogue
from fusescout.templates import gemm_float32
from fusescout.templates import gemm_shared_input
from fusescout.templates import linear_cross_entropy
from gemm_chains import subgraph
from lowering import HOPPER
from lowering import lowered
from scaled_cases import gelu
from torch.nn import functional as F

BF16, F32 = torch.bfloat16, torch.float32
WEIGHT = (520, 72)
"""What is of this shape is a parameter."""


def linear(x, w, b):
    return F.linear(x, w, b).relu()


def addmm(x, w, b):
    return torch.addmm(b, x, w).relu()


def turned(x, w, b):
    return torch.addmm(b, x.t(), w).relu()


def batched(x, w):
    return torch.matmul(x, w).relu()


def gated(x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def projections(x, q, k):
    return F.linear(x, q), F.linear(x, k)


def head(x, w, classes):
    return F.cross_entropy(F.linear(x, w), classes)


def empty(dtype, *shapes):
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def odd(function, given, at=lambda s: len(s.shape) > 1):
    """The sub-graph, whose inputs begin at odd addresses where `at` says so: else its matrices."""
    graph, _ = subgraph(function, *given)
    specs = (replace(s, constant=s.shape == WEIGHT, aligned=not at(s)) for s in graph.inputs)
    return replace(graph, inputs=tuple(specs))


def unlike_elements(template, graph, **wants):
    """Lines of the CUDA that take an odd input's address, or read more than an element of it."""
    assert template.supports(graph, HOPPER) is None
    config = next(c for c in template.configs(graph, HOPPER) if all(c.get(k) == v for k, v in wants.items()))
    split = template.prepared(graph, config) if hasattr(template, "prepared") else None
    graph = split.steady if split else graph
    kernel = template.kernel(graph, config, HOPPER)
    names = [p.name for p in kernel.params if p.role == "input" and not graph.inputs[p.index].aligned]
    source = lowered(kernel).kernel_source
    lines = source[source.index('extern "C" __global__') :].splitlines()
    named = rf"(?<![.\w])(?:{'|'.join(names)})"  # not threadIdx.x
    used = [line for line in lines if re.search(rf"{named}(_desc)?\b", line) and "__global__" not in line]
    assert len(used) >= len(names) > 0
    return [line for line in used if "(&" in line or not re.search(rf"{named}\[", line)]


@pytest.mark.parametrize(
    ("template", "function", "dtype", "shapes", "wants"),
    [
        (gemm_epilogue, linear, BF16, ((204, 40), (520, 40), (520,)), {"stages": 1}),
        (gemm_epilogue, turned, BF16, ((40, 208), (40, 520), (520,)), {"stages": 1}),
        (gemm_epilogue, batched, BF16, ((6, 136, 24), (6, 24, 72)), {"stages": 1}),
        (gemm_epilogue, linear, BF16, ((204, 40), (520, 40), (520,)), {"schedule": "coop"}),
        (gemm_epilogue, linear, BF16, ((2104, 776), (520, 776), (520,)), {"schedule": "pingpong"}),
        (gemm_epilogue, linear, BF16, ((2104, 72), WEIGHT, (520,)), {"weight": "prepared"}),
        (gemm_epilogue, linear, BF16, ((5, 264), (520, 264), (520,)), {"schedule": "vector"}),
        (gemm_epilogue, addmm, F32, ((5, 264), (264, 520), (520,)), {"schedule": "vector"}),
        (gated_mlp, gated, BF16, ((5, 264), (520, 264), (520,)), {"schedule": "vector"}),
        (gemm_shared_input, projections, BF16, ((5, 72), WEIGHT, WEIGHT), {"schedule": "vector"}),
        (gemm_float32, linear, F32, ((204, 64), (520, 64), (520,)), {"weight": None}),
        (gemm_float32, linear, F32, ((204, 72), WEIGHT, (520,)), {"weight": "prepared"}),
    ],
    ids=lambda v: None if isinstance(v, tuple) else getattr(v, "__name__", str(v)),
)
def test_operands_are_read_by_element(template, function, dtype, shapes, wants):
    assert not unlike_elements(template, odd(function, empty(dtype, *shapes)), **wants)


def test_classes_are_read_by_element():
    given = empty(BF16, (256, 64), (1024, 64)) + empty(torch.int64, (256,))
    graph = odd(head, given, at=lambda s: s.dtype == "int64")
    assert not unlike_elements(linear_cross_entropy, graph, schedule="coop")


@pytest.mark.parametrize(
    ("template", "function", "given"),
    [
        (gated_mlp, gated, empty(BF16, (204, 64), (520, 64), (520,))),
        (gemm_shared_input, projections, empty(BF16, (204, 72), WEIGHT, WEIGHT)),
        (linear_cross_entropy, head, empty(BF16, (256, 64), (1024, 64)) + empty(torch.int64, (256,))),
        (attention, F.scaled_dot_product_attention, empty(BF16, *((2, 8, 128, 64),) * 3)),
        (gemm_epilogue, gelu, empty(torch.float8_e4m3fn, (208, 64), (512, 64)) + empty(F32, (), ())),
    ],
    ids=["gated", "several products", "cross entropy", "attention", "8 bits"],
)
def test_without_a_copy_ahead_they_are_refused(template, function, given):
    assert template.supports(odd(function, given, at=lambda s: False), HOPPER) is None
    assert "16 bytes" in template.supports(odd(function, given), HOPPER)


@pytest.mark.parametrize(("shape", "function"), [((520,), linear), ((204, 520), lambda x, w, r: r + F.linear(x, w))])
def test_what_an_epilogue_reads_there_is_refused(shape, function):
    graph = odd(function, empty(BF16, (204, 40), (520, 40), shape), at=lambda s: s.shape == shape)
    assert "16 bytes" in gemm_epilogue.supports(graph, HOPPER)
