"""Takes prepared constants out of a rewritten graph: they become inputs at fixed addresses, made before the first call.

So a compiler sees parameters, not the work to fold them; a CUDA graph neither repeats that work nor holds its memory;
and what changed is found before each call, not inside a graph that is replayed without Python. When a source changed,
the values are written over in place: graphs captured before read the new ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._guards import detect_fake_mode

from fusescout.freshness import Marks

MARK = "prepared_constant"
"""In a node's meta: it reads parameters, buffers and other such nodes only, and may run once."""
STATIC = "_dynamo_static_input_type"
TABLE = "table"
"""In the meta of an input that stands for kept values: the sizes of the call's inputs decide its own."""
CONTENT = "content"
"""In the meta of a mask whose values are known: what they are, as in `TensorSpec.content`."""


MOST_SETS = 64
"""Sets of sources that values are kept for: Dynamo runs one graph for all layers of a kind that a graph break parts."""


@dataclass
class _Made:
    """Values, and by what to tell that their sources still hold what they were made of."""

    values: tuple[Tensor, ...]
    marks: Marks


@dataclass
class Kept:
    """Values that are kept between calls, by the identities of their sources."""

    sets: OrderedDict[tuple[int, ...], _Made] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def trim(self) -> None:
        """Let go of what was made of tensors that are gone, and of the oldest sets."""
        for key in [k for k, made in self.sets.items() if made.marks.gone]:
            del self.sets[key]
        while len(self.sets) > MOST_SETS:
            self.sets.popitem(last=False)


class Hoisted:
    """The prepared constants of one graph.

    Attributes:
        sources: which inputs of the graph they are made of; none if they are made of literals.
        prepare: makes them.
        in_place: new values are written over old ones. Not where gradients are recorded: a backward pass that is
            still to come reads the old ones.
    """

    def __init__(
        self, prepare: fx.GraphModule, sources: tuple[int, ...], specs: tuple[Tensor, ...], in_place: bool = True
    ) -> None:
        self.prepare, self.sources, self.in_place = prepare, sources, in_place
        self._specs = specs
        self._kept = Kept()

    def share(self, known: dict[str, Kept]) -> None:
        """Keep values together with other graphs that make the same ones, such as those of other input shapes."""
        if not self.prepare.graph.find_nodes(op="get_attr"):
            read = [n.meta["val"] for n in self.prepare.graph.find_nodes(op="placeholder")]
            specs = [(tuple(s.shape), s.stride(), s.dtype, s.device) for s in (*read, *self._specs)]
            self._kept = known.setdefault(f"{self.prepare.code}{specs}{self.in_place}", self._kept)

    def examples(self, inputs: Sequence[Any]) -> list[Any]:
        """Stand-ins for the values, for a compiler: fake tensors of its own, whose sizes are numbers.

        It would give a real tensor symbolic sizes, whose guards no input of the call could decide.
        """
        with _fake_mode(inputs):
            return [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device=s.device) for s in self._specs]

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The graph with its own inputs only; `run` takes the values after them."""

        def call(*inputs: Any) -> Any:
            return run(*inputs, *self.values(inputs))

        return call

    def forget(self) -> None:
        """Make the values anew in the next call, whatever torch knows of their sources."""
        for made in self._kept.sets.values():
            made.marks.forget()

    def held(self) -> list[Tensor]:
        """All values that are kept now."""
        return [value for made in self._kept.sets.values() for value in made.values]

    def values(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The values for these inputs, made anew where a source is another tensor or was written to."""
        sources = [inputs[k] for k in self.sources]
        made = self._kept.sets.get(tuple(map(id, sources)))
        if made is None or not made.marks.hold(sources):
            with self._kept.lock:
                return self._refresh(sources)
        return made.values

    def _refresh(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from fusescout.capture.autocast import state

        device = self._specs[0].device
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False), torch.no_grad(), state({}):  # a captured graph's casts are explicit
            values = tuple(self.prepare(*sources))
            uncounted = any(t.is_inference() for t in sources)
            if uncounted or (on_gpu and torch.cuda.is_current_stream_capturing()):
                return values
            key = tuple(map(id, sources))
            before = self._kept.sets.get(key)
            if before is not None and self.in_place:
                for old, new in zip(before.values, values, strict=True):
                    old.copy_(new)
                values = before.values
            else:
                owned = {t.untyped_storage().data_ptr() for t in sources}
                values = tuple(v.clone() if v.untyped_storage().data_ptr() in owned else v for v in values)
            if on_gpu:
                torch.cuda.current_stream(device).synchronize()  # the next call may use another stream
        self._kept.sets[key] = _Made(values, Marks(sources))
        self._kept.trim()
        return values


def _fake_mode(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """The fake mode in which the graph's inputs will be traced; none if it will be traced with real ones."""
    return detect_fake_mode(inputs) or nullcontext()


def hoist(module: fx.GraphModule) -> Hoisted | None:
    """Replace all marked nodes by new inputs at the end, in place; None if there are none.

    A marked node that only marked nodes read is gone afterwards; the new inputs count as static for CUDA graphs.
    """
    marked = [n for n in module.graph.nodes if n.meta.get(MARK)]
    if not marked:
        return None
    inside = set(marked)
    read = {i for n in marked for i in n.all_input_nodes} - inside
    if loose := read - set(module.graph.find_nodes(op="placeholder")):
        raise ValueError(
            f"{', '.join(sorted(n.name for n in loose))} is no input, so what is made of it is no constant"
        )
    hoisted = lift(module, [n for n in marked if any(u not in inside for u in n.users)], "prepared")
    for node in reversed(module.graph.nodes):
        if node in inside:
            module.graph.erase_node(node)
    module.recompile()
    return hoisted


def lift(module: fx.GraphModule, results: Sequence[fx.Node], prefix: str, in_place: bool = True) -> Hoisted:
    """Replace nodes by new inputs at the end, in place, and part off what makes them.

    Args:
        module: a graph with `meta["val"]`.
        results: tensors that depend on some of its inputs and on attributes; in the graph's order.
        prefix: names the new inputs.
        in_place: see `Hoisted`.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    inside = above(results)
    prepare, sources = part_off(module, results)
    last = inputs[-1] if inputs else None
    for k, node in enumerate(results):
        with graph.inserting_after(last) if last else graph.inserting_before():
            last = graph.placeholder(f"{prefix}_{k}")
        last.meta = {"val": node.meta["val"], "tensor_dict": {STATIC: "unguarded"}}
        last.meta |= {CONTENT: node.meta[CONTENT]} if CONTENT in node.meta else {}
        node.replace_all_uses_with(last)
    for node in reversed(graph.nodes):
        if node in inside and not node.users and node.op != "placeholder":
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return Hoisted(prepare, sources, tuple(n.meta["val"] for n in results), in_place)


def part_off(module: fx.GraphModule, results: Sequence[fx.Node]) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A copy of what makes some nodes, which gives them in a list, and which inputs of the graph it takes."""
    inside = above(results)
    prepare = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in inside:
            copied[node] = prepare.node_copy(node, copied.__getitem__)
    prepare.output([copied[n] for n in results])
    inputs = module.graph.find_nodes(op="placeholder")
    return fx.GraphModule(module, prepare), tuple(k for k, n in enumerate(inputs) if n in inside)


def above(results: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes and all they are made of."""
    found, waiting = set(results), list(results)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
