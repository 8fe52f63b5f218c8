"""Turns in-place pointwise operators on private values into their out-of-place forms.

`nn.ReLU(inplace=True)` behind a batch norm is the most common chain of a conv net, and a mutation hides it from every
stage after this one. The change is made only where nothing else can see the memory that was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


def make_functional(gm: fx.GraphModule) -> int:
    """Replace what can be replaced, in place; gives how many operators changed."""
    changed = 0
    place = {node: k for k, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        twin = _twin(node)
        if twin is None or not _is_private(node, place) or not _agrees(node, twin):
            continue
        written = node.args[0]
        for user in list(written.users):
            if user is not node and place[user] > place[node]:
                user.replace_input_with(written, node)
        node.target = twin
        changed += 1
    if changed:
        gm.graph.lint()
        gm.recompile()
    return changed


def _twin(node: fx.Node) -> OpOverload | None:
    """The out-of-place overload of an in-place ATen operator that writes its first argument only."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.split("::")[1]
    writes = [k for k, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if writes != [0] or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    if not isinstance(twin, OpOverload) or [a.name for a in twin._schema.arguments] != [
        a.name for a in target._schema.arguments
    ]:
        return None
    return None if any(r.alias_info for r in twin._schema.returns) else twin


def _is_private(node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """The written value was made fresh in this graph and no earlier view of it exists."""
    written = node.args[0]
    if not isinstance(written, fx.Node) or not _is_fresh(written):
        return False
    return all(place[user] >= place[node] or _is_fresh(user) for user in written.users)


def _is_fresh(node: fx.Node) -> bool:
    """An ATen call whose results share no memory with its arguments."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not any(r.alias_info for r in target._schema.returns)
        and not _may_alias(target)
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _may_alias(target: OpOverload) -> bool:
    """Composite operators whose schema promises a new tensor but which may hand back their argument."""
    name = target._schema.name.split("::")[1]
    return name in {
        "contiguous", "reshape", "reshape_as", "to", "type_as", "dropout", "feature_dropout", "alpha_dropout",
        "flatten", "unflatten", "matmul", "expand_as", "movedim", "moveaxis", "swapaxes", "swapdims", "ravel",
        "narrow", "pin_memory", "atleast_1d", "atleast_2d", "atleast_3d", "float", "positive", "conj",
        "resolve_conj", "resolve_neg", "real",
    }  # fmt: skip


def _agrees(node: fx.Node, twin: OpOverload) -> bool:
    """The twin's result has the written tensor's dtype, shape and strides (`x_bf16.add_(y_fp32)` would not)."""
    values: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = values
    try:
        made = twin(*args, **kwargs)
    except Exception:  # isolation boundary: fake kernels may refuse; then the operator stays as it is
        return False
    written = args[0]
    return isinstance(made, torch.Tensor) and (made.dtype, made.shape, made.stride()) == (
        written.dtype,
        written.shape,
        written.stride(),
    )
