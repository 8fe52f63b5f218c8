"""Reads a captured sub-graph as attention: what the queries, keys, values and scores are, and where they lie in memory.

Either one `scaled_dot_product_attention`, or its spelling by hand: a product, anything pointwise on the scores, a
softmax, a product. Views in front and behind are read as strides, so repeated heads are never in memory, and a result
may be written with its heads side by side. Leading dimensions become one number, that of the matrix.
"""

import math
from dataclasses import dataclass

from fusescout.templates.attention_layout import ATTENTION
from fusescout.templates.attention_layout import PRODUCTS
from fusescout.templates.attention_layout import AttentionLayout
from fusescout.templates.expression import unsupported
from fusescout.templates.gemm_batch import Refused
from fusescout.templates.gemm_batch import agreed
from fusescout.templates.layout import argument
from fusescout.templates.operators import Unsupported

from fusescout.causal import without_order
from fusescout.ir import FLOATS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph

SOFTMAXES = ("softmax", "_softmax")


@dataclass(frozen=True)
class Operand:
    """A tensor over (matrices, rows, columns): `lead` and `strides` in elements, 0 where it has no such dimension.

    `index` is the number of the input or output; `value` the value of the sub-graph that it stands for.
    """

    index: int
    value: int
    dtype: str
    lead: tuple
    shape: tuple
    strides: tuple


@dataclass(frozen=True)
class Problem:
    """Attention of `rows` queries to `keys` keys for each of the matrices `batch`, with heads of `width`.

    Attributes:
        chain: value indices of what is computed of the scores before the softmax, views among them, in order.
        scores, weighed: values of the scores as the product leaves them, and as the softmax reads them.
        operands: what else the chain reads; of a built-in attention its mask.
        scale: factor of the scores where the chain is nothing but that (and, in a built-in attention, its mask).
        safe: a row that sees no key gives 0, as the built-in does; written by hand it gives NaN.
    """

    graph: Subgraph
    batch: tuple
    rows: int
    keys: int
    width: int
    value_width: int
    q: Operand
    k: Operand
    v: Operand
    y: Operand
    operands: tuple
    chain: tuple
    scores: int
    weighed: int
    scale: float
    plain: bool
    causal: bool
    safe: bool

    @property
    def matrices(self) -> int:
        return math.prod(self.batch)


def read(graph: Subgraph) -> Problem:
    """The problem that `graph` is.

    Raises:
        Refused: it is something else, or a form of it that is not covered.
    """
    try:
        return _Reader(*without_order(graph)).problem()
    except Unsupported as reason:
        raise Refused(str(reason)) from reason


class _Reader:
    """Finds the parts by walking back from the result; `ordered` says that a causal mask was left out of it."""

    def __init__(self, graph: Subgraph, ordered: bool) -> None:
        self.graph, self.first, self.ordered = graph, len(graph.inputs), ordered
        if len(graph.outputs) != 1:
            raise Refused("more than one value leaves it")
        if not any(op.name == ATTENTION or op.name in SOFTMAXES for op in graph.ops):
            raise Refused("it holds no attention")
        self.layout = AttentionLayout(graph)
        if any(self.layout.axes.unrolled):
            raise Refused("a tensor is cut to pieces in it")
        self.end = self._source(graph.outputs[0])

    def problem(self) -> Problem:
        op = self.graph.op_of(self.end)
        if op is None or op.name not in (ATTENTION, *PRODUCTS):
            raise Refused("it doesn't end in attention")
        return self._built_in(op) if op.name == ATTENTION else self._by_hand(op)

    def _source(self, value: int) -> int:
        """What a value is only a view or a copy of."""
        while value in self.layout.moves:
            value, _ = self.layout.moves[value]({})
        return value

    def _built_in(self, op: Op) -> Problem:
        q, k, v = (arg.to for arg in op.args[:3])
        mask = argument(op, 3, "attn_mask")
        causal = bool(argument(op, 5, "is_causal", False))
        if argument(op, 4, "dropout_p", 0.0):
            raise Refused("dropout draws random numbers")
        if causal and isinstance(mask, Ref):
            raise Refused("it has a mask and is causal too")
        scale = argument(op, 6, "scale")
        scale = self.graph.tensor(q).shape[-1] ** -0.5 if scale is None else float(scale)
        if isinstance(mask, Ref) and self._source(mask.to) >= self.first:
            raise Refused("its mask is computed in it")
        self._only({self.end})
        extra = (mask.to,) if isinstance(mask, Ref) else ()
        return self._made(q, (k, -2), v, extra, (), -1, -1, scale, True, causal, safe=True)

    def _by_hand(self, op: Op) -> Problem:
        softmax = self._source(op.args[0].to)
        found = self.graph.op_of(softmax)
        if found is None or found.name not in SOFTMAXES:
            raise Refused("what it multiplies the values by is no softmax")
        weighed = found.args[0].to
        if found.args[1] % len(found.out.shape) != len(found.out.shape) - 1:
            raise Refused("its softmax is not over the keys")
        products = [i for i, o in enumerate(self.graph.ops, self.first) if o.name in PRODUCTS and i != self.end]
        if len(products) != 1:
            raise Refused(f"it holds {len(products) + 1} matrix products, not 2")
        (scores,) = products
        above = self._above(weighed)
        if scores not in above or len(self.graph.tensor(weighed).shape) < 2:
            raise Refused("its softmax is of no product")
        if len(self.graph.users(softmax)) != 1 or any(self.layout.reduced.keys() - {softmax}):
            raise Refused("more than a softmax is computed of its scores")
        product = self.graph.op_of(scores)
        inner = self._above(product.args[0].to) | self._above(product.args[1].to)
        chain = tuple(sorted(i for i in above - inner - {scores} if i >= self.first))
        self._only({self.end, softmax, scores, *chain})
        for value in chain:
            if value not in self.layout.moves and (reason := unsupported(self.graph.op_of(value), self.graph)):
                raise Refused(reason)
        extra = tuple(i for i in sorted(above - inner) if i < self.first)
        scale, plain = self._scale(chain, scores, weighed) if not extra else (1.0, False)
        key = (product.args[1].to, -1)
        q, v = product.args[0].to, op.args[1].to
        return self._made(q, key, v, extra, chain, scores, weighed, scale, plain, self.ordered)

    def _above(self, value: int) -> set:
        """A value and all it is computed from."""
        found, todo = set(), [value]
        while todo:
            if (v := todo.pop()) not in found:
                found.add(v)
                todo += self.graph.op_of(v).inputs if v >= self.first else ()
        return found

    def _only(self, known: set) -> None:
        """Refuse what is computed besides: only views may be."""
        for index, op in enumerate(self.graph.ops, self.first):
            if index not in known and index not in self.layout.moves:
                raise Refused(f"{op.target} is no part of attention")

    def _scale(self, chain: tuple, scores: int, weighed: int) -> tuple:
        """(factor, True) if the chain only scales, else (1, False)."""
        scale, value = 1.0, scores
        for index in chain:
            op = self.graph.op_of(index)
            if index in self.layout.moves or (op.name in ("to", "_to_copy") and op.out.dtype in FLOATS):
                value = index
                continue
            factor = op.args[1] if len(op.args) == 2 and op.args[0] == Ref(value) and not op.kwargs else None
            if op.name not in ("mul", "div") or isinstance(factor, bool) or not isinstance(factor, int | float):
                return 1.0, False
            scale, value = scale * factor if op.name == "mul" else scale / factor if factor else 0.0, index
        return (scale, True) if scale > 0 and value == weighed else (1.0, False)

    # -- memory
    def _axis(self, dim: tuple) -> tuple:
        leaves = self.layout.axes.leaves(dim)
        if len(leaves) > 1:
            raise Refused("rows, keys or heads are cut in two ways")
        return leaves

    def _made(
        self, q: int, key: tuple, v: int, extra: tuple, chain: tuple, scores: int, weighed: int, scale: float,
        plain: bool, causal: bool, safe: bool = False,
    ) -> Problem:  # fmt: skip
        graph, dims = self.graph, self.layout.dims
        k, at_key = key
        row, column = self._axis(dims[q][-2]), self._axis(dims[k][at_key])
        width, value_width = self._axis(dims[q][-1]), self._axis(dims[v][-1])
        lead = [a for dim in dims[self.end][:-2] for a in self.layout.axes.leaves(dim)]
        sizes = [self.layout.axes.sizes[a] for a in lead]
        given = {
            "q": (q, row, width), "k": (k, column, width), "v": (v, column, value_width),
            "y": (graph.outputs[0], row, value_width), **{e: (e, row, column) for e in extra},
        }  # fmt: skip
        strides = {name: self._strides(value) for name, (value, _, _) in given.items()}
        for name, (_, *own) in given.items():
            if set(strides[name]) - {*lead, *own[0], *own[1]}:
                raise Refused("an operand has a dimension that the scores lack")
        every = [[(n, s.get(a, 0)) for n, a in zip(sizes, lead, strict=True)] for s in strides.values()]
        batch, leads = agreed(every) if any(n > 1 for n in sizes) else ((), [()] * len(every))
        made = {}
        for (name, (value, *own)), lead_strides in zip(given.items(), leads, strict=True):
            source = value if name == "y" else self._source(value)
            if source >= self.first and name != "y":
                raise Refused("queries, keys, values or a mask are computed in it")
            shape = tuple(math.prod(self.layout.axes.sizes[a] for a in axis) for axis in own)
            steps = tuple(sum(strides[name].get(a, 0) for a in axis) for axis in own)
            dtype = graph.tensor(source).dtype
            made[name] = Operand(0 if name == "y" else source, value, dtype, lead_strides, shape, steps)
        if len({made[n].dtype for n in "qkvy"}) > 1:
            raise Refused("queries, keys, values and the result differ in dtype")
        return Problem(
            graph, batch, *made["q"].shape[:1], *made["k"].shape, made["v"].shape[1], *(made[n] for n in "qkvy"),
            tuple(made[e] for e in extra), chain, scores, weighed, scale, plain, causal, safe,
        )  # fmt: skip

    def _strides(self, value: int) -> dict:
        """Elements of memory per step of each axis of an input, seen through views, or of the result."""
        source = value if value in self.graph.outputs else self._source(value)
        found: dict = {}
        for dim, stride in zip(self.layout.dims[source], self.graph.tensor(source).stride, strict=True):
            found |= {a: s * stride for a, s in self.layout.axes.strides(dim).items()}
        return found
