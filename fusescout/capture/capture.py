"""Capture what a model computes: call it once under Dynamo and keep each graph with the inputs it really got."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn
from torch.utils._pytree import tree_leaves

from fusescout import ir
from fusescout.capture.activations import run_untouched
from fusescout.capture.aten import CONSTANT_MASKS
from fusescout.capture.aten import to_aten
from fusescout.capture.dynamo import fixed_shapes
from fusescout.capture.encode import encode_graph
from fusescout.capture.protect import copy_arguments
from fusescout.capture.protect import copy_tensor
from fusescout.capture.protect import protected
from fusescout.errors import NotCapturable
from fusescout.session import GraphBreak

if TYPE_CHECKING:
    from fusescout.workload import Workload

CHECKPOINT = "higher_order.tag_activation_checkpoint"


@dataclass(frozen=True)
class CapturedGraph:
    """One graph of the model.

    Attributes:
        index: its place in execution order.
        module: ATen, before autograd and decomposition; takes `inputs`, gives Dynamo's outputs as a tuple or list.
        graph: the same as plain data; node names agree.
        inputs: the runtime inputs of its first run in one call, in placeholder order. Parameters and buffers are the
            model's own tensors, everything else is a copy with the same layout.
        calls: how often it ran in that call.
    """

    index: int
    module: fx.GraphModule
    graph: ir.Graph
    inputs: tuple[Any, ...]
    calls: int = 1


@dataclass(frozen=True)
class Capture:
    """All graphs of one call in execution order, why there is more than one, and what could not be captured."""

    graphs: tuple[CapturedGraph, ...]
    breaks: tuple[GraphBreak, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def constant_masks(self) -> int:
        """Attention masks that were left out of the graphs as constant, or made dense."""
        return sum(g.module.meta.get(CONSTANT_MASKS, 0) for g in self.graphs)


def capture(workload: Workload) -> Capture:
    """Capture one call of the workload's model; model, gradients and random state are left as they were found.

    The model runs three times: plainly, so that an error of its own is told apart from one of the capture (it is
    raised unchanged), once under Dynamo, and once more to record the inputs.

    Returns:
        The graphs; none with a warning if Dynamo can't capture the model.
    """
    model = getattr(workload.model, "_orig_mod", workload.model)
    recorder = _Recorder(model)
    with protected(model):
        _call(workload, model)
    with fixed_shapes(recorder) as notes:
        compiled = torch.compile(_private(model), backend=recorder, dynamic=False)
        try:
            with protected(model):
                _call(workload, compiled)
            recorder.recording = True
            with protected(model):
                _call(workload, compiled)
        except Exception as error:  # isolation boundary: Dynamo may fail in any way; the model itself just ran
            recorder.warnings.append(f"capture stopped with {type(error).__name__}: {_first_line(error)}")
        finally:
            recorder.recording = False
    seen = sorted((e for e in recorder.entries if e.calls and not e.wrong), key=lambda e: e.order)
    graphs = tuple(e.finish(k, recorder.names) for k, e in enumerate(seen))
    warnings = list(dict.fromkeys(recorder.warnings))
    regions = sum(n.target == CHECKPOINT for g in graphs for n in g.graph.nodes)
    if regions:
        warnings.append(f"{regions} activation-checkpointed regions are kept whole; nothing inside them is fused")
    if not graphs and not warnings:
        why = f": {notes.breaks[0].reason}" if notes.breaks else ""
        warnings.append(f"the model ran no tensor operation that Dynamo could capture{why}")
    return Capture(graphs, tuple(notes.breaks), tuple(warnings))


class _Entry:
    """One graph that Dynamo compiled."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.inputs: tuple[Any, ...] = ()
        self.calls = 0
        self.order = 0
        self.wrong = False

    def finish(self, index: int, names: dict[int, str]) -> CapturedGraph:
        graph = encode_graph(self.module, index, self.inputs, names)
        return CapturedGraph(index, self.module, graph, self.inputs, self.calls)


class _Recorder:
    """A Dynamo back end that runs Dynamo's graphs unchanged and keeps them as ATen."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(m): name for name, m in model.named_modules()}
        self.own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.entries: list[_Entry] = []
        self.warnings: list[str] = []
        self.recording = False
        self.order = itertools.count()

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        try:
            entry = _Entry(to_aten(gm, example_inputs))
        except NotCapturable as error:
            self.warnings.append(f"graph {len(self.entries) + len(self.warnings)} left out: {error.reason}")
            return gm.forward
        self.entries.append(entry)

        def run(*inputs: Any) -> Any:
            if not self.recording:
                return gm.forward(*inputs)
            entry.calls += 1
            if entry.calls > 1:
                return gm.forward(*inputs)
            entry.order = next(self.order)
            entry.inputs = tuple(self._keep(value) for value in inputs)
            got, _ = run_untouched(entry.module, entry.inputs)
            wanted = gm.forward(*inputs)
            if not _agree(wanted, got):
                entry.wrong = True
                self.warnings.append(f"graph {entry.order} left out: its ATen form gives other values")
            return wanted

        return run

    def _keep(self, value: Any) -> Any:
        return copy_tensor(value) if isinstance(value, Tensor) and id(value) not in self.own else value


def _private(model: nn.Module) -> Callable[..., Any]:
    """A function of its own code object that calls the model: compiled code is cached there, not on the user's code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _call(workload: Workload, model: Callable[..., Any]) -> None:
    args, kwargs = copy_arguments(workload.args, workload.kwargs)
    with torch.set_grad_enabled(workload.mode == "training"):
        model(*args, **kwargs)


def _agree(wanted: Any, got: Any) -> bool:
    """Equal up to what a rerun may differ by: atomic additions come in any order."""
    pairs = list(zip(tree_leaves(wanted), tree_leaves(got), strict=True))
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and _close(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b)
        for a, b in pairs
    )


def _close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return not a.is_complex() or torch.allclose(a, b, rtol=1e-3, equal_nan=True)
    step = 64 * torch.finfo(a.dtype).eps
    scale = float(a.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=step, atol=step * scale, equal_nan=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
