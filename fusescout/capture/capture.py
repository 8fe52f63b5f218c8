"""Capture what a model computes: call it once under Dynamo and keep each graph with the inputs it really got."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch import nn

from fusescout import ir
from fusescout.capture.aten import to_aten
from fusescout.capture.encode import encode_graph
from fusescout.capture.encode import shorten
from fusescout.capture.protect import copy_arguments
from fusescout.capture.protect import copy_tensor
from fusescout.capture.protect import protected
from fusescout.errors import NotCapturable
from fusescout.session import GraphBreak

if TYPE_CHECKING:
    from fusescout.target import Workload


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
    with _dynamo() as notes:
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
    seen = sorted((e for e in recorder.entries if e.calls), key=lambda e: e.order)
    graphs = tuple(e.finish(k, recorder.names) for k, e in enumerate(seen))
    warnings = list(dict.fromkeys((*recorder.warnings, *notes.warnings)))
    if not graphs and not warnings:
        warnings.append("the model ran no tensor operation that Dynamo could capture")
    return Capture(graphs, tuple(notes.breaks), tuple(warnings))


class _Entry:
    """One graph that Dynamo compiled."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.inputs: tuple[Any, ...] = ()
        self.calls = 0
        self.order = 0

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
        self.runs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        try:
            entry = _Entry(to_aten(gm, example_inputs))
        except NotCapturable as error:
            self.warnings.append(f"graph {len(self.entries) + len(self.warnings)} left out: {error.why}")
            return gm.forward
        self.entries.append(entry)

        def run(*inputs: Any) -> Any:
            if self.recording:
                if not entry.calls:
                    entry.order = self.runs
                    entry.inputs = tuple(self._keep(value) for value in inputs)
                entry.calls += 1
                self.runs += 1
            return gm.forward(*inputs)

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


@dataclass
class _Notes:
    breaks: list[GraphBreak] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


@contextmanager
def _dynamo() -> Iterator[_Notes]:
    """Dynamo with fixed shapes, whose counters, logs and break list are read and then put back."""
    from torch._dynamo import config
    from torch._dynamo.output_graph import graph_break_reasons
    from torch._dynamo.utils import counters

    notes = _Notes()
    logger, level = logging.getLogger("torch._dynamo"), logging.getLogger("torch._dynamo").level
    saved = {k: v.copy() for k, v in counters.items()}
    already = len(graph_break_reasons)
    counters.clear()
    logger.setLevel(logging.ERROR)
    fixed = {
        "specialize_int": True,
        "specialize_float": True,
        "automatic_dynamic_shapes": False,
        "suppress_errors": False,
        "recompile_limit": 256,
        "accumulated_recompile_limit": 4096,
    }
    try:
        with config.patch(fixed):
            yield notes
    finally:
        logger.setLevel(level)
        told = []
        for reason in graph_break_reasons[already:]:
            told.append(reason.reason)
            notes.breaks.append(GraphBreak(reason=_headline(reason.reason), where=_place(reason.user_stack)))
        silent = [r for r in counters.get("graph_break", {}) if r not in told]
        notes.breaks += [GraphBreak(reason=_headline(r)) for r in silent]
        notes.breaks = list(dict.fromkeys(notes.breaks))
        del graph_break_reasons[already:]
        counters.clear()
        counters.update(saved)


def _headline(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines()]
    explanation = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0]}: {explanation}" if explanation else lines[0]


def _place(stack: Any) -> str:
    frame = stack[-1] if stack else None
    return f"{shorten(frame.filename)}:{frame.lineno} in {frame.name}" if frame else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
