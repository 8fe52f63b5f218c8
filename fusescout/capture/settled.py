"""Which values of an ATen graph no input decides: they follow from parameters, buffers and literals alone.

Such a value is the same in every call until a parameter or buffer changes. It is settled only if it is also the same
whenever it is made: no random number, no memory that some operator of the graph writes to, by way of a view either.
What shares memory is read off the trace: its fake tensors share storages exactly as the real ones do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fusescout.capture.encode import target_name
from fusescout.capture.encode import writes
from fusescout.flops import op_class
from fusescout.flops import op_name
from fusescout.hoisting import STATIC
from fusescout.randomness import TRAINING_FLAG

UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
FILLS = frozenset({"full", "zeros", "ones", "scalar_tensor"})
"""Operators that give one number everywhere: kernels and compilers write it where it is read."""


def settled(module: fx.GraphModule) -> set[fx.Node]:
    """The settled nodes, parameters, buffers and attributes among them. Nodes need `meta["val"]`."""
    written = written_memory(module)
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if memory(node) & written:
            continue
        if node.op == "placeholder":
            known = STATIC in node.meta.get("tensor_dict", {})
        elif node.op == "get_attr":
            known = isinstance(node.meta.get("val"), Tensor)
        else:
            known = is_pure(node) and _is_fixed(node) and all(source in found for source in node.all_input_nodes)
        if known:
            found.add(node)
    return found


def memory(node: fx.Node) -> set[int]:
    """The storages that a value lives in."""
    return {int(t.untyped_storage()._cdata) for t in tensors(node) if t.layout == torch.strided}


def tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def written_memory(module: fx.GraphModule) -> set[int]:
    """The storages that some operator of the graph may write to."""
    return {number for node in module.graph.nodes for target in _targets(node) for number in memory(target)}


def _targets(node: fx.Node) -> Iterable[fx.Node]:
    """What a node may write to: all its inputs where that isn't known, as of a wrapped sub-graph."""
    if not mutates(node):
        return node.all_input_nodes if node.op == "call_function" and writes(node) else ()
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    arguments = node.target._schema.arguments
    named = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    return [n for k, value in given.items() if k in named for n in tree_leaves(value) if isinstance(n, fx.Node)]


def mutates(node: fx.Node) -> bool:
    """Whether it may write to an argument, by its schema; also what isn't known as an operator."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op in ("call_module", "call_method")
    return not isinstance(node.target, OpOverload) or bool(node.target._schema.is_mutable)


def is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same tensors whenever it runs on the same ones, and does nothing else."""
    if node.op != "call_function" or mutates(node) or writes(node) or not tensors(node):
        return False
    if node.target is operator.getitem:
        return True
    target, name = node.target, op_name(target_name(node))
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags
        and name not in UNDEFINED
        and name not in TRAINING_FLAG
        and op_class(str(target)) not in ("random", "rnn", "attention")
    )


def _is_fixed(node: fx.Node) -> bool:
    """Sizes are numbers and no gradient is recorded."""
    return not records(node) and all(
        t.layout == torch.strided and all(type(n) is int for n in (*t.shape, *t.stride())) for t in tensors(node)
    )


def records(node: fx.Node) -> bool:
    """Whether autograd records the operator. A parameter's view says it requires a gradient even under `no_grad`."""
    return node.op == "call_function" and not is_view(node) and any(t.requires_grad for t in tensors(node))


def is_free(node: fx.Node) -> bool:
    """Whether it costs nothing to have the value where it is read: an input, a view, a fill."""
    if node.op != "call_function" or op_name(target_name(node)) in FILLS:
        return True
    return is_view(node)


def is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or op_class(target_name(node)) != "view":
        return False
    return memory(node) <= {number for source in node.all_input_nodes for number in memory(source)}


def origin(node: fx.Node) -> fx.Node:
    """What a value is a view of; itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
