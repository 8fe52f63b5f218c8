"""What of a graph's memory can be seen from outside: the layout of its outputs, and what shares memory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from fusescout.capture.encode import target_name
from fusescout.capture.settled import memory
from fusescout.capture.settled import tensors
from fusescout.capture.settled import written_memory
from fusescout.flops import op_name


@dataclass(frozen=True)
class Visible:
    """Equal for two forms of one graph if a caller can't tell them apart but by values.

    Attributes:
        outputs: shape, strides and dtype of each output.
        sharing: which of the inputs and outputs share memory, and what lives how in memory that some operator writes
            to or reads by strides: its result depends on that.
    """

    outputs: tuple[Any, ...]
    sharing: tuple[Any, ...]

    @classmethod
    def of(cls, module: fx.GraphModule, among: Container[str] | None = None) -> Visible:
        """Read it off a module whose nodes have `meta["val"]`.

        Args:
            among: names of the nodes to look at, inputs and outputs besides; all if None.
        """
        nodes = [n for n in module.graph.nodes if among is None or n.name in among or n.op == "output"]
        results = [n for n in tree_leaves(nodes[-1].args) if isinstance(n, fx.Node)]
        outputs = tuple(map(_layout, results))
        delicate = written_memory(module) | {m for n in nodes if _reads_strides(n) for m in memory(n)}
        inside = [(n.name, _layout(n), m) for n in nodes for m in sorted(memory(n) & delicate)]
        first: dict[int, str] = {}
        lives = tuple((name, layout, first.setdefault(m, name)) for name, layout, m in inside)
        return cls(outputs, (*lives, sharing(module)))


def sharing(module: fx.GraphModule) -> tuple[tuple[int, ...], ...]:
    """For each input and output, and each memory it is in, the number of the first one in the same memory."""
    results = [n for n in tree_leaves(module.graph.output_node().args) if isinstance(n, fx.Node)]
    first: dict[int, int] = {}
    shown = [*module.graph.find_nodes(op="placeholder"), *results]
    return tuple(tuple(first.setdefault(m, k) for m in sorted(memory(n))) for k, n in enumerate(shown))


def _layout(node: fx.Node) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors(node))


def _reads_strides(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(target_name(node)) in ("as_strided", "as_strided_")
