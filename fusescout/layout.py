"""Decides in which memory layout a model is analysed and patched: where that matters, by measuring.

The captured graphs are run both ways, interleaved. The faster way is the one in which regions are found and raced; the
baseline of the end-to-end verdict stays the model as its author wrote it. For channels-last memory only what stays when
chains are fused is run, and the rest counted by the bytes that it must move (`tails.py`): eager's passes over memory
behind a convolution would outweigh it, and will be gone. A copy that brings a
result of the model back into its own strides is left out of that comparison where it will cost nothing: the kernel of
what is in front of it can write that order (`regions/copies.py`).
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
from fusescout.capture.encode import target_name
from fusescout.convolution import BIAS
from fusescout.errors import in_a_line
from fusescout.flops import op_class
from fusescout.hoisting import hoist
from fusescout.ir import Graph
from fusescout.measure import interleave
from fusescout.memory_format import channels_last
from fusescout.plan import MemoryFormat
from fusescout.restride import copy_of
from fusescout.row_major import row_major
from fusescout.row_major import transposed
from fusescout.session import Interval
from fusescout.stats import ratio
from fusescout.tails import part
from fusescout.workload import Workload

ROUNDS, BUDGET_S = 15, 4.0


@dataclass(frozen=True, slots=True)
class Layout:
    """What was chosen. `capture` holds the graphs in that format; `note` says why, empty if nothing was tried.

    `warnings` has a sentence for each format that could not be tried.
    """

    memory_format: MemoryFormat
    capture: Capture
    note: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Way:
    """Another layout.

    Attributes:
        rewrite: brings a graph into it, in place; gives the reason if it can't.
        matters: the nodes whose time says whether it is worth a try.
        worth: their share of the step's time from which it is tried.
        subject: what takes that share, in a note.
        name: what it is called there.
        parts: whether it is for operators that stay: what can be fused is counted in bytes then, not timed.
    """

    rewrite: Callable[[fx.GraphModule], str]
    matters: Callable[[CapturedGraph], list[str]]
    worth: float
    subject: str
    name: str
    parts: bool


WAYS: dict[MemoryFormat, _Way] = {
    "channels_last": _Way(
        channels_last,
        lambda g: [n.name for n in g.graph.nodes if op_class(n.target) == "conv"],
        0.2,
        "Convolutions take",
        "channels-last",
        parts=True,
    ),
    "row_major": _Way(
        row_major,
        lambda g: [n.name for n in transposed(g.module)],
        0.03,
        "Pointwise operators on transposed memory take",
        "row-major",
        parts=False,
    ),
}


def choose(
    workload: Workload,
    capture: Capture,
    node_time_us: Callable[[int, str], float],
    step_us: float,
    copy_bytes_per_s: float = 0.0,
) -> Layout:
    """Pick the layout in which a captured model is faster than as it was written, if there is one.

    Args:
        workload: says the mode and device.
        capture: the graphs as captured.
        node_time_us: time of one node in one step, in µs.
        step_us: busy time of one step, in µs.
        copy_bytes_per_s: at what rate a fused chain moves its bytes; 0 where that isn't known: then eager's own time
            of what would be fused counts.
    """
    best, notes, warnings, fastest = Layout("preserved", capture), [], [], 1.0
    if workload.mode != "inference" or not step_us:
        return best
    for format_, way in WAYS.items():
        share = sum(node_time_us(g.index, n) for g in capture.graphs for n in way.matters(g)) / step_us
        if share < way.worth:
            continue
        try:
            relaid, reason = _relaid(capture, way.rewrite)
            speedup = None
            if relaid is not None:
                pairs = zip(relaid.graphs, capture.graphs, strict=True)
                after = [without_copies_back(*pair) for pair in pairs]
                rate = copy_bytes_per_s if way.parts else 0.0
                speedup = _compare(workload, capture.graphs, after, rate)
        except Exception as error:  # isolation boundary: the model is analysed in the layout it has
            warnings.append(f"The layout {way.name} could not be tried: {in_a_line(error)}.")
            continue
        notes.append(f"{way.subject} {share:.0%} of the step; {_finding(way, reason, speedup, copy_bytes_per_s > 0)}.")
        if relaid is not None and speedup is not None and speedup.low > 1.0 and speedup.mid > fastest:
            best, fastest = Layout(format_, relaid), speedup.mid
    return replace(best, note=" ".join(notes), warnings=tuple(warnings))


def _relaid(capture: Capture, rewrite: Callable[[fx.GraphModule], str]) -> tuple[Capture | None, str]:
    """The graphs rewritten where that can be done; or else why none can."""
    relaid, reasons = [], []
    for graph in capture.graphs:
        module = copy_of(graph.module)
        if reason := rewrite(module):
            reasons.append(reason)
            relaid.append(graph)
        else:
            relaid.append(replace(graph, module=module, graph=encoded(graph, module)))
    if len(reasons) == len(relaid):
        return None, "; ".join(dict.fromkeys(reasons))
    return replace(capture, graphs=tuple(relaid)), ""


def _finding(way: _Way, reason: str, speedup: Interval | None, at_a_rate: bool) -> str:
    if reason:
        return f"they can't be run {way.name}: {reason}"
    if speedup is None:
        return f"{way.name} they are several times slower, so the layout stays"
    times = f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"
    what = "they and one pass over memory for what can be fused" if way.parts and at_a_rate else "the eager graphs"
    end = "so the layout stays" if speedup.low <= 1.0 else f"so chains were raced {way.name}"
    return f"{way.name} {what} are {times} as fast, {end}"


def encoded(graph: CapturedGraph, module: fx.GraphModule) -> Graph:
    """The rewritten graph as plain data; nodes that were there keep their origin."""
    made = encode_graph(module, graph.index, graph.inputs)
    known = graph.graph.by_name
    nodes = (
        replace(n, module=known[n.name].module, source=known[n.name].source) if n.name in known else n
        for n in made.nodes
    )
    return replace(made, nodes=tuple(nodes))


def without_copies_back(graph: CapturedGraph, before: CapturedGraph) -> CapturedGraph:
    """A rewritten graph that gives results in its own strides where a pointwise operator or a bias makes them."""
    module, known = copy_of(graph.module), {n.name for n in before.module.graph.nodes}

    def bare(node: fx.Node) -> fx.Node:
        source = node.args[0] if node.name not in known and target_name(node) == "aten.clone.default" else None
        return source if isinstance(source, fx.Node) and _takes_a_pass(source) else node

    output = module.graph.output_node()
    output.args = tuple(fx.map_arg(output.args, bare))
    for node in reversed(module.graph.nodes):
        if node.name not in known and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return replace(graph, module=module)


def _takes_a_pass(node: fx.Node) -> bool:
    kind = op_class(target_name(node))
    return kind == "pointwise" or (kind == "conv" and len(node.args) > BIAS and isinstance(node.args[BIAS], fx.Node))


def _compare(
    workload: Workload, before: Sequence[CapturedGraph], after: Sequence[CapturedGraph], bytes_per_s: float
) -> Interval | None:
    """How many times as fast `after` is; None where it was far too slow to go on.

    At a rate, what can be fused is left out of the runs and counted as that many bytes.
    """
    tails_us = [0.0, 0.0]
    if bytes_per_s:
        parted = [[part(g.module) for g in graphs] for graphs in (before, after)]
        tails_us = [
            sum(p.tail_bytes * g.calls for p, g in zip(parts, graphs, strict=True)) / bytes_per_s * 1e6
            for parts, graphs in zip(parted, (before, after), strict=True)
        ]
        before, after = (
            [replace(g, module=p.module, inputs=(*g.inputs, *p.stand_ins)) for g, p in zip(graphs, parts, strict=True)]
            for graphs, parts in zip((before, after), parted, strict=True)
        )

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
    return with_tails(samples[0], samples[1], *tails_us) if samples[1] else None


def with_tails(before_us: Sequence[float], after_us: Sequence[float], tail_us: float, new_tail_us: float) -> Interval:
    """How many times as fast a layout is, by the measured times of what stays and the fused rest of either."""
    return ratio([t + tail_us for t in before_us], [t + new_tail_us for t in after_us])


def _prepared(graph: CapturedGraph) -> Callable[..., Any]:
    module = copy_of(graph.module)
    hoisted = hoist(module)
    return module if hoisted is None else hoisted.bind(module)
