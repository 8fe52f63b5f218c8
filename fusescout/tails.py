"""Parts a graph into what stays when chains are fused, to be timed, and what will be fused, to be counted in bytes.

A layout is chosen before anything is fused, but for the patched model. Eager runs a bias, a scale and a sigmoid behind
a convolution as three passes over memory, and their time would hide what the convolution itself gains or loses. So
pointwise operators, norms, softmaxes and reductions are cut out: what reads them reads memory that is there already.
What is left of them is the bytes that one pass over each connected piece must move.

A group norm counts the same in either layout: on an H200 it takes 1.7 to 2.3 times what its bytes need, by whole rows
channels-first and in parts channels-last, whose groups have 4 to 16 channels there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch import fx

from fusescout.capture.encode import target_name
from fusescout.capture.settled import is_pure
from fusescout.capture.settled import is_view
from fusescout.capture.settled import origin
from fusescout.convolution import BIAS
from fusescout.flops import op_class
from fusescout.hoisting import MARK
from fusescout.restride import copy_of

FUSED = frozenset({"pointwise", "norm", "softmax", "reduction"})


@dataclass(frozen=True, slots=True)
class Parted:
    """A graph without what will be fused: it takes `stand_ins` after its own inputs. `tail_bytes` is what was left out
    in bytes that must be moved."""

    module: fx.GraphModule
    stand_ins: tuple[Tensor, ...]
    tail_bytes: float


def part(module: fx.GraphModule) -> Parted:
    """Part a module made by `to_aten`, in any layout; the module itself stays as it is. Nodes need `meta["val"]`."""
    working = copy_of(module)
    graph = working.graph
    inside = {node for node in graph.nodes if _is_fused(node)}
    tail_bytes = sum(map(_bytes, _pieces(inside)))
    for node in graph.nodes:
        if _adds_a_bias(node) and node.users and inside.issuperset(node.users):
            node.update_arg(BIAS, None)  # a pass of its own on CUDA, which goes into the fused one
    stand_ins: dict[tuple[Any, ...], Tensor] = {}
    given: list[Tensor] = []
    last = graph.find_nodes(op="placeholder")[-1]
    for node in [n for n in graph.nodes if n in inside]:
        if not _is_read_by_rest(node, inside):
            continue
        value: Tensor = node.meta["val"]
        key = (tuple(value.shape), value.stride(), value.dtype, value.device)
        if key not in stand_ins:
            stand_ins[key] = stand_in(value)
        with graph.inserting_after(last):
            last = graph.placeholder(f"stand_in_{len(given)}")
        last.meta = {"val": value}
        given.append(stand_ins[key])
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    output = graph.output_node()
    output.args = ([n for n in output.all_input_nodes if origin(n) not in inside],)
    for node in reversed(graph.nodes):
        if node in inside or (is_view(node) and not node.users):
            graph.erase_node(node)  # other nodes run, though their readers are gone
    graph.lint()
    working.recompile()
    return Parted(working, tuple(given), float(tail_bytes))


def _is_fused(node: fx.Node) -> bool:
    return (
        isinstance(node.meta.get("val"), Tensor)
        and not node.meta.get(MARK)
        and op_class(target_name(node)) in FUSED
        and is_pure(node)
    )


def _adds_a_bias(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and op_class(target_name(node)) == "conv"
        and len(node.args) > BIAS
        and isinstance(node.args[BIAS], fx.Node)
    )


def _is_read_by_rest(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether an operator that stays reads it, by way of views too; to be given back is nothing to read."""
    return any(
        _is_read_by_rest(user, inside) if is_view(user) else user not in inside
        for user in node.users
        if user.op != "output"
    )


def _pieces(inside: set[fx.Node]) -> list[set[fx.Node]]:
    """Connected pieces, by way of views too: one pass over memory each."""
    joined: nx.Graph[fx.Node] = nx.Graph()
    joined.add_nodes_from(inside)
    sources = ((node, origin(source)) for node in inside for source in node.all_input_nodes)
    joined.add_edges_from((node, source) for node, source in sources if source in inside)
    return list(nx.connected_components(joined))


def _bytes(piece: set[fx.Node]) -> int:
    """What it reads from outside, each value once, and what is read of it outside."""
    read = {origin(source) for node in piece for source in node.all_input_nodes} - piece
    size = sum(_nbytes(node) for node in read)
    size += sum(_nbytes(node) for node in piece if _escapes(node, piece))
    return size


def _escapes(node: fx.Node, piece: set[fx.Node]) -> bool:
    return any(_escapes(user, piece) if is_view(user) else user not in piece for user in node.users)


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def stand_in(value: Tensor) -> Tensor:
    """Memory like a value's, with numbers in it; the user's random state is left alone."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if not value.is_floating_point():
        return made.zero_()
    return made.normal_(generator=torch.Generator(value.device).manual_seed(0))
