"""A GEMM whose results lie column by column, or are transposed behind it, restated with results row by row.

What follows the product is pointwise, so the dimensions of its values may be taken in any order, all in the same one.
They are put in the order of the product's own result; where the results' columns are not adjacent in memory then, but
their rows are, the product of the transposes is computed: x w and w^T x^T hold the same numbers.

    linear(x[B, S, K], w[N, K], b[N])[B, S, N] + r  ->  matmul(w[N, K], x^T[B, K, S])[B, N, S] + b[N, 1] + r^T
"""

import math
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from fusescout.templates.gemm_batch import Refused
from fusescout.templates.gemm_batch import regrouped
from fusescout.templates.gemm_packed import Restated
from fusescout.templates.gemm_views import GEMMS
from fusescout.templates.gemm_views import REGROUPS
from fusescout.templates.gemm_views import REORDERS
from fusescout.templates.gemm_views import VIEWS
from fusescout.templates.gemm_views import derived
from fusescout.templates.gemm_views import flipped
from fusescout.templates.gemm_views import op_of
from fusescout.templates.gemm_views import ref_of
from fusescout.templates.gemm_views import root_of

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute


@dataclass(frozen=True)
class Space:
    """What a value behind the product is broadcast to, and the product's order of these dimensions.

    Dimension `order[i]` of the product is dimension i here; the last one of the product are its columns.
    """

    shape: tuple
    order: tuple

    def dims(self, spec: TensorSpec) -> list:
        """(size, stride) of a value in each dimension of the product, stride 0 where it is broadcast."""
        pad = len(self.shape) - len(spec.shape)
        if pad < 0:
            raise Refused("an operand has more dimensions than the result")
        strides = [0] * pad + [0 if n == 1 else s for n, s in zip(spec.shape, spec.stride, strict=True)]
        return [(self.shape[i], strides[i]) for i in sorted(range(len(self.shape)), key=self.order.__getitem__)]


def oriented(graph: Subgraph) -> Restated | None:
    """The sub-graph in other words, or None where it needs none."""
    anchors = [len(graph.inputs) + k for k, op in enumerate(graph.ops) if op.name in GEMMS]
    if len(anchors) != 1 or any(not isinstance(op.out, TensorSpec) for op in graph.ops):
        return None
    main = derived(graph, tuple(anchors))
    spaces = _spaces(graph, anchors[0], main)
    if spaces is None or any(v not in main for v in graph.outputs):
        return None
    result = spaces[graph.outputs[0]].dims(graph.tensor(graph.outputs[0]))
    sizes = _columns_first(result)
    if sizes is None and all(_is_plain(s) for s in spaces.values()):
        return None
    return _Restating(graph, anchors[0], main, spaces, sizes).restated()


def _is_plain(space: Space) -> bool:
    return space.order == tuple(range(len(space.order)))


def _columns_first(result: list) -> tuple | None:
    """Sizes of the batch and of a matrix' rows, if the rows are adjacent in memory and the columns are not."""
    *lead, (n, step) = [d for d in result[:-1] if d[0] != 1] + result[-1:]
    if step == 1 or n == 1:
        return None
    rows = 1
    while lead and lead[-1][1] == rows:
        rows *= lead.pop()[0]
    return (*(size for size, _ in lead), rows) if rows > 1 else None


def _spaces(graph: Subgraph, anchor: int, main: frozenset) -> dict | None:
    """Of every value that is computed behind the product: its space. None if there is a view that has no order."""
    first, n = len(graph.inputs), graph.tensor(anchor).shape[-1]
    found: dict = {anchor: _plain(graph.tensor(anchor).shape)}
    for value in sorted(main - {anchor}):
        op, shape = op_of(graph, value), graph.tensor(value).shape
        above = {found[i] for i in op.inputs if i in main}
        source = next(iter(above))
        if op.name in GEMMS or len({s.order for s in above}) != 1:
            return None
        if op.name in REGROUPS:
            if not _is_plain(source) or not shape or shape[-1] != n or source.shape[-1] != n:
                return None
            found[value] = _plain(shape)
        elif op.name in REORDERS:
            moved = _moved(op, len(shape))
            found[value] = Space(shape, tuple(source.order[i] for i in moved))
        elif len(shape) != len(source.shape) or op.name == "expand":
            return None
        else:
            found[value] = Space(shape, source.order)
    for value in range(first + len(graph.ops) - 1, first - 1, -1):  # what is computed of other inputs
        op = op_of(graph, value)
        if value in main or op.name in VIEWS:
            continue
        users = {found[u] for u in graph.users(value) if u in found}
        if len(users) != 1:
            return None
        found[value] = users.pop()
    return found


def _plain(shape: tuple) -> Space:
    return Space(shape, tuple(range(len(shape))))


def _moved(op: Op, rank: int) -> list:
    """Which dimension of its input each dimension of a transposed view is."""
    if op.name == "permute":
        return [d % rank for d in op.args[1]]
    moved = list(range(rank))
    if rank > 1:
        one, other = (0, 1) if op.name == "t" else (d % rank for d in op.args[1:3])
        moved[one], moved[other] = other, one
    return moved


@dataclass
class _Restating:
    """One sub-graph being rewritten. `sizes` are those of batch and rows where the factors change places, else None."""

    graph: Subgraph
    anchor: int
    main: frozenset
    spaces: dict
    sizes: tuple | None
    inputs: list = field(default_factory=list)
    origins: list = field(default_factory=list)

    def restated(self) -> Restated:
        graph = self.graph
        computed = [v for v in sorted(self.spaces) if op_of(graph, v).name not in VIEWS - {"alias", "detach"}]
        read = {v: [i for i in op_of(graph, v).inputs if i not in self.spaces] for v in computed if v != self.anchor}
        leaves = {(i, v): self._leaf(i, self._spec(self.spaces[v], graph.tensor(i))) for v in read for i in read[v]}
        product = self._product()
        number = {v: len(self.inputs) + k for k, v in enumerate(computed)}
        for value in sorted(self.main - set(computed)):
            number[value] = number[ref_of(op_of(graph, value), 0)]
        ops = []
        for v in computed:
            to = {} if v == self.anchor else {i: leaves.get((i, v), number.get(i)) for i in op_of(graph, v).inputs}
            ops.append(product if v == self.anchor else self._renamed(v, to))
        outputs = tuple(number[v] for v in graph.outputs)
        for v, new in zip(graph.outputs, outputs, strict=True):  # where a result lies matters
            spec = self._spec(self.spaces[v], graph.tensor(v))
            ops[new - len(self.inputs)] = replace(ops[new - len(self.inputs)], out=spec)
        return Restated(Subgraph(tuple(self.inputs), tuple(ops), outputs), tuple(self.origins))

    def _leaf(self, value: int, spec: TensorSpec) -> int:
        """A view of an input as an input of its own."""
        root = root_of(self.graph, value)
        known = self.graph.inputs[root]
        self.inputs.append(replace(spec, aligned=known.aligned, constant=known.constant))
        self.origins.append((root, 0))
        return len(self.inputs) - 1

    def _spec(self, space: Space, spec: TensorSpec) -> TensorSpec:
        """A value behind the product in the new order of dimensions."""
        if not spec.shape:
            return spec
        dims = space.dims(spec)
        if self.sizes is not None:
            lead = regrouped(dims[:-1], self.sizes)
            *batch, rows = zip(self.sizes, lead, strict=True)
            dims = [*batch, dims[-1], rows]
        return replace(spec, shape=tuple(n if s else 1 for n, s in dims), stride=tuple(s for _, s in dims))

    def _whole(self, space: Space, spec: TensorSpec) -> TensorSpec:
        """A value that is only computed: its place in memory doesn't matter."""
        dims = [n for n, _ in space.dims(spec)] if spec.shape else []
        if self.sizes is not None and dims:
            dims = [*self.sizes[:-1], dims[-1], self.sizes[-1]]
        stride = tuple(math.prod(dims[k + 1 :]) for k in range(len(dims)))
        return replace(spec, shape=tuple(dims), stride=stride)

    def _renamed(self, value: int, to: dict) -> Op:
        op = op_of(self.graph, value)
        kwargs = tuple((k, substitute(v, to)) for k, v in op.kwargs)
        out = (self._whole if value in self.main else self._spec)(self.spaces[value], op.out)
        return Op(op.target, substitute(op.args, to), kwargs, out)

    # ---- the product itself -----------------------------------------------------------------------------------

    def _product(self) -> Op:
        graph, op, space = self.graph, op_of(self.graph, self.anchor), self.spaces[self.anchor]
        added = op.name in ("addmm", "baddbmm")
        has_bias = added or (op.name == "linear" and len(op.args) > 2 and isinstance(op.args[2], Ref))
        left, right = (ref_of(op, k + added) for k in range(2))
        bias = ref_of(op, 0 if added else 2) if has_bias else None
        factors = [graph.tensor(left), graph.tensor(right)]
        if self.sizes is not None:
            factors = [self._factor(spec, left=k == 0) for k, spec in enumerate(factors)]
        first, second = (Ref(self._leaf(v, s)) for v, s in zip((left, right), factors, strict=True))
        summand = () if bias is None else (Ref(self._leaf(bias, self._spec(space, graph.tensor(bias)))),)
        out = self._whole(space, op.out)
        if self.sizes is None:
            return Op(op.target, (*summand, first, second) if added else (first, second, *summand), op.kwargs, out)
        if bias is None:
            return Op("aten.matmul.default", (second, first), (), out)
        name = "addmm" if len(self.sizes) == 1 else "baddbmm"
        return Op(f"aten.{name}.default", (*summand, second, first), op.kwargs, out)

    def _factor(self, spec: TensorSpec, *, left: bool) -> TensorSpec:
        """The transpose of a factor, with the new batch dimensions."""
        op, lead = op_of(self.graph, self.anchor), self.spaces[self.anchor].shape[:-1]
        if not left and op.name == "linear":
            spec = flipped(spec)
        if len(spec.shape) < 2:
            raise Refused("the matrix product has a vector operand")
        given = [0 if n == 1 else s for n, s in zip(spec.shape, spec.stride, strict=True)]
        given = given[:-1] if left else [*given[:-2], 0]  # the right one is the same for all rows
        strides = [0] * (len(lead) - len(given)) + given
        *batch, rows = regrouped(list(zip(lead, strides, strict=True)), self.sizes)
        if not left and rows:
            raise Refused("its results' rows lie across matrices")
        last = (spec.shape[-1], spec.stride[-1])
        matrix = [last, (self.sizes[-1], rows)] if left else [last, (spec.shape[-2], spec.stride[-2])]
        dims = [(n if s else 1, s) for n, s in zip(self.sizes[:-1], batch, strict=True)] + matrix
        if not left and not any(batch):
            dims = matrix
        return replace(spec, shape=tuple(n for n, _ in dims), stride=tuple(s for _, s in dims))
