"""Decides in which memory layout a model is analysed and patched: where that matters, by measuring.

The captured graphs are run both ways on their real inputs, interleaved. The faster way is the one in which regions are
found and raced; the baseline of the end-to-end verdict stays the model as its author wrote it. A copy that brings a
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
    """

    rewrite: Callable[[fx.GraphModule], str]
    matters: Callable[[CapturedGraph], list[str]]
    worth: float
    subject: str
    name: str


WAYS: dict[MemoryFormat, _Way] = {
    "channels_last": _Way(
        channels_last,
        lambda g: [n.name for n in g.graph.nodes if op_class(n.target) == "conv"],
        0.2,
        "Convolutions take",
        "channels-last",
    ),
    "row_major": _Way(
        row_major,
        lambda g: [n.name for n in transposed(g.module)],
        0.03,
        "Pointwise operators on transposed memory take",
        "row-major",
    ),
}


def choose(workload: Workload, capture: Capture, node_time_us: Callable[[int, str], float], step_us: float) -> Layout:
    """Pick the layout in which a captured model is faster than as it was written, if there is one.

    Args:
        workload: says the mode and device.
        capture: the graphs as captured.
        node_time_us: time of one node in one step, in µs.
        step_us: busy time of one step, in µs.
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
                speedup = _compare(workload, capture.graphs, [without_copies_back(*pair) for pair in pairs])
        except Exception as error:  # isolation boundary: the model is analysed in the layout it has
            warnings.append(f"The layout {way.name} could not be tried: {in_a_line(error)}.")
            continue
        notes.append(f"{way.subject} {share:.0%} of the step; {_finding(way.name, reason, speedup)}.")
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


def _finding(name: str, reason: str, speedup: Interval | None) -> str:
    if reason:
        return f"they can't be run {name}: {reason}"
    if speedup is None:
        return f"{name} they are several times slower, so the layout stays"
    times = f"{speedup.mid:.2f} times [{speedup.low:.2f}, {speedup.high:.2f}]"
    if speedup.low <= 1.0:
        return f"{name} they are {times} as fast, so the layout stays"
    return f"{name} the eager graphs are {times} as fast, so chains were raced {name}"


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
