"""Pricing, ranking, and the reasons of what is no candidate."""

from __future__ import annotations

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


def test_a_bare_gemm_is_rejected_as_gemm_bound() -> None:
    b = Builder()
    y = b.op("linear", spec(64, 64), b.input(spec(64, 64)), b.input(spec(64, 64)))
    (rejection,) = ranked(b.graph(y)).rejections
    assert rejection.code == "gemm-bound"


def test_overlapping_sites_of_one_chain_count_once() -> None:
    ranking = ranked(layers(4))
    for candidate in ranking.candidates:
        nodes = [(s.graph, n) for s in candidate.sites for n in s.nodes]
        assert len(nodes) == len(set(nodes))
