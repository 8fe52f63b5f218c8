"""The matrix products of a chain without the rest of it: what a perfect epilogue costs. A yardstick, no contender."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import substitute
from fusescout.reference import build
from fusescout.regions import GEMMS


class Bare:
    """Runs only the matrix products, with what their operands need, as eager does."""

    name = "bare"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        return [{}] if any(op.name in GEMMS for op in graph.ops) else "It has no matrix product."

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        products = tuple(len(graph.inputs) + k for k, op in enumerate(graph.ops) if op.name in GEMMS)
        try:
            return Built(build(upto(graph, products)), 0.0)
        except ValueError as error:
            raise ContenderFailed(f"{error}.") from error

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        return Upkeep(0, (), ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        return ""


def upto(graph: Subgraph, outputs: Sequence[int]) -> Subgraph:
    """The sub-graph with these outputs, less what they don't need; all inputs stay where they are."""
    first = len(graph.inputs)
    needed: set[int] = set()
    waiting = list(outputs)
    while waiting:
        index = waiting.pop()
        if index >= first and index not in needed:
            needed.add(index)
            waiting += graph.ops[index - first].inputs
    number = {k: k for k in range(first)} | {old: first + new for new, old in enumerate(sorted(needed))}
    ops = tuple(
        Op(op.target, substitute(op.args, number), tuple((k, substitute(v, number)) for k, v in op.kwargs), op.out)
        for op in (graph.ops[old - first] for old in sorted(needed))
    )
    return Subgraph(graph.inputs, ops, tuple(number[i] for i in outputs))
