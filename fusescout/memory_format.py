"""Rewrites a captured graph so that its convolutions run channels-last; what goes in and comes out stays as it was.

It is a pass over the ATen graph between capture and everything else: the analysis finds, races and judges regions on
the rewritten graph, and the patch back end runs the same pass before it looks for planned regions, so keys agree.
Convolution inputs are copied to channels-last memory where they aren't in it already, weights once, as prepared
constants (`hoisting.py`). Strides then follow from what each operator gives, found by running it on fake tensors. An
operator that can't take the new strides (`view`), one that isn't ATen's, and the graph's outputs get eager's strides
back. No value changes; only a graph without writes, gradients or `as_strided` qualifies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fusescout.capture.encode import target_name
from fusescout.capture.encode import writes
from fusescout.convolution import CONVOLUTIONS
from fusescout.hoisting import MARK
from fusescout.hoisting import STATIC

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions."""
aten = torch.ops.aten


def channels_last(module: fx.GraphModule) -> str:
    """Rewrite an ATen graph in place.

    Returns:
        Why the graph stays as it is; empty if it was rewritten.
    """
    if reason := _refusal(module):
        return reason
    working = copy_of(module)
    try:
        _Pass(working).run()
    except _Refused as refused:
        return str(refused)
    module.graph = working.graph
    module.graph.lint()
    module.recompile()
    return ""


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph once more, with its nodes' names and meta; parameters are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy


def has_convolutions(module: fx.GraphModule) -> bool:
    return any(_is_convolution(n) for n in module.graph.nodes)


def _is_convolution(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    value, name = node.meta.get("val"), node.target._schema.name.removeprefix("aten::")
    return name in CONVOLUTIONS and isinstance(value, Tensor) and value.dim() in FORMATS


class _Refused(Exception):
    """The graph can't be rewritten; the message is the reason."""


def _refusal(module: fx.GraphModule) -> str:
    if not has_convolutions(module):
        return "it has no 2-D or 3-D convolution"
    for node in module.graph.nodes:
        values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if node.op == "call_function" and any(v.requires_grad for v in values):
            return "gradients are recorded"
        if writes(node):
            return f"{target_name(node)} writes to its argument"
        if node.op == "call_function" and "as_strided" in target_name(node):
            return "as_strided reads memory by its strides"
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and target_name(node) != "getitem":
            return f"{target_name(node)} is no single operator"
    return ""


class _Pass:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.before: dict[fx.Node, Any] = {n: n.meta.get("val") for n in self.graph.nodes}
        modes = [v.fake_mode for v in self.before.values() if isinstance(v, FakeTensor)]
        if not modes:
            raise _Refused("its shapes are not known")
        self.mode = modes[0]
        self.made: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                node.args = tuple(fx.map_arg(node.args, self._restored))
            elif node.op == "call_function":
                self._convert(node)

    def _convert(self, node: fx.Node) -> None:
        if _is_convolution(node):
            with self.graph.inserting_before(node):
                node.update_arg(0, self._last(node.args[0]))
                node.update_arg(1, self._last(node.args[1]))
        elif isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            self._restore_arguments(node)
        try:
            value = self._value(node)
        except Exception:  # isolation boundary: an operator may refuse strides in any way; it gets eager's then
            self._restore_arguments(node)
            try:
                value = self._value(node)
            except Exception as error:  # isolation boundary: as above
                raise _Refused(f"{target_name(node)} fails with {type(error).__name__}") from error
        node.meta["val"] = value

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _last(self, node: Any) -> fx.Node:
        """The value in channels-last memory."""
        value: Tensor = node.meta["val"]
        wanted = FORMATS[value.dim()]
        if value.is_contiguous(memory_format=wanted):
            return node  # type: ignore[no-any-return]
        order = (0, *range(2, value.dim()), 1)
        constant = node.meta.get(MARK) or (node.op == "placeholder" and STATIC in node.meta.get("tensor_dict", {}))
        return self._in_order(node, order, wanted, constant)

    def _restore_arguments(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._restored_here)

    def _restored(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            return self._restored_here(node)

    def _restored_here(self, node: fx.Node) -> fx.Node:
        """The value with the strides it has in eager mode."""
        old, new = self.before.get(node), node.meta.get("val")
        if not isinstance(old, Tensor) or not isinstance(new, Tensor) or _strides(old) == _strides(new):
            return node
        strides = [int(s) for s in old.stride()]
        order = tuple(sorted(range(old.dim()), key=lambda d: (-strides[d], d)))
        expected = 1
        for d in reversed(order):
            if old.size(d) != 1 and strides[d] != expected:
                raise _Refused(f"{node.name} has strides {strides}, which have gaps")
            expected *= old.size(d)
        return self._in_order(node, order, torch.contiguous_format, False)

    def _in_order(self, node: fx.Node, order: tuple[int, ...], format_: torch.memory_format, constant: Any) -> fx.Node:
        """A copy whose memory has the dimensions in `order`, outermost first; made where nodes are being inserted."""
        if (node, order) in self.made:
            return self.made[node, order]
        if format_ is not torch.contiguous_format or order == tuple(sorted(order)):
            copy = self._call(node, aten.clone.default, (node,), {"memory_format": format_})
        else:
            turned = self._call(node, aten.permute.default, (node, list(order)), {})
            dense = self._call(node, aten.clone.default, (turned,), {"memory_format": format_})
            copy = self._call(node, aten.permute.default, (dense, [order.index(d) for d in range(len(order))]), {})
        if constant:
            copy.meta[MARK] = True
        self.made[node, order] = copy
        return copy

    def _call(self, near: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in near.meta.items() if k in ("nn_module_stack", "stack_trace")}
        made.meta["val"] = self._value(made)
        return made


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1) if tensor.numel() else ()
