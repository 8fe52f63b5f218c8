"""Axes of an attention's values: the rules for its products, beside those for everything around them."""

from fusescout.templates.layout import Layout
from fusescout.templates.layout import argument
from fusescout.templates.operators import Unsupported

from fusescout.ir import FLOATS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph

PRODUCTS = ("matmul", "bmm")
ATTENTION = "scaled_dot_product_attention"
COPIES = ("contiguous", "clone", "alias", "detach", "to", "_to_copy", "dropout")


class AttentionLayout(Layout):
    """Axes of all values, with the two kinds of products among the operators."""

    def _lay(self) -> None:
        op = self.op
        if op.name in PRODUCTS:
            a, b = (arg.to for arg in op.args[:2])
            if min(len(self.dims[a]), len(self.dims[b])) < 2:
                raise Unsupported("a product with a vector")
            self.axes.same(self.dims[a][-1], self.dims[b][-2])
            self.dims[self.value] = (*self._lead((a, b)), self.dims[a][-2], self.dims[b][-1])
        elif op.name == ATTENTION:
            self._attention()
        elif op.name in COPIES and _is_copy(op, self.graph):
            self._alias(self.dims[op.args[0].to])
        else:
            super()._lay()

    def _lead(self, operands: tuple) -> tuple:
        """Leading dimensions of a product, by broadcasting."""
        shape, dims = self.op.out.shape[:-2], []
        for d, n in enumerate(shape):
            found = None
            for v in operands:
                at = d - len(shape) + len(self.dims[v]) - 2
                if at < 0 or self.graph.tensor(v).shape[at] == 1:
                    continue
                if found is None:
                    found = self.dims[v][at]
                else:
                    self.axes.same(found, self.dims[v][at])
            dims.append(self.axes.new(n) if found is None else found)
        return tuple(dims)

    def _attention(self) -> None:
        op = self.op
        q, k, v = (arg.to for arg in op.args[:3])
        self.axes.same(self.dims[q][-1], self.dims[k][-1])
        self.axes.same(self.dims[k][-2], self.dims[v][-2])
        shapes = [self.graph.tensor(x).shape for x in (q, k, v)]
        if argument(op, 7, "enable_gqa", False) and shapes[0][-3] != shapes[1][-3]:
            if any(len(s) != 4 for s in shapes) or shapes[1][1] != shapes[2][1]:
                raise Unsupported("grouped queries of another form than [batch, heads, rows, width]")
            group = self.axes.new(shapes[0][1] // shapes[1][1])
            for x in (k, v):
                self.axes.same(self.dims[q][1], (*self.dims[x][1], *group))
            lead = (*self._first(q, k, v), self.dims[q][1])
        else:
            lead = self._lead((q, k, v))
        whole = (*lead, self.dims[q][-2], self.dims[k][-2])
        mask = argument(op, 3, "attn_mask")
        if isinstance(mask, Ref):
            own, sizes = self.dims[mask.to], self.graph.tensor(mask.to).shape
            for mine, dim, n in zip(own[::-1], whole[::-1], sizes[::-1], strict=False):
                if n != 1:
                    self.axes.same(dim, mine)
        self.dims[self.value] = (*lead, self.dims[q][-2], self.dims[v][-1])

    def _first(self, *values: int) -> tuple:
        """The batch of four-dimensional tensors."""
        found = [self.dims[x][0] for x in values if self.graph.tensor(x).shape[0] != 1]
        for mine in found[1:]:
            self.axes.same(found[0], mine)
        return (found[0] if found else (),)


def _is_copy(op: Op, graph: Subgraph) -> bool:
    """Whether an operator's result is its argument: a copy, dropout in eval mode, a cast that casts nothing."""
    if op.name == "dropout":
        return argument(op, 2, "train", True) is False
    source = graph.tensor(op.args[0].to).dtype
    return source == op.out.dtype or (op.name in ("to", "_to_copy") and {source, op.out.dtype} <= FLOATS)
