"""Which axes each value of a sub-graph has (`axes.py`): one rule for each kind of operator that isn't pointwise."""

import itertools
import math

from fusescout.templates.axes import Axes
from fusescout.templates.operators import Unsupported

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

REGROUPS = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "ravel")
PERMUTES = ("transpose", "permute", "t", "swapaxes", "numpy_T", "mT")
EXPANDS = ("expand", "expand_as", "broadcast_to")
CUTS = ("slice", "select", "narrow", "chunk", "split", "split_with_sizes", "unbind")
AFFINE = {"batch_norm": (1, 2, 3, 4), "group_norm": (2, 3), "instance_norm": (1, 2)}
"""Arguments that line up with dimension 1."""
SUMS = {
    "sum": 2, "mean": 2, "amax": 2, "amin": 2, "var": 3, "std": 3, "logsumexp": 2, "linalg_vector_norm": 3,
}  # fmt: skip
"""Reductions, and where they are told to keep their dimensions."""
SOFTMAXES = ("softmax", "_softmax", "log_softmax", "_log_softmax")
WINDOWS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")


def dim_argument(op: Op, position: int, name: str, rank: int, default: int | None = None) -> tuple:
    """Dimensions an operator is told, ascending; all of them where it is told none."""
    dims = op.args[position] if position < len(op.args) else op.kwarg(name, default)
    if dims is None or dims == ():
        return tuple(range(rank))
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted(d % max(rank, 1) for d in dims))


def argument(op: Op, position: int, name: str, default=None):
    return op.args[position] if position < len(op.args) else op.kwarg(name, default)


class Layout:
    """Axes of every value; `moves[v]` says of which piece of which other value a piece of `v` is only a view."""

    def __init__(self, graph: Subgraph) -> None:
        self.graph, self.axes = graph, Axes()
        self.dims: dict = {}
        self.moves: dict = {}
        self.reduced: dict = {}
        self.windows: dict = {}
        for k, spec in enumerate(graph.inputs):
            if 0 in spec.shape:
                raise Unsupported("an input is empty: there is nothing to compute")
            self.dims[k] = tuple(self.axes.new(n) for n in spec.shape)
        for k, op in enumerate(graph.ops):
            self.op, self.value = op, len(graph.inputs) + k
            self._lay()
        self._side_by_side()
        for value, dims in self.dims.items():
            leaves = [a for dim in dims for a in self.axes.leaves(dim)]
            if len(set(leaves)) < len(leaves):
                raise Unsupported(f"value {value} meets itself transposed")

    def _side_by_side(self) -> None:
        """Results of one shape are walked together, even if nothing connects them, as the heads of keys and queries."""
        first = self.graph.outputs[0]
        for value in self.graph.outputs[1:]:
            if self.graph.tensor(value).shape == self.graph.tensor(first).shape:
                for mine, dim in zip(self.dims[value], self.dims[first], strict=True):
                    self.axes.same(dim, mine)

    # -- one operator
    def _lay(self) -> None:
        op, name = self.op, self.op.name
        if name == "getitem":
            self._cut(*self.moves[op.args[0].to][op.args[1]])
            return
        if name in ("chunk", "split", "split_with_sizes", "unbind"):
            self._split()
            return
        if not isinstance(op.out, TensorSpec):
            raise Unsupported(f"{op.target} gives more than one tensor")
        if 0 in op.out.shape:
            raise Unsupported("a value is empty: there is nothing to compute")
        if name in REGROUPS and isinstance(op.args[0], Ref) and not op.target.endswith(".dtype"):
            self._alias(self._regrouped(op.args[0].to))
        elif name in PERMUTES:
            self._alias(self._permuted())
        elif name in EXPANDS:
            self._alias(self._broadcast([op.args[0].to]))
        elif name in ("slice", "select", "narrow"):
            self._slice()
        elif name in ("cat", "stack"):
            self._join()
        elif name in WINDOWS:
            self._window(op.args[0].to, int(name[-2]))
        elif name in SUMS or name in SOFTMAXES or name in LOSSES or name in _SPECIAL:
            self._reduce()
        else:
            own = [a.to for k in AFFINE.get(name, ()) if isinstance(a := argument(op, k, ""), Ref)]
            self.dims[self.value] = self._broadcast([v for v in op.inputs if v not in own])
            self._line_up(own)

    def _line_up(self, own: list) -> None:
        """Arguments of a norm that belong to dimension 1."""
        for v in own:
            if len(self.dims[v]) != 1 or len(self.dims[self.op.args[0].to]) < 2:
                raise Unsupported(f"{self.op.target} with parameters of another shape")
            self.axes.same(self.dims[v][0], self.dims[self.op.args[0].to][1])

    def _alias(self, dims: tuple, source: int | None = None) -> None:
        source = self.op.args[0].to if source is None else source
        self.dims[self.value] = dims
        self.moves[self.value] = lambda places: (source, places)

    def _regrouped(self, source: int) -> tuple:
        shape = self.op.out.shape
        made = tuple(self.axes.new(n) for n in shape)
        self.axes.same(tuple(itertools.chain(*self.dims[source])), tuple(itertools.chain(*made)))
        return made

    def _permuted(self) -> tuple:
        dims, op = self.dims[self.op.args[0].to], self.op
        rank = len(dims)
        order = list(range(rank))
        if op.name == "permute":
            order = [d % rank for d in op.args[1]]
        elif op.name in ("transpose", "swapaxes"):
            a, b = op.args[1] % max(rank, 1), op.args[2] % max(rank, 1)
            order[a], order[b] = b, a
        elif op.name == "mT":
            order[-2:] = order[:-3:-1]
        else:
            order.reverse()
        return tuple(dims[d] for d in order)

    def _broadcast(self, operands: list) -> tuple:
        shape = self.op.out.shape
        dims: list = []
        for d, n in enumerate(shape):
            found = None
            for v in operands:
                at = d - len(shape) + len(self.dims[v])
                if n == 1 or at < 0 or self.graph.tensor(v).shape[at] == 1:
                    continue
                if found is None:
                    found = self.dims[v][at]
                else:
                    self.axes.same(found, self.dims[v][at])
            dims.append(self.axes.new(n) if found is None else found)
        return tuple(dims)

    # -- slices and what puts them together
    def _cut(self, source: int, d: int, start: int, step: int, drop: bool = False) -> None:
        """The value is a slice of dimension `d`; `drop`: of one element, without the dimension."""
        dims, total = self.dims[source], self.graph.tensor(source).shape[d]
        count = 1 if drop else self.op.out.shape[d]
        if count == total:
            self._alias(dims, source)
            return
        if step > 1:
            if total % step or count != total // step:
                raise Unsupported("a slice with a step that doesn't take equal shares of its dimension")
            made = self.axes.new(total // step)
            self.axes.same(dims[d], (*made, *self.axes.new(step, unrolled=True)))
        else:
            length = math.gcd(start, count, total)
            inner = self.axes.cut(dims[d], length)
            made = (*self.axes.new(count // length, unrolled=True), *inner)
        self.dims[self.value] = (*dims[:d], *(() if drop else (made,)), *dims[d + 1 :])

        def move(places: dict) -> tuple:
            rest = {a: p for a, p in places.items() if a not in self.axes.leaves(made)}
            return source, rest | self.axes.moved(dims[d], start, step, made, places)

        self.moves[self.value] = move

    def _slice(self) -> None:
        op, source = self.op, self.op.args[0].to
        shape = self.graph.tensor(source).shape
        d = argument(op, 1, "dim", 0) % len(shape)
        start = argument(op, 2, "index" if op.name == "select" else "start", 0) or 0
        if not isinstance(start, int):
            raise Unsupported(f"{op.target} at a place that is computed")
        start = max(0, min(start + shape[d] if start < 0 else start, shape[d]))
        step = argument(op, 4, "step", 1) if op.name == "slice" else 1
        self._cut(source, d, start, step, drop=op.name == "select")

    def _split(self) -> None:
        """Operators with several results: each is a slice that `getitem` takes."""
        op, source = self.op, self.op.args[0].to
        shape = self.graph.tensor(source).shape
        d = argument(op, 1 if op.name == "unbind" else 2, "dim", 0) % len(shape)
        if op.name == "unbind":
            self.moves[self.value] = [(source, d, k, 1, True) for k in range(shape[d])]
        else:
            starts = itertools.accumulate((s.shape[d] for s in op.out[:-1]), initial=0)
            self.moves[self.value] = [(source, d, start, 1) for start in starts]

    def _join(self) -> None:
        """`cat` along a dimension, or `stack` along a new one."""
        op = self.op
        values = [a.to for a in op.args[0]]
        rank = len(op.out.shape)
        d = argument(op, 1, "dim", 0) % rank
        stacks = op.name == "stack"
        shapes = [self.graph.tensor(v).shape for v in values]
        if any(len(s) != rank - stacks for s in shapes):
            raise Unsupported("cat with an empty tensor")
        lengths = [1 if stacks else s[d] for s in shapes]
        piece = math.gcd(*lengths)
        inner = self.axes.new(piece)
        own = [(*self.axes.new(n // piece, unrolled=True), *inner) for n in lengths]
        for v, part in zip(values, own, strict=True):
            dims = self.dims[v]
            if not stacks:
                self.axes.same(dims[d], part)
            others = [x for k, x in enumerate(dims) if stacks or k != d]
            for mine, first in zip(others, self._others(values[0], d, stacks), strict=True):
                self.axes.same(first, mine)
        made = (*self.axes.new(sum(lengths) // piece, unrolled=True), *inner)
        dims = self._others(values[0], d, stacks)
        self.dims[self.value] = (*dims[:d], made, *dims[d:])
        starts = list(itertools.accumulate(lengths, initial=0))

        def move(places: dict) -> tuple:
            strides = self.axes.strides(made)
            position = sum(places[a] * s for a, s in strides.items() if a in places)
            k = max(i for i, s in enumerate(starts[:-1]) if s <= position)
            rest = {a: p for a, p in places.items() if a not in strides}
            return values[k], rest | self.axes.moved(own[k], -starts[k], 1, made, places)

        self.moves[self.value] = move

    def _others(self, value: int, d: int, stacks: bool) -> tuple:
        return tuple(x for k, x in enumerate(self.dims[value]) if stacks or k != d)

    def _window(self, source: int, rank: int) -> None:
        """Pooling without overlap: places in the window are pieces, that are taken together."""

        def each(position: int, name: str, default) -> tuple:
            found = argument(self.op, position, name, default)
            found = found if isinstance(found, tuple) else (found,)
            return found * rank if len(found) == 1 else found

        size = each(1, "kernel_size", 1)
        stride = each(2, "stride", ()) or size
        shape, averages = self.graph.tensor(source).shape, self.op.name.startswith("avg")
        others = (argument(self.op, 6, "divisor_override"),) if averages else (*each(4, "dilation", 1),)
        plain = stride == size and not any(each(3, "padding", 0)) and set(others) <= {1, None}
        if not plain or any(n % k for n, k in zip(shape[-rank:], size, strict=True)):
            raise Unsupported("pooling with windows that overlap, or don't cover its input exactly")
        dims, cuts = list(self.dims[source]), []
        for d, k in enumerate(size, start=len(dims) - rank):
            outer, inner = self.axes.new(shape[d] // k), self.axes.new(k, unrolled=True)
            self.axes.same(dims[d], (*outer, *inner))
            dims[d] = outer
            cuts += inner
        self.windows[self.value] = tuple(cuts)
        self.dims[self.value] = tuple(dims)

    # -- reductions
    def _reduce(self) -> None:
        op = self.op
        source = op.args[0].to
        dims, rank = self.dims[source], len(self.dims[source])
        if op.name in SUMS:
            place = SUMS[op.name]
            told = dim_argument(op, 2 if op.name == "linalg_vector_norm" else 1, "dim", rank)
            keep = argument(op, place, "keepdim", False)
            self.reduced[self.value] = self._atoms(source, told)
            self.dims[self.value] = tuple(
                () if k in told else dim for k, dim in enumerate(dims) if keep or k not in told
            )
            return
        if op.name in SOFTMAXES:
            self.reduced[self.value] = self._atoms(source, dim_argument(op, 1, "dim", rank))
        elif op.name in LOSSES:
            self._loss(source)
            return
        else:
            _SPECIAL[op.name](self, source)
        if self.value not in self.dims:
            self.dims[self.value] = dims

    def _atoms(self, value: int, dims) -> tuple:
        return tuple(itertools.chain(*(self.dims[value][d] for d in dims)))

    def _last(self, source: int) -> None:
        """layer_norm, rms_norm: the last dimensions, with parameters of their shape."""
        depth = len(argument(self.op, 1, "normalized_shape"))
        rank = len(self.dims[source])
        self.reduced[self.value] = self._atoms(source, range(rank - depth, rank))
        for a in self.op.args[2:4]:
            if isinstance(a, Ref):
                for mine, dim in zip(self.dims[a.to], self.dims[source][rank - depth :], strict=True):
                    self.axes.same(mine, dim)

    def _groups(self, source: int) -> None:
        """group_norm: a group of channels and everything behind."""
        groups, channels = argument(self.op, 1, "num_groups"), self.graph.tensor(source).shape[1]
        inner = self.axes.new(channels // groups)
        self.axes.same(self.dims[source][1], (*self.axes.new(groups), *inner))
        self.reduced[self.value] = (*inner, *self._atoms(source, range(2, len(self.dims[source]))))
        self._line_up([a.to for k in (2, 3) if isinstance(a := argument(self.op, k, ""), Ref)])

    def _instance(self, source: int) -> None:
        if not argument(self.op, 5, "use_input_stats", True):
            raise Unsupported("instance_norm with running statistics")
        if isinstance(argument(self.op, 3, ""), Ref):
            raise Unsupported("instance_norm that updates running statistics")
        self.reduced[self.value] = self._atoms(source, range(2, len(self.dims[source])))
        self._line_up([a.to for k in (1, 2) if isinstance(a := argument(self.op, k, ""), Ref)])

    def _pool(self, source: int) -> None:
        """adaptive_avg_pool to one element: a mean."""
        size = argument(self.op, 1, "output_size")
        size = size if isinstance(size, tuple) else (size,)
        if any(n != 1 for n in size):
            raise Unsupported(f"adaptive pooling to {size}")
        rank = len(self.dims[source])
        pooled = range(rank - len(size), rank)
        self.reduced[self.value] = self._atoms(source, pooled)
        self.dims[self.value] = tuple(() if k in pooled else dim for k, dim in enumerate(self.dims[source]))

    def _loss(self, source: int) -> None:
        """cross_entropy_loss, nll_loss: class scores in dimension 1, a class number for each place."""
        target = self.op.args[1]
        dims = self.dims[source]
        if self.graph.tensor(target.to).dtype not in ("int64", "int32", "uint8"):
            raise Unsupported("cross entropy with class probabilities")
        d = 1 if len(dims) > 1 else 0
        places = dims[:d] + dims[d + 1 :]
        for mine, dim in zip(self.dims[target.to], places, strict=True):
            self.axes.same(mine, dim)
        self.reduced[self.value] = dims[d]
        self.dims[self.value] = places if argument(self.op, 3, "reduction", 1) == 0 else ()


_SPECIAL = {
    "layer_norm": Layout._last, "rms_norm": Layout._last, "group_norm": Layout._groups,
    "instance_norm": Layout._instance, "adaptive_avg_pool1d": Layout._pool, "adaptive_avg_pool2d": Layout._pool,
    "adaptive_avg_pool3d": Layout._pool,
}  # fmt: skip
