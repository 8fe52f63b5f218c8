"""The baseline: the sub-graph's operators, one after the other, as the model runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusescout.contenders import repro
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.ir import Subgraph
from fusescout.reference import build


class Eager:
    """Runs the captured operators unchanged."""

    name = "eager"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        return [{}]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        try:
            return Built(build(graph), 0.0)
        except ValueError as error:
            raise ContenderFailed(f"{error}.") from error

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        return Upkeep(0, (), ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        return repro.script(graph, device, "eager", "contender = reference\n")
