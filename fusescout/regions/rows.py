"""Finds chains of pointwise operators around reductions over the same dimensions: norms, softmaxes, losses, means."""

from __future__ import annotations

import math
from typing import NamedTuple

from fusescout.flow import Flow
from fusescout.flow import grow
from fusescout.ir import FLOATS
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of

SOFTMAXES = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})
LAST_DIMS = frozenset({"layer_norm", "rms_norm"})
POOLS = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"})
LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
DIM_AT = {"mean": 1, "sum": 1, "amax": 1, "amin": 1, "var": 1, "std": 1, "logsumexp": 1, "linalg_vector_norm": 2}
"""Reductions, and where they are told their dimensions."""
EXTREMES = ("aten.max.dim", "aten.min.dim", "aten.max.default", "aten.min.default")
"""Reductions too, where nobody reads the places that they give besides."""
LONGEST = 1 << 20
"""A single row of more elements than this would be left to one multiprocessor."""


class RowForm(NamedTuple):
    """What a node reduces: a tensor's shape, and some of its dimensions; of those `grouped`, only a share of the first.

    `grouped` is the number of groups of a group norm, else 1.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    grouped: int = 1

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape without the reduced dimensions."""
        return tuple(n for d, n in enumerate(self.shape) if d not in self.dims)

    @property
    def row(self) -> tuple[int, ...]:
        """The shape with the reduced dimensions of size 1."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.shape))

    @property
    def columns(self) -> int:
        return math.prod(self.shape[d] for d in self.dims) // self.grouped


def row_form(node: Node, graph: Graph) -> RowForm | None:
    """What a node reduces, or None if it is no reduction that a row template knows."""
    if node.mutates or node.dead or not node.args or not isinstance(node.args[0], Ref):
        return None
    if not isinstance(node.out, TensorSpec) and not _gives_values(node, graph):
        return None
    spec = graph.by_name[str(node.args[0].to)].out
    if not isinstance(spec, TensorSpec) or not spec.shape or spec.numel == 0 or spec.dtype not in FLOATS:
        return None
    form = _form(node, spec.shape)
    return form if form and form.columns > 1 else None


def _gives_values(node: Node, graph: Graph) -> bool:
    """Whether only the first of two results is read, the extremes themselves."""
    readers = [graph.by_name[u] for u in graph.users[node.name]]
    return node.target in EXTREMES and all(r.op == "getitem" and r.args[1] == 0 for r in readers)


def _form(node: Node, shape: tuple[int, ...]) -> RowForm | None:
    rank, op = len(shape), node.op

    def given(place: int) -> object:
        return node.args[place] if place < len(node.args) else None

    if op in LAST_DIMS:
        normalized = given(1)
        return RowForm(shape, tuple(range(rank - len(normalized), rank))) if isinstance(normalized, tuple) else None
    if op == "group_norm":
        groups = given(1)
        return RowForm(shape, tuple(range(1, rank)), groups) if isinstance(groups, int) else None
    if op == "instance_norm":
        plain = given(3) is None and given(5) is not False
        return RowForm(shape, tuple(range(2, rank))) if plain and rank > 2 else None
    if op in SOFTMAXES:
        dim = given(1)
        return RowForm(shape, (dim % rank,)) if isinstance(dim, int) else None
    if op in POOLS:
        size = given(1)
        size = size if isinstance(size, tuple) else (size,)
        return RowForm(shape, tuple(range(rank - len(size), rank))) if all(n == 1 for n in size) else None
    if op in LOSSES:
        return RowForm(shape, (min(1, rank - 1),))
    if op in DIM_AT or node.target in EXTREMES:
        told = given(DIM_AT.get(op, 1))
        dims = told if isinstance(told, tuple) and told else (told,)
        axes = sorted(d % rank for d in dims if isinstance(d, int))
        return RowForm(shape, tuple(axes) or tuple(range(rank)))
    return None


def find_rows(flow: Flow) -> list[set[str]]:
    """For each reduction everything around it in the shape of its input or result: with views between, and without."""
    graph = flow.graph
    taken: set[str] = set()
    regions = []
    for node in graph.nodes:
        form = row_form(node, graph)
        if form is None or node.name in taken or (not form.kept and form.columns > LONGEST):
            continue
        region = _around(flow, node, form, views=False)
        taken |= {n for n in region if row_form(graph.by_name[n], graph) is not None}
        regions += [_around(flow, node, form, views=True), region]
    return regions


def _result(node: Node) -> TensorSpec:
    """What a reduction gives; of extremes and their places the first."""
    out = node.out[0] if isinstance(node.out, tuple) else node.out
    assert isinstance(out, TensorSpec)
    return out


def _around(flow: Flow, node: Node, form: RowForm, *, views: bool) -> set[str]:
    graph = flow.graph
    shapes = {form.shape, form.row, form.kept} if form.grouped == 1 else {form.shape}
    shapes |= {_result(node).shape}
    sizes = {math.prod(s) for s in shapes}

    def fits(other: Node) -> bool:
        shape = shape_of(other)
        if is_pointwise(other):
            return shape in shapes or (views and shape is not None and math.prod(shape) in sizes - {1})
        if views and other.op in REGROUPS and shape is not None and math.prod(shape) in sizes:
            return True
        if other.op == "getitem":
            other = graph.by_name[other.inputs[0]]
        return row_form(other, graph) == form

    return grow(flow, {node.name}, fits, backward=True)
