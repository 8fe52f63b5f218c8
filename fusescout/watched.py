"""Watches the buffers whose contents a rewritten graph rests on: before each call, without reading them.

Causal attention in the place of a mask is right only while the mask says the same. What a call gets is known by
identity, address and torch's count of writes (`freshness.py`), which costs a microsecond; the contents themselves are
read when one of these is new, so that `load_state_dict` with the same mask changes nothing. Where they are others, the
graph runs as the framework runs it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.mask_contents import content_of
from fusescout.capture.masks import for_real
from fusescout.freshness import Marks
from fusescout.hoisting import CONTENT
from fusescout.hoisting import MOST_SETS
from fusescout.hoisting import part_off
from fusescout.ir import Graph
from fusescout.ir import Out
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.plan import Entry
from fusescout.regions import find_regions


@dataclass(frozen=True, slots=True)
class _Seen:
    """Whether some tensors hold what they should, and by what to tell that they still do or don't."""

    right: bool
    marks: Marks


class Watched:
    """The masks of one graph whose contents were noted.

    Args:
        module: an ATen graph as it was captured.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        masks = [node for node in module.graph.nodes if CONTENT in node.meta]
        self._contents = [node.meta[CONTENT] for node in masks]
        self._prepare, self._sources = part_off(module, masks)
        self._seen: OrderedDict[tuple[int, ...], _Seen] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def may_change(self) -> bool:
        """Whether any of it lies in memory of the model's; masks that are made of numbers don't."""
        return bool(self._sources)

    def bind(self, run: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The graph: `run` while the contents are as noted, `otherwise` when they aren't."""

        def call(*inputs: Any) -> Any:
            return run(*inputs) if self.holds(inputs) else otherwise(*inputs)

        return call

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether the masks among the graph's inputs hold what was noted."""
        sources = [inputs[k] for k in self._sources]
        seen = self._seen.get(tuple(map(id, sources)))
        if seen is None or not seen.marks.hold(sources):
            with self._lock:
                return self._look(sources)
        return seen.right

    def forget(self) -> None:
        """Read the contents in the next call, whatever torch knows of them."""
        for seen in self._seen.values():
            seen.marks.forget()

    def _look(self, sources: Sequence[Tensor]) -> bool:
        if any(t.is_inference() for t in sources):
            return False  # torch doesn't count writes to them
        if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be read now
        with for_real():
            masks = self._prepare(*sources)
            right = all(content_of(m) == c for m, c in zip(masks, self._contents, strict=True))
        for key in [k for k, seen in self._seen.items() if seen.marks.gone]:
            del self._seen[key]
        self._seen[tuple(map(id, sources))] = _Seen(right, Marks(sources, any(t.requires_grad for t in sources)))
        while len(self._seen) > MOST_SETS:
            self._seen.popitem(last=False)
        return right


def rests_on_contents(entry: Entry) -> bool:
    """Whether an entry's evidence is for masks with certain contents."""
    return any(spec.content for spec in Subgraph.from_json(entry.subgraph).inputs)


def left_for_contents(graph: Graph, entries: Sequence[Entry]) -> list[str]:
    """Ids of entries that would be in a graph if only its masks held something else."""
    if not entries:
        return []
    chains = [(region.family, graph.subgraph(region.nodes)[0]) for region in find_regions(graph)]
    known = {(family, chain.key) for family, chain in chains}
    others = {(family, _bare(chain).key) for family, chain in chains}
    lost = [entry for entry in entries if (entry.family, entry.key) not in known]
    return [e.id for e in lost if (e.family, _bare(Subgraph.from_json(e.subgraph)).key) in others]


def _bare(graph: Subgraph) -> Subgraph:
    """The same without what is known of masks' contents."""

    def bare(out: Out) -> Out:
        return replace(out, content="") if isinstance(out, TensorSpec) else out

    inputs = (replace(spec, content="") for spec in graph.inputs)
    ops = (replace(op, out=bare(op.out)) for op in graph.ops)
    return Subgraph(tuple(inputs), tuple(ops), graph.outputs)
