"""Takes prepared constants out of a rewritten graph: they become inputs at fixed addresses, made before the first call.

So a compiler sees parameters, not the work to fold them; a CUDA graph neither repeats that work nor holds its memory;
and what changed is found before each call, not inside a graph that is replayed without Python. When a source changed,
the values are written over in place: graphs captured before read the new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._guards import detect_fake_mode

MARK = "prepared_constant"
"""In a node's meta: it reads parameters, buffers and other such nodes only, and may run once."""
STATIC = "_dynamo_static_input_type"


class Hoisted:
    """The prepared constants of one graph.

    Attributes:
        sources: which inputs of the graph they are made of.
        prepare: makes them.
    """

    def __init__(self, prepare: fx.GraphModule, sources: tuple[int, ...], specs: tuple[Tensor, ...]) -> None:
        self.prepare, self.sources = prepare, sources
        self._specs = specs
        self._seen: list[tuple[Tensor, int, int]] = []
        self._values: tuple[Tensor, ...] = ()
        self._lock = threading.Lock()

    def examples(self, inputs: Sequence[Any]) -> list[Any]:
        """Stand-ins for the values, for a compiler: fake tensors of its own, whose sizes are numbers.

        It would give a real tensor symbolic sizes, whose guards no input of the call could decide.
        """
        device = inputs[self.sources[0]].device
        with _fake_mode(inputs):
            return [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=device) for s in self._specs]

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The graph with its own inputs only; `run` takes the values after them."""

        def call(*inputs: Any) -> Any:
            return run(*inputs, *self.values(inputs))

        return call

    def forget(self) -> None:
        """Make the values anew in the next call, whatever torch knows of their sources."""
        self._seen = []

    def values(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The values for these inputs, made anew where a source is another tensor or was written to."""
        sources = [inputs[k] for k in self.sources]
        if not self._seen or not self._current(sources):
            with self._lock:
                return self._refresh(sources)
        return self._values

    def _current(self, sources: Sequence[Tensor]) -> bool:
        for tensor, (seen, address, version) in zip(sources, self._seen, strict=True):
            if tensor is not seen or tensor._version != version or tensor.data_ptr() != address:
                return False
        return True

    def _refresh(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            made = tuple(self.prepare(*sources))
            uncounted = any(t.is_inference() for t in sources)
            if uncounted or (sources[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                return made
            if self._values:
                for old, new in zip(self._values, made, strict=True):
                    old.copy_(new)
            else:
                owned = {t.untyped_storage().data_ptr() for t in sources}
                self._values = tuple(v.clone() if v.untyped_storage().data_ptr() in owned else v for v in made)
            if sources[0].is_cuda:
                torch.cuda.current_stream(sources[0].device).synchronize()  # the next call may use another stream
        self._seen = [(t, t.data_ptr(), t._version) for t in sources]
        return self._values


def _fake_mode(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """The fake mode in which the graph's inputs will be traced; none if it will be traced with real ones."""
    return detect_fake_mode(inputs) or nullcontext()


def hoist(module: fx.GraphModule) -> Hoisted | None:
    """Replace all marked nodes by new inputs at the end, in place; None if there are none.

    A marked node that only marked nodes read is gone afterwards; the new inputs count as static for CUDA graphs.
    """
    graph = module.graph
    marked = [n for n in graph.nodes if n.meta.get(MARK)]
    if not marked:
        return None
    inside = set(marked)
    inputs = graph.find_nodes(op="placeholder")
    read = {i for n in marked for i in n.all_input_nodes} - inside
    if loose := read - set(inputs):
        raise ValueError(
            f"{', '.join(sorted(n.name for n in loose))} is no input, so what is made of it is no constant"
        )
    sources = tuple(k for k, n in enumerate(inputs) if n in read)
    results = [n for n in marked if any(u not in inside for u in n.users)]
    prepare = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {inputs[k]: prepare.placeholder(inputs[k].name) for k in sources}
    for node in marked:
        copied[node] = prepare.node_copy(node, copied.__getitem__)
    prepare.output([copied[n] for n in results])
    last = inputs[-1]
    for k, node in enumerate(results):
        with graph.inserting_after(last):
            last = graph.placeholder(f"prepared_{k}")
        last.meta = {"val": node.meta["val"], "tensor_dict": {STATIC: "unguarded"}}
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(marked):
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return Hoisted(fx.GraphModule(module, prepare), sources, tuple(n.meta["val"] for n in results))
