"""Pricing, ranking, and the reasons of what is no candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import Builder
from graphs import spec

from fusescout.candidates import Ranking
from fusescout.candidates import lower_bound
from fusescout.candidates import rank
from fusescout.device import Device
from fusescout.ir import Graph

DEVICE = Device("cuda", "test", "sm_90a", 132, copy_bytes_per_s=4e12, flops_per_s={"float32": 1e14}, launch_us=3.0)


def layers(count: int) -> Graph:
    b = Builder()
    x = b.input(spec(4096, 1024))
    for k in range(count):
        h = b.op("linear", spec(4096, 1024), x, b.input(spec(1024, 1024)), module=f"layers.{k}")
        x = b.op("tanh", spec(4096, 1024), b.op("aten.mul.Tensor", spec(4096, 1024), h, 0.5), module=f"layers.{k}")
    return b.graph(x)


def ranked(graph: Graph, time_us: float = 100.0, top: int = 12, refusal: str | None = None) -> Ranking:
    step = time_us * sum(n.is_op for n in graph.nodes)
    return rank([graph], lambda _g, _n: time_us, step, DEVICE, lambda _f, _s: refusal, top)


def test_equal_layers_are_one_candidate_with_a_count() -> None:
    ranking = ranked(layers(3))
    by_family = {c.family: c for c in ranking.candidates}
    assert len(by_family["gemm_epilogue"].sites) == 3
    assert {s.module for s in by_family["gemm_epilogue"].sites} == {"layers.0", "layers.1", "layers.2"}
    assert by_family["gemm_epilogue"].time_us == pytest.approx(900)


def test_the_bound_counts_each_byte_that_must_cross_once() -> None:
    graph = layers(1)
    candidate = next(c for c in ranked(graph).candidates if c.family == "pointwise")
    assert candidate.bytes == 2 * 4096 * 1024 * 4
    assert lower_bound(candidate.subgraph, DEVICE)[0] == pytest.approx(2 * 4096 * 1024 * 4 / 4e12 * 1e6)


def test_a_gemm_is_bound_by_the_matmul_rate() -> None:
    candidate = next(c for c in ranked(layers(1)).candidates if c.family == "gemm_epilogue")
    assert lower_bound(candidate.subgraph, DEVICE)[0] == pytest.approx(2 * 4096 * 1024 * 1024 / 1e14 * 1e6, rel=0.01)


def test_what_runs_faster_than_its_flops_allow_is_bound_by_its_bytes() -> None:
    flops_us = 2 * 4096 * 1024 * 1024 / 1e14 * 1e6
    faster = next(c for c in ranked(layers(1), flops_us / 9).candidates if c.family == "gemm_epilogue")
    assert faster.bound_us == pytest.approx(faster.bytes / 4e12 * 1e6)
    assert 0 < faster.bound_us < faster.time_us < flops_us


def test_gain_is_never_more_than_the_time_and_ranks() -> None:
    ranking = ranked(layers(2))
    gains = [c.gain_us for c in ranking.candidates]
    assert gains == sorted(gains, reverse=True)
    assert all(0 <= c.gain_us <= c.time_us for c in ranking.candidates)


def test_a_refused_family_keeps_the_refusal_as_its_reason() -> None:
    ranking = ranked(layers(1), refusal="fp32 stays with cuBLAS.")
    assert not ranking.candidates
    assert {r.code for r in ranking.rejections} == {"unsupported"}
    assert all("cuBLAS" in r.reason for r in ranking.rejections)


def test_what_is_beyond_top_is_said() -> None:
    ranking = ranked(layers(1), top=1)
    assert len(ranking.candidates) == 1
    assert any(r.reason.startswith("One candidate could give more; raise --top") for r in ranking.rejections)


def test_one_kernel_at_its_bound_is_left_alone() -> None:
    b = Builder()
    y = b.op("relu", spec(4096, 4096), b.input(spec(4096, 4096)))
    graph = b.graph(y)
    bound = 2 * 4096 * 4096 * 4 / 4e12 * 1e6
    assert [r.code for r in ranked(graph, bound * 1.2).rejections] == ["one-op"]
    assert ranked(graph, bound * 3).candidates


def product(dtype: str = "float32") -> Graph:
    b = Builder()
    x, w = (b.input(spec(2048, 2048, dtype=dtype)) for _ in range(2))
    return b.graph(b.op("linear", spec(2048, 2048, dtype=dtype), x, w))


@pytest.mark.parametrize(("dtype", "kind", "refusal"), [
    ("bfloat16", "cuda", None), ("float32", "cpu", None), ("float32", "cuda", "It is for Hopper."),
])  # fmt: skip
def test_a_bare_gemm_is_rejected_as_gemm_bound(dtype: str, kind: str, refusal: str | None) -> None:
    device = replace(DEVICE, kind=kind)
    ranking = rank([product(dtype)], lambda _g, _n: 1e4, 1e4, device, lambda _f, _s: refusal, 12)
    assert not ranking.candidates
    (rejection,) = ranking.rejections
    assert rejection.code == "gemm-bound"
    assert rejection.reason.startswith("Its time is the matrix product itself, and nothing pointwise follows")


def test_a_float32_product_is_bound_by_six_bfloat16_products_where_they_are_faster() -> None:
    """On an H200: 780 TFLOPS in bfloat16, 51 in float32."""
    hopper = replace(DEVICE, flops_per_s={"float32": 51e12, "bfloat16": 780e12})
    flops = 2 * 2048**3
    library_us = flops / 51e12 * 1e6
    (candidate,) = rank([product()], lambda _g, _n: library_us, library_us, hopper, lambda _f, _s: None, 12).candidates
    assert candidate.bound_us == pytest.approx(6 * flops / 780e12 * 1e6)
    assert candidate.gain_us > 0.5 * library_us
    with_tf32 = replace(DEVICE, flops_per_s={"float32": 400e12, "bfloat16": 780e12})
    tf32_us = flops / 400e12 * 1e6
    (rejection,) = rank([product()], lambda _g, _n: tf32_us, tf32_us, with_tf32, lambda _f, _s: None, 12).rejections
    assert rejection.code == "one-op"
    on_cpu = replace(hopper, kind="cpu")
    assert lower_bound(candidate.subgraph, on_cpu)[0] == pytest.approx(library_us)


def test_overlapping_sites_of_one_chain_count_once() -> None:
    ranking = ranked(layers(4))
    for candidate in ranking.candidates:
        nodes = [(s.graph, n) for s in candidate.sites for n in s.nodes]
        assert len(nodes) == len(set(nodes))
