"""Decides whether a model's convolutions are analysed and patched channels-last: where they matter, by measuring.

The captured graphs are run both ways on their real inputs, interleaved. The faster way is the one in which regions are
found and raced; the baseline of the end-to-end verdict stays the model as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusescout.capture import Capture
from fusescout.capture.capture import CapturedGraph
from fusescout.capture.encode import encode_graph
from fusescout.flops import op_class
from fusescout.hoisting import hoist
from fusescout.ir import Graph
from fusescout.measure import interleave
from fusescout.memory_format import channels_last
from fusescout.memory_format import copy_of
from fusescout.plan import MemoryFormat
from fusescout.session import Interval
from fusescout.stats import ratio
from fusescout.workload import Workload

WORTH = 0.2
"""Share of the step's time in convolutions from which another layout is tried."""
ROUNDS, BUDGET_S = 15, 4.0


@dataclass(frozen=True, slots=True)
class Layout:
    """What was chosen. `capture` holds the graphs in that format; `note` says why, empty if nothing was tried."""

    memory_format: MemoryFormat
    capture: Capture
    note: str = ""


def choose(workload: Workload, capture: Capture, node_time_us: Callable[[int, str], float], step_us: float) -> Layout:
    """Pick the memory format of a captured model.

    Args:
        workload: says the mode and device.
        capture: the graphs as captured.
        node_time_us: time of one node in one step, in µs.
        step_us: busy time of one step, in µs.
    """
    preserved = Layout("preserved", capture)
    if workload.mode != "inference" or not step_us:
        return preserved
    convolutions = [(g.index, n.name) for g in capture.graphs for n in g.graph.nodes if op_class(n.target) == "conv"]
    share = sum(node_time_us(*c) for c in convolutions) / step_us
    if share < WORTH:
        return preserved
    relaid, reasons = [], []
    for graph in capture.graphs:
        module = copy_of(graph.module)
        reason = channels_last(module)
        if reason:
            reasons.append(reason)
            relaid.append(graph)
        else:
            relaid.append(replace(graph, module=module, graph=encoded(graph, module)))
    note = f"Convolutions take {share:.0%} of the step"
    if len(reasons) == len(capture.graphs):
        return replace(preserved, note=f"{note}; they can't be run channels-last: {'; '.join(dict.fromkeys(reasons))}.")
    speedup = _compare(workload, capture.graphs, relaid)
    if speedup is None:
        return replace(preserved, note=f"{note}; channels-last they are several times slower, so the layout stays.")
    times = f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"
    if speedup.low <= 1.0:
        return replace(preserved, note=f"{note}; channels-last they are {times} as fast, so the layout stays.")
    note = f"{note}; channels-last the eager graphs are {times} as fast, so chains were raced channels-last."
    return Layout("channels_last", replace(capture, graphs=tuple(relaid)), note)


def encoded(graph: CapturedGraph, module: fx.GraphModule) -> Graph:
    """The rewritten graph as plain data; nodes that were there keep their origin."""
    made = encode_graph(module, graph.index, graph.inputs)
    known = graph.graph.by_name
    nodes = (
        replace(n, module=known[n.name].module, source=known[n.name].source) if n.name in known else n
        for n in made.nodes
    )
    return replace(made, nodes=tuple(nodes))


def _compare(workload: Workload, before: Sequence[CapturedGraph], after: Sequence[CapturedGraph]) -> Interval | None:
    def step(graphs: Sequence[CapturedGraph]) -> Callable[[Any], Any]:
        bound = [(_prepared(g), g.inputs, g.calls) for g in graphs]

        def call(_: Any) -> None:
            with torch.no_grad():
                for run, inputs, calls in bound:
                    for _ in range(calls):
                        run(*inputs)

        return call

    calls = [step(before), step(after)]
    first = next(t for g in before for t in g.inputs if isinstance(t, torch.Tensor))
    device = workload.device if first.is_cuda else "cpu"
    samples = interleave(calls, [], device, rounds=ROUNDS, budget_s=BUDGET_S, graphs=False).samples
    return ratio(samples[0], samples[1]) if samples[1] else None


def _prepared(graph: CapturedGraph) -> Callable[..., Any]:
    module = copy_of(graph.module)
    hoisted = hoist(module)
    return module if hoisted is None else hoisted.bind(module)
