"""Data flow of a captured graph: which sets of nodes may be computed at once, and how far such a set can grow."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable

from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.randomness import draws

MAX_OPS = 64
"""Nodes of one set."""


class Flow:
    """Reachability of a graph as bit sets, so that convexity is a few integer operations."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position = {n.name: k for k, n in enumerate(graph.nodes)}
        self.above = [0] * len(graph.nodes)
        self.below = [0] * len(graph.nodes)
        for k, node in enumerate(graph.nodes):
            for name in node.inputs:
                i = self.position[name]
                self.above[k] |= self.above[i] | (1 << i)
        for k in range(len(graph.nodes) - 1, -1, -1):
            for name in graph.users[graph.nodes[k].name]:
                u = self.position[name]
                self.below[k] |= self.below[u] | (1 << u)
        self.barriers = sum(1 << k for k, n in enumerate(graph.nodes) if n.mutates)
        self.random = sum(1 << k for k, n in enumerate(graph.nodes) if draws(n))

    def depends(self, one: str, other: str) -> bool:
        """Whether one of two nodes needs the other's value, in either direction."""
        a, b = self.position[one], self.position[other]
        return bool((self.above[a] >> b | self.above[b] >> a) & 1)

    def convex(self, names: Iterable[str]) -> bool:
        """No path leaves the set and comes back, and no mutation happens between its first and last node.

        Nor does a random draw that waits for the set: it would run after others that it ran before.
        """
        inside = above = below = 0
        first, last = len(self.above), -1
        for name in names:
            k = self.position[name]
            inside |= 1 << k
            above |= self.above[k]
            below |= self.below[k]
            first, last = min(first, k), max(last, k)
        span = ((1 << (last + 1)) - 1) ^ ((1 << first) - 1)
        return not (above & below & ~inside) and not (self.barriers & span) and not (self.random & below & span)


def grow(flow: Flow, seed: set[str], allowed: Callable[[Node], bool], *, backward: bool) -> set[str]:
    """Add neighbours that are allowed and keep the set convex, until nothing fits any more."""
    graph, region = flow.graph, set(seed)
    refused: set[str] = set()
    frontier = sorted(region, key=flow.position.__getitem__)
    while frontier and len(region) < MAX_OPS:
        name = frontier.pop(0)
        near = list(graph.users[name]) + (list(graph.by_name[name].inputs) if backward else [])
        for other in near:
            if other in region or other in refused or not allowed(graph.by_name[other]):
                continue
            if flow.convex(region | {other}):
                region.add(other)
                frontier.append(other)
                refused.clear()
            else:
                refused.add(other)
    return region
