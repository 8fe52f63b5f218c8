"""Tensors that a model makes of Python numbers in every call: `torch.tensor(0.5)` inside `forward`.

The tracer writes them as a constant, a fresh copy of it, and an in-place `detach_`, which would keep chains on either
side of it apart. A number becomes `aten.full`, which kernels write as a literal; a longer one is read where it lies.
Both only where nobody writes to the copy.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
SAME_VALUE = frozenset({aten.detach_.default, aten.detach.default, aten.lift_fresh.default, aten._to_copy.default})
NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def fold_literals(gm: fx.GraphModule) -> int:
    """Replace the copies of constants, in place; gives how many there were. Nodes need `meta["val"]`."""
    folded = 0
    for node in [n for n in gm.graph.nodes if n.target is aten.lift_fresh_copy.default]:
        constant = _constant(gm, node.args[0])
        chain = _same_value(node)
        last = chain[-1]
        made = last.meta.get("val")
        if constant is None or not isinstance(made, Tensor) or made.requires_grad or _is_exposed(last):
            continue
        with gm.graph.inserting_before(node):
            if made.dim() == 0 and made.dtype in NUMBERS:
                kind: dict[str, Any] = {"dtype": made.dtype, "layout": torch.strided, "device": made.device}
                number = constant.to(made.dtype).item()
                value = gm.graph.call_function(aten.full.default, ((), number), {**kind, "pin_memory": False})
                value.meta = {**node.meta, "val": made}
            elif (constant.dtype, constant.device) == (made.dtype, made.device):
                value = node.args[0]
            else:
                continue
        last.replace_all_uses_with(value)
        source = node.args[0]
        for gone in reversed(chain):
            gm.graph.erase_node(gone)
        if not source.users:
            gm.graph.erase_node(source)
        folded += 1
    if folded:
        gm.graph.lint()
        gm.recompile()
    return folded


def _constant(gm: fx.GraphModule, node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = attrgetter(str(node.target))(gm)
    return value if isinstance(value, Tensor) and type(value) is Tensor else None


def _same_value(node: fx.Node) -> list[fx.Node]:
    """The node and those behind it that hold the same value, as far as each is read by the next one alone."""
    chain = [node]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if user.target not in SAME_VALUE:
            break
        chain.append(user)
    return chain


def _is_exposed(node: fx.Node) -> bool:
    """Whether somebody may write to its memory, or gets hold of it: a view, an in-place operator, the caller."""
    for user in node.users:
        if user.op == "output" or not isinstance(user.target, OpOverload):
            return True
        if any(a.alias_info is not None for a in user.target._schema.arguments):
            return True
    return False
