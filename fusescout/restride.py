"""Lays values of a captured graph out in memory anew; what goes in and comes out stays as it was.

It is a pass over the ATen graph between capture and everything else: the analysis finds, races and judges regions on
the rewritten graph, and the patch back end runs the same pass before it looks for planned regions, so keys agree.
Strides follow from what each operator gives, found by running it on fake tensors. An operator that can't take the new
strides (`view`), one that isn't ATen's, and the graph's outputs get eager's strides back. No value changes; only a
graph without writes, gradients or `as_strided` qualifies.
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
from fusescout.capture.visible import sharing
from fusescout.hoisting import MARK
from fusescout.hoisting import STATIC

aten = torch.ops.aten


def restride(module: fx.GraphModule, rule: type[Restride]) -> str:
    """Rewrite an ATen graph in place.

    Returns:
        Why the graph stays as it is; empty if it was rewritten.
    """
    if reason := _refusal(module):
        return reason
    working = copy_of(module)
    try:
        rule(working).run()
    except Refused as refused:
        return str(refused)
    if sharing(working) != sharing(module):
        return "its outputs would share memory otherwise than they do"
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


class Refused(Exception):
    """The graph can't be rewritten; the message is the reason."""


def _refusal(module: fx.GraphModule) -> str:
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


class Restride:
    """Walks a graph in order; `prepare` may lay out a node's operands anew before the node's own strides are found."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.before: dict[fx.Node, Any] = {n: n.meta.get("val") for n in self.graph.nodes}
        modes = [v.fake_mode for v in self.before.values() if isinstance(v, FakeTensor)]
        if not modes:
            raise Refused("its shapes are not known")
        self.mode = modes[0]
        self.made: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                node.args = tuple(fx.map_arg(node.args, self._restored))
            elif node.op == "call_function":
                self._convert(node)

    def prepare(self, node: fx.Node) -> None:
        """Give an operator other operands; new nodes go before it."""
        raise NotImplementedError

    def _convert(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            self.prepare(node)
        if isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            self._restore_arguments(node)
        try:
            value = self.value(node)
        except Exception:  # isolation boundary: an operator may refuse strides in any way; it gets eager's then
            self._restore_arguments(node)
            try:
                value = self.value(node)
            except Exception as error:  # isolation boundary: as above
                raise Refused(f"{target_name(node)} fails with {type(error).__name__}") from error
        node.meta["val"] = value

    @staticmethod
    def is_constant(node: fx.Node) -> bool:
        """Whether a copy of it may be made once."""
        static = node.op == "placeholder" and STATIC in node.meta.get("tensor_dict", {})
        return static or bool(node.meta.get(MARK))

    def value(self, node: fx.Node) -> Any:
        """What a node gives for its operands as they are now, as fake tensors."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

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
                raise Refused(f"{node.name} has strides {strides}, which have gaps")
            expected *= old.size(d)
        return self.in_order(node, order, torch.contiguous_format, False)

    def in_order(self, node: fx.Node, order: tuple[int, ...], format_: torch.memory_format, constant: bool) -> fx.Node:
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
        made.meta["val"] = self.value(made)
        return made


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1) if tensor.numel() else ()
