"""What `torch.compile` makes of the sub-graph: Inductor's code, without Dynamo in front.

The sub-graph is captured already. With Dynamo's guards in front of 25 such sites, BERT-base 32x512 in bf16 took 8.44 ms
where eager took 7.94 (H200, torch 2.11), though each chain by itself was faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx

from fusescout.contenders import repro
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.inputs import InputSource
from fusescout.ir import Subgraph
from fusescout.reference import build

AUTOTUNE = "max-autotune-no-cudagraphs"


class Inductor:
    """Inductor with the modes that keep launches comparable.

    Args:
        cold: compile in a cache folder of its own, so that `compile_s` is what a user pays the first time.
    """

    name = "inductor"

    def __init__(self, cold: bool = False) -> None:
        self.cold = cold

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        # max-autotune costs a minute a chain on CUDA, so it is raced only when asked for.
        modes = ["default", AUTOTUNE] if device.kind == "cuda" and effort == "max" else ["default"]
        return [{"mode": mode} for mode in modes]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        """Compile for the captured shapes and run once.

        A patch builds it while Dynamo captures the model. In Dynamo's tracing context the example's sizes would become
        symbols of that capture which come from no input, and torch 2.11 then fails to make its guards.
        """
        from torch import _inductor
        from torch._inductor.utils import fresh_cache

        cache: Any = fresh_cache
        reference = build(graph)
        example = InputSource(graph, None, device.kind, 0).make("normal")
        start = time.perf_counter()
        try:
            with cache() if self.cold else nullcontext(), torch.no_grad(), tracing(None):
                traced = make_fx(lambda *inputs: list(reference(inputs)), tracing_mode="fake", pre_dispatch=True)(
                    *example
                )
                compiled: Any = _inductor.compile(traced, list[Any](example), options=_options(variant["mode"]))
                compiled(*example)
        except Exception as error:  # isolation boundary: Inductor failing is a result of the race
            first = (str(error).strip().splitlines() or [""])[0]
            raise ContenderFailed(f"torch.compile failed: {type(error).__name__}: {first[:300]}.") from error

        def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(compiled(*inputs))

        return Built(run, time.perf_counter() - start)

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        return Upkeep(1, ("torch.compile",), ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        mode = variant["mode"]
        code = f'contender = torch.compile(reference, fullgraph=True, dynamic=False, mode="{mode}")\n'
        return repro.script(graph, device, f"inductor ({mode})", code)


def _options(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return {} if mode == "default" else dict(list_mode_options(mode))
