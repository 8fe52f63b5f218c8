"""What `torch.compile` makes of the sub-graph: Inductor's code, without Dynamo in front.

The sub-graph is captured already. With Dynamo's guards in front of 25 such sites, BERT-base 32x512 in bf16 took 8.44 ms
where eager took 7.94 (H200, torch 2.11), though each chain by itself was faster.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_dir
from torch import Tensor
from torch._guards import TracingContext
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusescout import environ
from fusescout.contenders import repro
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.contenders.compile_seconds import cold_seconds
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.errors import in_a_line
from fusescout.inputs import InputSource
from fusescout.ir import Subgraph
from fusescout.reference import build

AUTOTUNE = "max-autotune-no-cudagraphs"
AHEAD = "compiled ahead"
"""Marks the seconds that `compile` took: a later `build` finds its cache filled."""


class Inductor:
    """Inductor with the modes that keep launches comparable.

    Args:
        cold: compile in a cache folder of the chain's own, so that `compile_s` is what a user pays the first time: it
            is the longest time seen with `cache_dir`, since a later run finds that folder filled.
        cache_dir: holds those folders; by default the user's cache folder.
    """

    name = "inductor"

    def __init__(self, cold: bool = False, cache_dir: Path | None = None) -> None:
        self.cold = cold
        self.cache_dir = cache_dir or Path(user_cache_dir("fusescout"))

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        # max-autotune costs a minute a chain on CUDA, so it is raced only when asked for.
        modes = ["default", AUTOTUNE] if device.kind == "cuda" and effort == "max" else ["default"]
        return [{"mode": mode} for mode in modes]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        """Compile for the captured shapes and run once.

        A patch builds it while Dynamo captures the model. In Dynamo's tracing context the example's sizes would become
        symbols of that capture which come from no input, and torch 2.11 then fails to make its guards.
        """
        what = self._what(graph, variant)
        example = InputSource(graph, None, device.kind, 0).make("normal")
        start = time.perf_counter()
        try:
            with self._own_cache(what), torch.no_grad(), tracing(None):
                compiled = _compiled(graph, variant, example)
                compile_s, start = time.perf_counter() - start, time.perf_counter()
                compiled(*example)
        except Exception as error:  # isolation boundary: Inductor failing is a result of the race
            raise ContenderFailed(f"torch.compile failed: {in_a_line(error, 300)}.") from error

        def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(compiled(*inputs))

        if self.cold:
            compile_s = max(compile_s, cold_seconds(self.cache_dir, [*what, AHEAD], device, 0.0))
        compile_s += time.perf_counter() - start
        return Built(run, cold_seconds(self.cache_dir, what, device, compile_s) if self.cold else compile_s)

    def compile(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> float:
        """Compile into the chain's cache folder for a later `build`, and launch nothing. Gives the seconds."""
        what = self._what(graph, variant)
        example = InputSource(graph, None, device.kind, 0).make("normal")
        start = time.perf_counter()
        try:
            with self._own_cache(what), torch.no_grad(), tracing(None):
                _compiled(graph, variant, example)
        except Exception as error:  # isolation boundary: as above
            raise ContenderFailed(f"torch.compile failed: {in_a_line(error, 300)}.") from error
        return cold_seconds(self.cache_dir, [*what, AHEAD], device, time.perf_counter() - start)

    @staticmethod
    def _what(graph: Subgraph, variant: Mapping[str, Any]) -> list[str]:
        return [graph.key, variant["mode"], torch.__version__]

    @contextmanager
    def _own_cache(self, what: list[str]) -> Iterator[None]:
        """Point Inductor and Triton to the chain's own folder, if this contender compiles cold."""
        if not self.cold:
            yield
            return
        from torch._inductor.utils import clear_caches

        folder = self.cache_dir / "inductor" / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
        places = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        clear_caches()  # what is in memory belongs to another folder
        try:
            with environ.changed(**places):
                yield
        finally:
            clear_caches()

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        return Upkeep(1, ("torch.compile",), ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        mode = variant["mode"]
        code = f'contender = torch.compile(reference, fullgraph=True, dynamic=False, mode="{mode}")\n'
        return repro.script(graph, device, f"inductor ({mode})", code)


def _compiled(graph: Subgraph, variant: Mapping[str, Any], example: Sequence[Tensor]) -> Any:
    """The chain as code, for these sizes. Without a world of shapes around it, Inductor leaves its disk cache alone."""
    from torch import _inductor

    reference = build(graph)
    traced = make_fx(lambda *inputs: list(reference(inputs)), tracing_mode="fake", pre_dispatch=True)(*example)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    inputs = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    with tracing(TracingContext(mode)):
        return _inductor.compile(traced, list[Any](inputs), options=_options(variant["mode"]))


def _options(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return {} if mode == "default" else dict(list_mode_options(mode))
