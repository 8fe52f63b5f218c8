"""Which chains of a graph are a plan's chains at other sizes.

Two chains have one form if they differ in sizes alone: same operators, dtypes, ranks and constants, parameters of the
same shape. That a chain has a planned one's form is a proposal, nothing more: what is built for it is built from its
own sub-graph and verified.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.plan import Entry


def form(subgraph: Subgraph) -> Hashable:
    """What two chains share that differ in sizes alone."""
    return _form(subgraph.inputs), _form(subgraph.ops), subgraph.outputs


def _form(value: Any) -> Hashable:
    if isinstance(value, TensorSpec):
        size = value.shape if value.constant else len(value.shape)
        return value.dtype, size, value.requires_grad, value.constant
    if isinstance(value, Op):
        return value.target, _form(value.args), _form(value.kwargs), _form(value.out)
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return "size"
    return value  # type: ignore[no-any-return]


def distance(one: Subgraph, other: Subgraph) -> float:
    """How far apart the sizes of two chains of one form are: the sum of |log| of their ratios."""
    pairs = zip((*one.inputs, *one.output_specs), (*other.inputs, *other.output_specs), strict=True)
    return sum(
        abs(math.log((a + 1) / (b + 1))) for left, right in pairs for a, b in zip(left.shape, right.shape, strict=True)
    )


def counterparts(
    entries: Sequence[Entry], chains: Iterable[tuple[str, Subgraph]]
) -> tuple[tuple[Entry, Subgraph], ...]:
    """For each chain of a graph that stands where a planned one stood at other sizes: the entry nearest to it.

    An entry stands for the chains of its form that are nearest to it in the graph, and for none if the plan has those:
    a graph of a planned shape has no counterparts, also where it has chains of that form that were raced and kept.

    Args:
        entries: of the plan, most important first; so is the result.
        chains: (family, sub-graph) of every region of the graph.
    """
    planned = {(e.family, e.key) for e in entries}
    groups: dict[Hashable, dict[str, Subgraph]] = defaultdict(dict)
    for family, subgraph in chains:
        groups[family, form(subgraph)][subgraph.key] = subgraph
    best: dict[tuple[str, str], tuple[float, int, Subgraph]] = {}
    for place, entry in enumerate(entries):
        own = Subgraph.from_json(entry.subgraph)
        far = {key: distance(own, s) for key, s in groups.get((entry.family, form(own)), {}).items()}
        nearest = [key for key, d in far.items() if d == min(far.values())]
        if any((entry.family, key) in planned for key in nearest):
            continue
        for key in nearest:
            name = entry.family, key
            if name not in best or far[key] < best[name][0]:
                best[name] = (far[key], place, groups[entry.family, form(own)][key])
    return tuple((entries[place], subgraph) for _, place, subgraph in sorted(best.values(), key=lambda b: b[1]))
