"""liger-kernel's Triton kernels as a peer in benches, for the chains it has an operator for.

It is matched by the chain's operators and the order of its inputs, as `bench/chains.py` spells them, and checked like
every contender. Its RoPE overwrites its inputs, which no chain may, so it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.device import Device
from fusescout.environment import package_version
from fusescout.errors import ContenderFailed
from fusescout.errors import in_a_line
from fusescout.inputs import InputSource
from fusescout.ir import Subgraph

Inputs = Sequence[Any]
Maker = Callable[[Subgraph], Callable[[Inputs], Any]]
LLAMA_NORM = ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul")
GEMMA_NORM = ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "add", "mul", "to")
"""The last steps of the casts that models spell out, as captured."""


class Liger:
    """Runs a chain with one liger-kernel operator, plus eager ones around it where that is how people use it."""

    name = "liger"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        found = _operator(graph)
        if found is None:
            return "liger-kernel has no operator for this chain."
        if find_spec("liger_kernel") is None:
            return 'liger-kernel is not installed; it comes with "fusescout[bench]".'
        if device.kind != "cuda":
            return "Its kernels are Triton's, and run on a GPU only."
        return [{"operator": found}]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        """Import it and run once, which compiles."""
        import torch

        start = time.perf_counter()
        try:
            call = MAKERS[variant["operator"]](graph)
            with torch.no_grad():
                call(InputSource(graph, None, device.kind, 0).make("normal"))
        except Exception as error:  # isolation boundary: foreign code, of any version
            raise ContenderFailed(f"liger-kernel failed: {in_a_line(error, 300)}.") from error

        def run(inputs: Inputs) -> tuple[Any, ...]:
            made = call(inputs)
            return made if isinstance(made, tuple) else (made,)

        return Built(run, time.perf_counter() - start)

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        return Upkeep(1, (f"liger-kernel {package_version('liger-kernel')}",), ("cuda",))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        return ""


def _operator(graph: Subgraph) -> str | None:
    """The name of the maker for this chain; None if there is none."""
    chain, widths = graph.chain, len(graph.inputs)
    last = graph.ops[-1]
    if chain == ("softmax",) and last.args[1] in (-1, len(graph.inputs[0].shape) - 1):
        return "softmax"
    if chain == ("layer_norm",) and widths == 3:
        return "layer_norm"
    if chain in (("rms_norm",), LLAMA_NORM) and widths == 2:
        return "rms_norm" if chain == ("rms_norm",) else "llama_rms_norm"
    if sorted(chain) == sorted(GEMMA_NORM) and widths == 2:
        return "gemma_rms_norm"
    if chain == ("add", *LLAMA_NORM) and widths == 3 and len(graph.outputs) == 2:
        return "add_rms_norm"
    if chain == ("silu", "mul") and widths == 2:
        return "silu_mul"
    if chain == ("to", "cross_entropy_loss") and widths == 2:
        return "cross_entropy"
    head = [name for name in chain if name != "to"] == ["linear", "cross_entropy_loss"]
    if head and widths == 3 and len(last.args) == 2 and graph.output_specs[0].dtype == "float32":
        return "linear_cross_entropy"
    if chain == ("group_norm", "silu") and widths == 3:
        return "group_norm_silu"
    return None


def _function(module: str, name: str) -> Callable[..., Any]:
    found = getattr(import_module(f"liger_kernel.ops.{module}"), name)
    return found.apply  # type: ignore[no-any-return]


def _softmax(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply = _function("softmax", "LigerSoftmaxFunction")
    return lambda x: apply(x[0])


def _layer_norm(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply, eps = _function("layer_norm", "LigerLayerNormFunction"), _number(graph, "layer_norm", 4, 1e-5)
    return lambda x: apply(x[0], x[1], x[2], eps)


def _rms(mode: str, offset: float, eps_of: tuple[str, int]) -> Maker:
    def make(graph: Subgraph) -> Callable[[Inputs], Any]:
        apply, eps = _function("rms_norm", "LigerRMSNormFunction"), _number(graph, *eps_of, 1e-6)
        return lambda x: apply(x[0], x[1], eps, offset, mode, False)

    return make


def _add_rms_norm(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    order = (0, 1) if graph.outputs[0] > graph.outputs[1] else (1, 0)

    def call(x: Inputs) -> Any:
        made = apply(x[0], x[1], x[2], 1e-6, 0.0, "llama", False)  # the norm, then the sum
        return made[order[0]], made[order[1]]

    return call


def _silu_mul(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply = _function("swiglu", "LigerSiLUMulFunction")
    return lambda x: apply(x[0], x[1])


def _cross_entropy(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply = _function("cross_entropy", "LigerCrossEntropyFunction")
    return lambda x: apply(x[0], x[1], None)[0].float()


def _linear_cross_entropy(graph: Subgraph) -> Callable[[Inputs], Any]:
    apply = _function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    return lambda x: apply(x[0], x[1], x[2])[0].float()


def _group_norm_silu(graph: Subgraph) -> Callable[[Inputs], Any]:
    from torch.nn.functional import silu

    apply, groups = _function("group_norm", "LigerGroupNormFunction"), int(_number(graph, "group_norm", 1, 32))
    eps, channels = _number(graph, "group_norm", 4, 1e-5), graph.inputs[0].shape[1]
    return lambda x: silu(apply(x[0], x[1], x[2], channels, groups, eps))


def _number(graph: Subgraph, name: str, place: int, default: float) -> float:
    """A numeric argument of the first operator of a name that has one there."""
    for op in graph.ops:
        if op.name == name and len(op.args) > place and isinstance(op.args[place], int | float):
            return float(op.args[place])  # type: ignore[arg-type]
    return default


MAKERS: dict[str, Maker] = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms("gemma", 0.0, ("rms_norm", 3)),
    "llama_rms_norm": _rms("llama", 0.0, ("add", 1)),
    "gemma_rms_norm": _rms("gemma", 1.0, ("add", 1)),
    "add_rms_norm": _add_rms_norm,
    "silu_mul": _silu_mul,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "group_norm_silu": _group_norm_silu,
}
