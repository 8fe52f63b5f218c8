"""A graph whose sizes Dynamo left open, carried out for each shape it meets.

`torch.compile` makes sizes symbolic when a second one comes along, and a plan's kernels have fixed shapes. So the graph
is carried out anew for the shapes of a call, as often as `MOST_SHAPES`; later shapes run as the framework runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.recompute import run_eagerly
from fusescout.patching import Backend

MOST_SHAPES = 16
Key = tuple[Any, ...]


def is_open(inputs: Sequence[Any]) -> bool:
    """Whether any size among a graph's example inputs is symbolic."""
    return any(map(_varies, inputs))


def _varies(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in sizes)


class ByShape:
    """The graph as a callable.

    Args:
        backend: carries out the plan in a graph of fixed shapes.
        module: what Dynamo captured; its guards say which sizes it is right for.
        inputs: its example inputs.
    """

    def __init__(self, backend: Backend, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.backend, self.module = backend, module
        self._varying = [k for k, value in enumerate(inputs) if _varies(value)]
        self._known: dict[Key, Callable[..., Any]] = {}
        self._general = run_eagerly(module)
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        key = (torch.is_grad_enabled(), *(_size(inputs[k]) for k in self._varying))
        run = self._known.get(key)
        return (run or self._carried_out(key, inputs))(*inputs)

    def _carried_out(self, key: Key, inputs: Sequence[Any]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._known and len(self._known) >= MOST_SHAPES:
                why = f"more than {MOST_SHAPES} shapes were seen; later ones run eagerly"
                self.backend.counters.fallbacks.setdefault("shapes", why)
                return self._general
            if key not in self._known:
                self._known[key] = self.backend(fixed(self.module, inputs), list(inputs))
            return self._known[key]


def fixed(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same graph with these inputs as its examples."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta = {**node.meta, "example_value": value}
    return copy


def _size(value: Any) -> Any:
    return (value.shape, value.stride()) if isinstance(value, Tensor) else value
