"""Which nodes of a captured graph compute what nobody reads, and could as well not run.

`nn.MultiheadAttention` averages its weights over the heads even where the caller drops them: eager pays for that, and
whoever counts it as a reader keeps softmax apart from the product behind it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence

from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.randomness import draws


def dead(nodes: Sequence[Node], outputs: Collection[str]) -> frozenset[str]:
    """Names of operators without effect whose results go nowhere, or to dead ones only.

    Args:
        nodes: a graph in topological order.
        outputs: the names it returns.
    """
    read = set(outputs)
    found = set()
    for node in reversed(nodes):
        if node.name not in read and node.is_op and not _acts(node):
            found.add(node.name)
        else:
            read |= set(node.inputs)
    return frozenset(found)


def _acts(node: Node) -> bool:
    """It writes, draws random numbers, or makes no tensor, as an assertion does."""
    made = node.out if isinstance(node.out, tuple) else (node.out,)
    return node.mutates or draws(node) or not any(isinstance(spec, TensorSpec) for spec in made)
