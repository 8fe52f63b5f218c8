"""Copies that a layout brings in have times and are candidates, so that a kernel may make them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conv_models import captured
from test_copies_back import Model
from test_copies_back import X
from test_copies_back import gives_the_same

from fusescout import inserted
from fusescout.candidates import rank
from fusescout.capture import Capture
from fusescout.device import Device
from fusescout.inserted import copy_times
from fusescout.regions import find_regions

CPU = Device("cpu", "test", "x86", 1, copy_bytes_per_s=1e10)
GIVEN = "l_args_0_"
"""What the captured graph calls the model's input."""


def laid_out() -> tuple[Capture, Capture]:
    model = Model().eval()
    graphs = captured(model, X), captured(model, X, "channels_last")
    twice = (dataclasses.replace(g, calls=2) for g in graphs)
    return tuple(Capture((g,), ()) for g in twice)  # type: ignore[return-value]


def copied(capture: Capture, name: str) -> tuple[str, bool]:
    """What a copy copies, and whether that is a parameter."""
    (graph,) = capture.graphs
    source = graph.graph.by_name[name].inputs[0]
    return source, graph.graph.by_name[source].is_parameter


def test_each_copy_but_those_of_weights_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = laid_out()
    times = copy_times(before, after, "cpu")
    assert len(times) == 3 and all(t > 0 for t in times.values())
    assert not any(copied(after, name)[1] for _, name in times)
    assert copy_times(before, before, "cpu") == {}
    monkeypatch.setattr(inserted, "_time_us", lambda *_: 5.0)
    assert set(copy_times(before, after, "cpu").values()) == {10.0}, "a step calls the graph twice"


def test_the_input_s_copy_is_a_candidate_by_its_time() -> None:
    _, after = laid_out()
    graph = after.graphs[0].graph
    copies = [r for r in find_regions(graph) if r.family == "pointwise" and len(r.nodes) == 1 and "clone" in r.nodes[0]]
    assert len(copies) == 3
    (own,) = (r.nodes[0] for r in copies if copied(after, r.nodes[0])[0] == GIVEN)

    def ranked(time_us: float) -> list[tuple[str, ...]]:
        found = rank([graph], lambda g, n: time_us if n == own else 0.0, 100.0, CPU, lambda *_: None, top=5)
        return [c.subgraph.chain for c in found.candidates]

    assert ranked(0.0) == []
    assert ranked(50.0) == [("clone",)]


def test_a_kernel_in_its_place_gives_the_same(tmp_path: Path) -> None:
    _, after = laid_out()
    graph = after.graphs[0].graph
    region = next(r for r in find_regions(graph) if len(r.nodes) == 1 and copied(after, r.nodes[0])[0] == GIVEN)
    gives_the_same(Model().eval(), graph.subgraph(region.nodes)[0], tmp_path)
