"""Inductor in one mode only, for benches that show its modes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusescout.contenders.inductor import AUTOTUNE
from fusescout.contenders.inductor import Inductor
from fusescout.device import Device
from fusescout.ir import Subgraph


class Default(Inductor):
    name = "inductor-default"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        return [{"mode": "default"}]


class Autotune(Inductor):
    """The mode that times Triton's and the library's kernels for each operator; about a minute a chain on CUDA."""

    name = "inductor-autotune"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        return [{"mode": AUTOTUNE}]
