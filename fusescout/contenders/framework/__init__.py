"""The framework's own fused operators in place of a chain that spells one out.

Each step rewrites the sub-graph as plain data, and the result is run by `reference.build` like eager. What a region
with one tensor in and one out computes is found by asking it: in float64 on a few rows it must agree with the built-in.
So it matters not how a model spells GELU or a norm. Attention, GEMM epilogues and convolutions are matched by
structure. Whether a rewritten sub-graph is right in its own dtype is for `verify.py` to say, as for every contender.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import torch

from fusescout import constants
from fusescout.contenders import repro
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.contenders.framework.affine import affine
from fusescout.contenders.framework.attention import attention
from fusescout.contenders.framework.batch_norm import folded_batch_norm
from fusescout.contenders.framework.chunked_loss import chunked_loss
from fusescout.contenders.framework.folded import folded_affine
from fusescout.contenders.framework.fused_convolution import cudnn_convolution
from fusescout.contenders.framework.fused_convolution import onednn_convolution
from fusescout.contenders.framework.gemm_activation import gemm_activation
from fusescout.contenders.framework.one_product import BMM
from fusescout.contenders.framework.one_product import LINEAR
from fusescout.contenders.framework.one_product import kept_bytes
from fusescout.contenders.framework.one_product import one_product
from fusescout.contenders.framework.shared_bias import shared_bias
from fusescout.contenders.framework.spelled import spelled_out
from fusescout.contenders.framework.summed import summed
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.preparing import prepared
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.ir import Subgraph
from fusescout.reference import build
from fusescout.reference import to_source

RULES: tuple[Callable[[Subgraph], Step | None], ...] = (
    spelled_out, affine, attention, summed, folded_affine, folded_batch_norm, shared_bias, one_product,
    chunked_loss,
)  # fmt: skip
DEVICE_RULES: dict[str, tuple[Callable[[Subgraph], Step | None], ...]] = {
    "cuda": (gemm_activation, cudnn_convolution),
    "cpu": (onednn_convolution,),
}
PRIVATE = ("_", "cudnn_", "mkldnn.")
"""How names of operators begin that torch documents nowhere."""


class Framework:
    """Runs the sub-graph with fused built-ins."""

    name = "framework"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        calls = [name for name, _ in rewrites(graph, device)]
        if not calls:
            return "No fused operator of the framework covers a part of this chain that it doesn't use already."
        return [{"calls": calls[:n]} for n in range(len(calls), 0, -1)]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        rewritten = self._rewritten(graph, variant, device)
        source = to_source(rewritten, "framework")
        try:
            parts = constants.split(rewritten)
            if parts is None:
                return Built(build(rewritten), 0.0, source)
            parts = constants.views_apart(parts)
            return prepared(parts, build(parts.steady), source)
        except ValueError as error:
            raise ContenderFailed(f"{error}.") from error

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        private = tuple(f"torch.ops.{c}" for c in variant["calls"] if c.startswith(PRIVATE))
        only = "cpu" if any("mkldnn" in c for c in private) else "cuda"
        memory = kept_bytes(graph) if {LINEAR, BMM} & set(variant["calls"]) else 0
        rests_on = (*private, *([f"{memory / (1 << 20):.3g} MiB for prepared weights"] if memory else []))
        return Upkeep(len(variant["calls"]), rests_on, (only,) if private else ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        code = to_source(self._rewritten(graph, variant, device), "contender")
        return repro.script(graph, device, "framework", code)

    def _rewritten(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Subgraph:
        steps = rewrites(graph, device)
        wanted = list(variant["calls"])
        if [name for name, _ in steps[: len(wanted)]] != wanted or not wanted:
            raise ContenderFailed(
                f"This sub-graph can't be rewritten to {', '.join(wanted)} with torch {torch.__version__}."
            )
        return steps[len(wanted) - 1][1]


def rewrites(graph: Subgraph, device: Device) -> list[Step]:
    """Every step that applies, in order; each one's sub-graph includes those before it."""
    steps: list[Step] = []
    rules = (*RULES, *DEVICE_RULES.get(device.kind, ()))
    while len(steps) < 8:
        found = next((step for rule in rules if (step := rule(graph))), None)
        if found is None:
            return steps
        steps.append(found)
        graph = found[1]
    return steps
