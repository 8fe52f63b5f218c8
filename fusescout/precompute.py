"""The captured graphs with what no input decides computed once: the form in which the analysis finds and races chains.

Whether the plan carries it is decided as for constant masks: it is part of the patched model whenever there is any of
it, alone too, and the end-to-end comparison accepts or rejects that model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusescout.capture import Capture
from fusescout.layout import encoded
from fusescout.once import Once
from fusescout.once import compute_once
from fusescout.restride import copy_of


def precompute(capture: Capture) -> tuple[Capture, tuple[Once, ...]]:
    """Rewrite all graphs; kept values become inputs of theirs.

    Returns:
        The capture, the same where there is nothing to be had; and what was done.
    """
    graphs, done = [], []
    for graph in capture.graphs:
        module = copy_of(graph.module)
        once = compute_once(module)
        if once:
            done.append(once)
            inputs = graph.inputs
            for hoisted in once.hoisted:
                inputs = (*inputs, *hoisted.values(inputs))
            graph = replace(graph, module=module, inputs=inputs)
            graph = replace(graph, graph=encoded(graph, module))
        graphs.append(graph)
    return (replace(capture, graphs=tuple(graphs)) if done else capture), tuple(done)


def describe(done: Sequence[Once]) -> str:
    """What a reader of the report should know; empty if nothing was done."""
    if not done:
        return ""
    operators, values = sum(o.operators for o in done), sum(o.values for o in done)
    note = f"{operators} operators needn't run in every call: no input decides what they give, or it is there already"
    note += ", or nobody reads it. The patched model leaves them out"
    if not values:
        return f"{note}."
    kept = f"{sum(o.kept_bytes for o in done) / 1e6:.3g} MB"
    return f"{note} and keeps {values} values ({kept}), made anew when a parameter or buffer changes."
