"""Replaces planned regions of an ATen graph by fused operators. Works on the graph it is given, knows no model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem as operator_getitem
from typing import Any

import torch
from torch import fx

from fusescout.constants import Split
from fusescout.hoisting import MARK
from fusescout.ir import Graph
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.plan import Entry
from fusescout.reference import resolve
from fusescout.regions import find_regions


@dataclass(frozen=True, slots=True)
class Replacement:
    """One site that was (or was not) replaced."""

    entry: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Two operators in the place of one: `prepare` makes constants of parameters, `steady` does the rest."""

    split: Split
    prepare: Callable[..., Any]
    steady: Callable[..., Any]


def rewrite(
    module: fx.GraphModule,
    graph: Graph,
    entries: Sequence[Entry],
    operator: Callable[[Entry, Subgraph], Any],
) -> tuple[Replacement, ...]:
    """Replace every region of `graph` that an entry names, in place, in the entries' order of priority.

    Args:
        module: the ATen graph module that `graph` was encoded from (same node names).
        graph: its plain-data form.
        entries: plan entries, most important first.
        operator: gives the callable that computes an entry's sub-graph, or a `Prepared`; None if it can't be had. It
            is asked only for entries that are in the graph.
    """
    cut = [(region, *graph.subgraph(region.nodes)) for region in find_regions(graph)]
    current = {n.name: n for n in module.graph.nodes}
    place = {n: k for k, n in enumerate(module.graph.nodes)}
    used: set[str] = set()
    done: list[Replacement] = []
    for node in reversed(graph.nodes):
        if node.dead:  # it may read what a region keeps to itself
            module.graph.erase_node(current.pop(node.name))
    for entry in entries:
        key = entry.key
        for region, subgraph, inputs in cut:
            if region.family != entry.family or subgraph.key != key or used & set(region.nodes):
                continue
            # An earlier replacement may have moved some of them behind others.
            members = sorted((current[n] for n in region.nodes), key=place.__getitem__)
            late = _late(members)
            if late is None:
                continue  # an earlier replacement closed a loop through this region
            made = operator(entry, subgraph)
            if made is None:
                break
            outputs = graph.escapes(region.nodes)
            current |= _replace(module.graph, members, late, [current[i] for i in inputs], outputs, made)
            place = {n: k for k, n in enumerate(module.graph.nodes)}
            used |= set(region.nodes)
            done.append(Replacement(entry.id, region.nodes))
    if done:
        module.graph.lint()
        module.recompile()
    return tuple(done)


def _late(members: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Nodes between the members that depend on them, in order; None if a member depends on one of those in turn."""
    inside = set(members)
    late: dict[fx.Node, None] = {}
    node = members[0]
    while True:
        if node in inside:
            if any(i in late for i in node.all_input_nodes):
                return None
        elif any(i in inside or i in late for i in node.all_input_nodes):
            late[node] = None
        if node is members[-1]:
            return list(late)
        node = node.next


def _replace(
    graph: fx.Graph,
    members: Sequence[fx.Node],
    late: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[str],
    operator: Callable[..., Any] | Prepared,
) -> dict[str, fx.Node]:
    """Put one call in the members' place; gives the node that now stands for each output."""
    by_name = {n.name: n for n in members}
    cursor = members[-1]
    for node in late:
        cursor.append(node)
        cursor = node
    with graph.inserting_before(members[-1].next):
        if isinstance(operator, Prepared):
            kept = [inputs[k] for k in operator.split.kept]
            call = graph.call_function(operator.steady, (*kept, *_prepared(graph, operator, inputs)))
        else:
            call = graph.call_function(operator, tuple(inputs))
        values = tuple(by_name[o].meta.get("val") for o in outputs)
        call.meta = {**by_name[outputs[0]].meta, "val": values[0] if len(outputs) == 1 else values}
        if isinstance(operator, Prepared) and operator.split.views:
            results = _views(graph, call, operator.split.views)
        elif len(outputs) > 1:
            results = [graph.call_function(operator_getitem, (call, k)) for k in range(len(outputs))]
        else:
            results = [call]
    stands: dict[str, fx.Node] = {}
    for name, value in zip(outputs, results, strict=True):
        value.meta = {**by_name[name].meta}
        by_name[name].replace_all_uses_with(value)
        stands[name] = value
    # Uses inside the region were redirected too; the members are going away with them.
    for node in reversed(members):
        graph.erase_node(node)
    return stands


def _views(graph: fx.Graph, call: fx.Node, views: Subgraph) -> list[fx.Node]:
    """The results as views of the one value that `call` gives; to be called where nodes are being inserted."""
    made, near = [call], call.meta["val"][0]

    def argument(arg: Any) -> Any:
        return made[int(arg.to)] if isinstance(arg, Ref) else list(arg) if isinstance(arg, tuple) else arg

    def value(spec: TensorSpec) -> Any:
        return near.new_empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype))

    call.meta["val"] = value(views.inputs[0])
    for k, op in enumerate(views.ops, 1):
        node = graph.call_function(resolve(op.target), tuple(argument(a) for a in op.args))
        node.meta["val"] = value(views.tensor(k))
        made.append(node)
    return [made[o] for o in views.outputs]


def _prepared(graph: fx.Graph, operator: Prepared, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes of the prepared values, marked to be hoisted; to be called where nodes are being inserted."""
    sources = [inputs[k] for k in operator.split.sources]
    near = sources[0].meta["val"].detach()
    specs = operator.split.prepare.output_specs
    values = [near.new_empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype)) for s in specs]
    call = graph.call_function(operator.prepare, tuple(sources))
    call.meta = {"val": values[0] if len(values) == 1 else tuple(values), MARK: True}
    if len(values) == 1:
        return [call]
    made = [graph.call_function(operator_getitem, (call, k)) for k in range(len(values))]
    for node, value in zip(made, values, strict=True):
        node.meta = {"val": value, MARK: True}
    return made
