"""Leaves out copies that nothing needs, and reductions of one element, which are copies too.

Models clone what they add again later, in fear of operators that write, and go on reducing what has one column left: a
linear that is summed up, then its maximum, mean and logsumexp, five launches for one number a row.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.encode import target_name
from fusescout.capture.settled import is_pure
from fusescout.capture.settled import memory
from fusescout.capture.settled import records
from fusescout.capture.settled import written_memory
from fusescout.flops import op_name

COPIES = frozenset({"clone", "contiguous"})
aten = torch.ops.aten
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default)
EXTREMES = (aten.max.dim, aten.min.dim)
"""They give places besides."""


def read_through_copies(module: fx.GraphModule) -> None:
    """Let readers of a copy read what it is a copy of, in place, where nobody can tell the two apart.

    Nodes need `meta["val"]`; that of views of a copy is made anew, since it tells whose memory they share.
    """
    graph, written = module.graph, written_memory(module)
    given = {m for n in graph.nodes if n.op in ("placeholder", "get_attr") for m in memory(n)}
    exposed = {m for source in graph.output_node().all_input_nodes for m in memory(source)}
    gone: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node in gone:
            continue
        maker = node.args[0] if node.target is operator.getitem else node
        source = _copied(node, maker)
        if source is None or records(node) or (memory(node) | memory(source)) & written:
            continue
        old, new = source.meta["val"], node.meta["val"]
        if old.requires_grad or old.storage_offset() or _layout(old) != _layout(new):
            continue
        if memory(node) & exposed:
            lives = [n for n in graph.nodes if n.op != "output" and memory(n) & memory(source)]
            if lives != [source] or list(source.users) != [maker] or memory(source) & given:
                continue
            exposed |= memory(source)
        views = [n for n in graph.nodes if n not in (node, maker) and n.op != "output" and memory(n) & memory(node)]
        node.replace_all_uses_with(source)
        left = (*maker.users, maker) if maker is not node else (node,)
        gone.update(left)
        for dead in left:
            graph.erase_node(dead)
        with torch.no_grad():
            for view in views:  # they share another tensor's memory now
                args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
                view.meta["val"] = view.target(*args, **kwargs)


def _copied(node: fx.Node, maker: fx.Node) -> fx.Node | None:
    """What a value is a copy of: by its operator, or reduced over dimensions of size 1 that stay."""
    if maker is not node:
        unread = all(user is node or not user.users for user in maker.users)
        reduces = maker.target in EXTREMES and node.args[1] == 0 and unread
    else:
        reduces = node.target in REDUCTIONS
    if not reduces and op_name(target_name(node)) not in COPIES:
        return None
    source = maker.args[0]
    if not isinstance(source, fx.Node) or not is_pure(node) or not is_pure(maker):
        return None
    shape = node.meta["val"].shape
    return source if source.meta["val"].shape == shape and (shape or not reduces) else None


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, [s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
