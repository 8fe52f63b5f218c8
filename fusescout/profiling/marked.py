"""Runs captured graphs node by node, each node inside a profiler marker or between two CUDA events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._C._profiler import _RecordFunctionFast
from torch.utils._pytree import tree_leaves

from fusescout.capture.protect import copy_tensor
from fusescout.profiling.trace import MARKER

if TYPE_CHECKING:
    from fusescout.capture import CapturedGraph

Events = tuple[torch.cuda.Event, torch.cuda.Event]
_CALLS = frozenset({"call_function", "call_method", "call_module"})
HEAD_START_CYCLES = 100_000
"""GPU cycles per node (about 50 µs) that the device sleeps first: the host gets ahead, and events time kernels only."""


class Marked(fx.Interpreter):
    """Runs a graph with a marker "fs:graph:node" around each node that computes."""

    def __init__(self, module: fx.GraphModule, index: int) -> None:
        super().__init__(module)
        busy = [n for n in module.graph.nodes if n.op in _CALLS]
        self.scopes = {n: _RecordFunctionFast(f"{MARKER}{index}:{n.name}") for n in busy}

    def run_node(self, n: fx.Node) -> Any:
        scope = self.scopes.get(n)
        if scope is None:
            return super().run_node(n)
        if n.op != "call_function":
            with scope:
                return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with scope:  # As tight as it gets: fetching arguments is the interpreter's time, not the node's.
            return n.target(*args, **kwargs)  # type: ignore[operator]


class Timed(fx.Interpreter):
    """Runs a graph with a CUDA event before and after each node that computes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.events: dict[str, Events] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in _CALLS:
            return super().run_node(n)
        out, self.events[n.name] = bracket(lambda: super(Timed, self).run_node(n))
        return out


def bracket(work: Callable[[], Any]) -> tuple[Any, Events]:
    """The result of `work`, and a CUDA event before and after it."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    out = work()
    after.record()
    return out, (before, after)


def elapsed_us(events: Events) -> float:
    """µs between two events that have happened."""
    return float(events[0].elapsed_time(events[1])) * 1e3


class Replay:
    """Captured graphs on their recorded inputs, as often as one call of the model runs each of them.

    In training each is followed by its own backward pass, which leaves no `.grad` behind. The recorded inputs stay
    as they are: what a call may change is copied for it, except the model's own tensors.
    """

    def __init__(self, graphs: Sequence[CapturedGraph], model: torch.nn.Module, training: bool) -> None:
        self.graphs = list(graphs)
        self.training = training
        self.own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.runners: dict[int, fx.Interpreter] = {g.index: Marked(g.module, g.index) for g in graphs}
        self.ones: dict[int, list[Tensor]] = {}

    def prepare(self) -> Callable[[], None]:
        """The next call, on fresh inputs."""
        inputs = {g.index: self._inputs(g) for g in self.graphs}

        def call() -> None:
            for g in self.graphs:
                for _ in range(g.calls):
                    self._run(g.index, inputs[g.index])

        return call

    def drop_failing(self) -> list[str]:
        """Run each graph once and forget those that can't be replayed alone; says which and why."""
        reasons = []
        for g in list(self.graphs):
            try:
                self._run(g.index, self._inputs(g))
            except Exception as error:  # isolation boundary: a graph out of its context may be invalid in any way
                self.graphs.remove(g)
                cause = str(error).partition("\n")[0]
                reasons.append(f"Graph {g.index} can't be replayed, so its time is unlinked: {cause}")
        return reasons

    def event_times(self, runs: int) -> dict[tuple[int, str], float]:
        """Median forward µs per (graph, node) by CUDA events, less what two events alone take; nothing of backward."""
        samples: dict[tuple[int, str], list[float]] = defaultdict(list)
        empty: list[float] = []
        for _ in range(runs):
            for g in self.graphs:
                timed = Timed(g.module)
                inputs = self._inputs(g)
                torch.cuda.synchronize()
                torch.cuda._sleep(HEAD_START_CYCLES * len(g.graph.nodes))  # type: ignore[no-untyped-call]
                with torch.set_grad_enabled(self.training):
                    nothing = bracket(lambda: None)[1]
                    timed.run(*inputs)
                torch.cuda.synchronize()
                empty.append(elapsed_us(nothing))
                for node, events in timed.events.items():
                    samples[g.index, node].append(elapsed_us(events) * g.calls)
        overhead = median(empty) if empty else 0.0
        calls = {g.index: g.calls for g in self.graphs}
        return {key: max(median(v) - overhead * calls[key[0]], 0.0) for key, v in samples.items()}

    def _inputs(self, g: CapturedGraph) -> tuple[Any, ...]:
        return tuple(copy_tensor(v) if isinstance(v, Tensor) and id(v) not in self.own else v for v in g.inputs)

    def _run(self, index: int, inputs: tuple[Any, ...]) -> None:
        with torch.set_grad_enabled(self.training):
            runner = self.runners[index]
            out = runner.run(*inputs)
            if not self.training:
                return
            ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            ends = [t for t in ends if t.numel() == 1] or ends  # a graph that makes the loss is differentiated from it
            starts = [t for t in (*inputs, *runner.module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
            if ends and starts:
                if index not in self.ones:  # made once, so that profiled calls don't hold the kernels that make them
                    self.ones[index] = [torch.ones_like(t) for t in ends]
                torch.autograd.grad(ends, starts, self.ones[index], allow_unused=True)
