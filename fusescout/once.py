"""Rewrites a captured graph so that what no input decides is computed once, not in every call.

Position embeddings, rotary tables, relative-position biases, masks made of `arange`, weights that autocast casts,
parametrised weights: `settled` nodes, made of parameters, buffers and literals. Their last values become inputs at
fixed addresses, made before the first call and anew when a source changes (`hoisting.py`). Casts and copies of one
value that the model makes several times are made once a call, and what nobody reads not at all; a copy that nothing
needs is read where it was copied from.

It is a pass over the ATen graph between capture and everything else, as `memory_format.py` is: the analysis finds and
races regions on the rewritten graph, and the patch back end runs the same pass before it looks for planned regions.

What stays in the graph: views of kept values that have gaps or overlap (they cost nothing), fills (kernels write the
number where it is read), values that would cost too much memory (`MARGIN_BYTES`), and in a model on a GPU values on the
CPU. A kept value that the caller would get hold of is copied first: the caller may write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.encode import target_name
from fusescout.capture.settled import is_free
from fusescout.capture.settled import is_pure
from fusescout.capture.settled import memory
from fusescout.capture.settled import origin
from fusescout.capture.settled import records
from fusescout.capture.settled import settled
from fusescout.capture.settled import tensors
from fusescout.capture.settled import written_memory
from fusescout.flops import op_name
from fusescout.hoisting import TABLE
from fusescout.hoisting import Hoisted
from fusescout.hoisting import above
from fusescout.hoisting import lift
from fusescout.read_through import read_through_copies

MARGIN_BYTES = 64 << 20
"""A kept value may be larger than what it is made of only up to this size, and all of a graph's kept values together
larger than its parameters and buffers only by this: a bias that is broadcast to gigabytes is made in every call."""
REPEATED = frozenset({"to", "_to_copy", "type_as", "contiguous", "clone"})
"""Casts and copies: one of a value serves all its readers. Under autocast each of q, k and v casts the same input."""
FILL_VALUES = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0, "full_like": None, "new_full": None}
"""Fills that take their sizes from a tensor, and with what; None where the last argument says it."""
SIZED = frozenset({"slice", "narrow", "expand", "broadcast_to", "repeat", "tile"})
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Once:
    """What was taken out of a graph.

    Attributes:
        operators: how many operators fewer run in a call.
        values: how many values are kept between calls.
        kept_bytes: what these take.
        hoisted: they, in up to two lots: what the sizes of the call's inputs have no part in, and tables. The second
            may be made of the first.
    """

    operators: int = 0
    values: int = 0
    kept_bytes: int = 0
    hoisted: tuple[Hoisted, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.operators or self.hoisted)

    def extended(self, inputs: Sequence[Any]) -> list[Any]:
        """Example inputs with stand-ins for the kept values after them."""
        for lot in self.hoisted:
            inputs = [*inputs, *lot.examples(inputs)]
        return list(inputs)

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The graph with its own inputs only; `run` takes the kept values after them."""
        for lot in reversed(self.hoisted):
            run = lot.bind(run)
        return run


def compute_once(module: fx.GraphModule) -> Once:
    """Rewrite a module made by `to_aten`, in place."""
    _spell_out_fills(module)
    before = _count(module)
    _merge(module)
    read_through_copies(module)
    known = settled(module)
    chosen = _Choice(module, known)
    exposed = [n for n in chosen.kept if memory(n) & chosen.exposed]
    for node in exposed:
        _copy(module.graph, node, keep=known - chosen.steady)
    in_place = not any(map(records, module.graph.nodes))
    tables = [n for n in chosen.kept if _is_table(n)]
    weights = [n for n in chosen.kept if n not in tables]
    lots = [lift(module, lot, name, in_place) for lot, name in ((weights, "made"), (tables, "table")) if lot]
    for node in module.graph.find_nodes(op="placeholder")[-len(tables) :] if tables else ():
        node.meta[TABLE] = True
    _drop_dead(module)
    module.graph.lint()
    module.recompile()
    removed = before - _count(module) + len(exposed)
    return Once(removed, len(chosen.kept), sum(chosen.held.values()), tuple(lots))


class _Choice:
    """Which settled values are kept.

    Attributes:
        kept: in the graph's order.
        held: bytes by storage.
        steady: settled nodes that run in every call, since what is not settled reads them and they are not kept.
        exposed: storages that the caller gets hold of.
    """

    def __init__(self, module: fx.GraphModule, known: set[fx.Node]) -> None:
        graph = module.graph
        inputs = graph.find_nodes(op="placeholder")
        self.kept: list[fx.Node] = []
        self.held: dict[int, int] = {}
        self.steady: set[fx.Node] = set()
        self.exposed = {m for source in graph.output_node().all_input_nodes for m in memory(source)}
        self._on_cpu = all(t.device.type == "cpu" for n in graph.nodes for t in tensors(n))
        self._room = MARGIN_BYTES + sum(t.nbytes for n in inputs if n in known for t in tensors(n))
        for node in reversed(graph.nodes):
            if node not in known or all(user in known and user not in self.steady for user in node.users):
                continue
            if self._is_kept(node):
                self.kept.insert(0, node)
            else:
                self.steady.add(node)

    def _is_kept(self, node: fx.Node) -> bool:
        value, root = node.meta.get("val"), origin(node)
        if not isinstance(value, Tensor) or is_free(root) or not _is_dense(value):
            return False
        if memory(node) & self.exposed and (root is not node or all(map(is_free, _above(root)))):
            return False  # a copy costs as much as the one operator
        if value.device.type == "cpu" and not self._on_cpu:
            return False
        number, size = int(value.untyped_storage()._cdata), value.untyped_storage().nbytes()
        if number in self.held:
            return True
        made_of = sum(t.nbytes for n in _above(root) if n.op != "call_function" for t in tensors(n))
        if size > max(made_of, MARGIN_BYTES) or sum(self.held.values()) + size > self._room:
            return False
        self.held[number] = size
        return True


def _above(node: fx.Node) -> set[fx.Node]:
    """All that a node is made of, without itself."""
    return above([node]) - {node}


def _is_table(node: fx.Node) -> bool:
    """Whether the sizes of the call's inputs may have decided its own."""
    made = [n for n in (node, *_above(node)) if n.op == "call_function"]
    return any(not n.all_input_nodes or op_name(target_name(n)) in SIZED for n in made)


def _is_dense(value: Tensor) -> bool:
    """Whether it lies in memory without gaps and overlaps, from the beginning: aligned, and can be written over."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return value.storage_offset() == 0 and value.numel() > 0


def _copy(graph: fx.Graph, node: fx.Node, keep: set[fx.Node]) -> None:
    """Give all readers but `keep` a copy of the value."""
    with graph.inserting_after(node):
        copy = graph.call_function(aten.clone.default, (node,))
    copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack", "stack_trace")}
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and user not in keep)


def _spell_out_fills(module: fx.GraphModule) -> None:
    """Fills like some tensor become fills of a size, in place: they read no value of it."""
    written = written_memory(module)
    for node in list(module.graph.nodes):
        name = op_name(target_name(node))
        if name not in FILL_VALUES or not is_pure(node) or memory(node) & written:
            continue
        value: Tensor = node.meta["val"]
        number = node.args[-1] if FILL_VALUES[name] is None else FILL_VALUES[name]
        if not value.is_contiguous() or not isinstance(number, int | float) or value.requires_grad:
            continue
        kind = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
        node.target = aten.full.default
        node.args, node.kwargs = ([int(n) for n in value.shape], number), kind


def _merge(module: fx.GraphModule) -> None:
    """Let one node serve where several make the same value, in place: settled ones, casts and copies."""
    known, written = settled(module), written_memory(module)
    exposed = {m for source in module.graph.output_node().all_input_nodes for m in memory(source)}
    seen: dict[Hashable, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node not in known and op_name(target_name(node)) not in REPEATED:
            continue
        touched = {m for n in (node, *node.all_input_nodes) for m in memory(n)}
        if not is_pure(node) or touched & written or memory(node) & exposed:
            continue
        if records(node):
            continue  # gradients of two casts meet in the higher precision
        key = (node.target, _key(node.args), _key(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)


def _key(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    return type(value), repr(value)  # 0.0 equals -0.0, 1 equals True


def _drop_dead(module: fx.GraphModule) -> None:
    for node in reversed(module.graph.nodes):
        if not node.users and (node.op == "get_attr" or is_pure(node)):
            module.graph.erase_node(node)


def _count(module: fx.GraphModule) -> int:
    """Operators that cost something."""
    return sum(not is_free(n) for n in module.graph.nodes)
