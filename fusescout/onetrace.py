"""One Dynamo trace for several ways to carry out plans: each graph is captured and brought to ATen once.

Tracing takes about 3 s for GPT-2, and is the same for every plan. What is done to the graph after it is done for each
way when it first runs the graph, as the patch back end does it at new shapes (`patching.Backend`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch import nn

from fusescout.capture.aten import to_aten
from fusescout.errors import NotCapturable
from fusescout.patching import Backend
from fusescout.restride import copy_of


class OneTrace:
    """A Dynamo back end that stands for many.

    Attributes:
        current: carries out what is called now; None runs the graphs as Dynamo gave them.
        compiled: the traced model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.current: Backend | None = None
        self.compiled: Callable[..., Any] = torch.compile(model, backend=self, dynamic=False)

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return _Traced(self, module, inputs)

    def carried_out(self, model: nn.Module, backend: Backend | None) -> nn.Module:
        """The model as this back end patches it."""
        return _Patched(model, self, backend)


class _Patched(nn.Module):
    """Chooses the back end, then calls the traced model; passes for the model otherwise, as `OptimizedModule` does."""

    def __init__(self, model: nn.Module, trace: OneTrace, backend: Backend | None) -> None:
        super().__init__()
        self._orig_mod, self._trace, self._backend = model, trace, backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._trace.current = self._backend
        return self._trace.compiled(*args, **kwargs)


class _Traced:
    """One graph, with what each back end made of it."""

    def __init__(self, trace: OneTrace, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._trace, self._module, self._inputs = trace, module, list(inputs)
        self._runs: dict[Backend | None, Callable[..., Any]] = {None: module.forward}
        self._aten: fx.GraphModule | NotCapturable
        try:
            self._aten = to_aten(module, inputs)
            self._inputs = [node.meta["val"] for node in self._aten.graph.find_nodes(op="placeholder")]
        except NotCapturable as error:
            self._aten = error

    def __call__(self, *inputs: Any) -> Any:
        backend = self._trace.current
        run = self._runs.get(backend)
        if run is None:
            assert backend is not None
            run = self._runs[backend] = backend(_twin(self._module), self._inputs, lambda *_: self._traced())
        return run(*inputs)

    def _traced(self) -> fx.GraphModule:
        if isinstance(self._aten, NotCapturable):
            raise self._aten
        return _with_own_regions(copy_of(self._aten))


def _twin(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph that a compiler may change, with what tells which inputs are parameters."""
    twin = _with_own_regions(copy_of(module))
    if (sources := getattr(module, "_param_name_to_source", None)) is not None:
        twin._param_name_to_source = sources
    for old, new in zip(module.graph.nodes, twin.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return twin


def _with_own_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Give a copy its own bodies of checkpointed regions: running eagerly changes them (`recompute.run_eagerly`)."""
    for name, body in list(module.named_children()):
        if isinstance(body, fx.GraphModule):
            setattr(module, name, _with_own_regions(copy_of(body)))
    return module
