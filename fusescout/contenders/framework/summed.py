"""A sum over what a linear or a convolution gives, taken before the product.

    mean over columns of x W^T + b  =  x · (mean of W's rows) + mean of b
    mean over rows of x W^T + b     =  (mean of x's rows) W^T + b
    sum over pixels of conv(x, w)   =  sum over taps of w[tap] times the sum of the pixels that meet this tap

Factors and summands between the two go into the weight and bias first. Sums are taken in float32 at least, those of
weights in float64, and what is prepared of weights stays in float32: rounded to 16 bits it would be further off than
eager, whose rounding errors cancel in a sum. An infinite number that meets both signs gives both infinities and so NaN.
Each tap is multiplied by itself for that; where a linear's columns or rows are added up, NaN is put in the place of an
infinite input or weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusescout.contenders.framework.batch_norm import FLOAT64
from fusescout.contenders.framework.batch_norm import WIDE
from fusescout.contenders.framework.batch_norm import Emit
from fusescout.contenders.framework.batch_norm import emitter
from fusescout.contenders.framework.batch_norm import is_constant
from fusescout.contenders.framework.batch_norm import is_foldable
from fusescout.contenders.framework.folded import affine_chain
from fusescout.contenders.framework.folded import channels_of
from fusescout.contenders.framework.folded import read_product
from fusescout.contenders.framework.folded import wide_parameters
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import dense
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.contenders.framework.surgery import swapped
from fusescout.convolution import CONVOLUTIONS
from fusescout.convolution import Convolution
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.sums import MATMULS
from fusescout.sums import Total
from fusescout.sums import fits
from fusescout.sums import following
from fusescout.sums import weight_of

MOST_SUMS = 27
"""Different sets of pixels that are added up, a few launches each."""
CONTIGUOUS = Const("memory_format", "contiguous_format")
Pixels = tuple[int, int, int]
"""Start, stop and step of the pixels of one dimension that meet a tap."""


def summed(graph: Subgraph) -> Step | None:
    """The first linear or convolution with constant parameters that only a sum reads, or what is folded into it."""
    for value, op in numbered(graph):
        read = _read(graph, op)
        if read is None or not all(is_constant(graph, p) for p in (read.weight, read.bias) if p is not None):
            continue
        chain = affine_chain(graph, value)
        if op.name in MATMULS and any(len(graph.ops[v - len(graph.inputs)].inputs) > 1 for v in chain):
            continue  # an infinite factor of a column is one of all its products: this is for numbers
        found = following(graph, chain[-1] if chain else value)
        if found is None or not fits(op.name, found[1], len(graph.tensor(value).shape)):
            continue
        if not is_foldable(graph, found[0], value, read) or not graph.tensor(found[0]).is_contiguous:
            continue
        write = _Writer(graph, value, read, chain, *found)
        convolves = op.name in CONVOLUTIONS
        ops = write.convolution() if convolves else write.linear()
        if ops:
            kind = "convolution" if convolves else "linear"
            return f"{graph.ops[found[0] - len(graph.inputs)].name} before {kind}", splice(
                graph, {value, *chain, found[0]}, found[0], ops
            )
    return None


def _read(graph: Subgraph, op: Op) -> Convolution | None:
    """Operands of a product; of a matrix product as a linear whose weight is transposed."""
    if op.name not in MATMULS:
        return read_product(graph, op)
    found = weight_of(graph, op)
    return Convolution(op.inputs[0], found[0], None, (), (), (), (), 1, not found[1]) if found else None


def pixels_of(read: Convolution, k: int, x: Sequence[int], weight: Sequence[int], out: Sequence[int]) -> list[Pixels]:
    """Which input pixels each tap of dimension `k` meets in all of the result; none if one is idle."""
    size, stride, found = x[2 + k], read.stride[k], list[Pixels]()
    for tap in range(weight[2 + k]):
        offset = tap * read.dilation[k] - read.padding[k]
        if read.transposed:  # input pixel i goes to result pixel i * stride + offset
            met, step = [i for i in range(size) if 0 <= i * stride + offset < out[2 + k]], 1
        else:
            met, step = [i for o in range(out[2 + k]) if 0 <= (i := o * stride + offset) < size], stride
        if not met:
            return []
        found.append((met[0], met[-1] + 1, step if len(met) > 1 else 1))
    return found


class _Writer:
    """Operators in the place of a product and its sum."""

    def __init__(
        self, graph: Subgraph, value: int, read: Convolution, chain: Sequence[int], result: int, what: Total
    ) -> None:
        self.read, self.what = read, what
        self.x, weight = graph.tensor(read.x), graph.tensor(read.weight)
        self.weight = TensorSpec(weight.shape, WIDE, weight.stride)
        self.made, self.out = graph.tensor(value), graph.tensor(result)
        self.narrow = self.made.dtype
        self.dtype = WIDE if self.narrow == WIDE else "float32"
        self.count = math.prod(self.made.shape[d] for d in what.dims)
        self.ops: list[Op] = []
        self.emit: Emit = emitter(self.ops)
        self.wide, self.shift = wide_parameters(graph, value, read, chain, self.emit)
        if self.wide == Ref(read.weight):
            self.wide = self.emit("_to_copy.default", (self.wide,), self.weight, dtype=FLOAT64)
        self.channels = channels_of(graph, value, read)

    def linear(self) -> list[Op]:
        """Numbers of `x` times one row, added up; or, where columns stay, sums of rows times the weight."""
        last = len(self.x.shape) - 1
        if last not in self.what.dims:
            sums = self._reduced(Ref(self.read.x), self.x.shape, "mean.dim" if self.what.mean else "sum.dim_IntList")
            times = 1 if self.what.mean else self.count
            weight = self._cast(self._nan_where_infinite(self.wide, self.weight), self.weight)
            if self.read.transposed:
                weight = self.emit("t.default", (weight,), swapped(dense(self.weight.shape, self.dtype)))
            bias = () if self.shift is None else (self._bias(self.shift, times),)
            made = self.emit("linear.default", (sums, weight, *bias), replace(self.out, dtype=self.dtype))
            return self._finished(made)
        rows, inner = self.count // self.made.shape[last], (self.x.shape[last],)
        row = self.emit("sum.dim_IntList", (self.wide, (1 if self.read.transposed else 0,)), dense(inner, WIDE))
        if self.what.mean:
            row = self.emit("div.Scalar", (row, float(self.count)), dense(inner, WIDE))
        row = self._cast(row, dense(inner, WIDE))
        x = self._nan_where_infinite(Ref(self.read.x), self.x)
        terms = self.emit("mul.Tensor", (x, row), dense(self.x.shape, self.dtype))
        sums = self._reduced(terms, self.x.shape, "sum.dim_IntList")
        if self.shift is not None:
            one = dense((1,) if self.out.shape else (), WIDE)
            shift = self.emit("sum.dim_IntList", (self.shift, (0,), bool(one.shape)), one)
            factor = 1 / self.made.shape[last] if self.what.mean else float(rows)
            shift = self._cast(self.emit("mul.Scalar", (shift, factor), one), one)
            sums = self.emit("add.Tensor", (sums, shift), replace(self.out, dtype=self.dtype))
        return self._finished(sums)

    def convolution(self) -> list[Op]:
        """A convolution of sums, with one pixel in each dimension that is added up, and channels for each tap there."""
        read, spatial = self.read, tuple(d - 2 for d in self.what.dims)
        pixels = [pixels_of(read, k, self.x.shape, self.weight.shape, self.made.shape) for k in spatial]
        if not all(pixels) or math.prod(len(set(p)) for p in pixels) > MOST_SUMS:
            return []
        sums, shape = [Ref(read.x)], self.x.shape
        for k, wanted in zip(spatial, pixels, strict=True):
            found = {part: self._totals(part, shape, 2 + k, wanted) for part in dict.fromkeys(sums)}
            sums = [found[part][p] for part in sums for p in wanted]
            shape = tuple(1 if d == 2 + k else n for d, n in enumerate(shape))
        taps = len(sums)
        x, apart = sums[0], (*shape[:2], taps, *shape[2:])
        if len(set(sums)) > 1:
            x = self.emit("stack.default", (tuple(sums), 2), dense(apart, self.dtype))
        elif taps > 1:
            x = self.emit("unsqueeze.default", (x, 2), dense((*shape[:2], 1, *shape[2:]), self.dtype))
            strides = [0 if d == 2 else s for d, s in enumerate(dense((*shape[:2], 1, *shape[2:]), self.dtype).stride)]
            x = self.emit("expand.default", (x, apart), TensorSpec(apart, self.dtype, tuple(strides)))
        shape = (shape[0], shape[1] * taps, *shape[2:])
        if taps > 1:
            x = self.emit("reshape.default", (x, shape), dense(shape, self.dtype))
        bias = None if self.shift is None else self._bias(self.shift, 1 if self.what.mean else self.count)
        if len(spatial) == read.rank and read.groups == 1:
            return self._finished(self._product(x, bias, shape[:2]))
        return self._finished(self._convolution(x, bias, spatial))

    def _product(self, x: Ref, bias: Ref | None, size: tuple[int, ...]) -> Ref:
        """One pixel is left, and one tap: a matrix product."""
        channels = self.made.shape[1]
        if len(self.x.shape) > 2:
            x = self.emit("view.default", (x, size), dense(size, self.dtype))
        weight = self._weight((*range(2, len(self.weight.shape)),), (channels, size[1]), first="out")
        args = (x, weight, *(() if bias is None else (bias,)))
        made = self.emit("linear.default", args, dense((size[0], channels), self.dtype))
        return self.emit("view.default", (made, self.out.shape), dense(self.out.shape, self.dtype))

    def _weight(self, taps: tuple[int, ...], shape: tuple[int, ...], first: str = "") -> Ref:
        """The weight as `shape`, with dimensions `taps` moved behind the input's channels; over the count of a mean."""
        weight, spec = self.wide, self.weight
        rest = [d for d in range(2, len(spec.shape)) if d not in taps]
        order = [0, *taps, 1, *rest] if self.read.transposed else [0, 1, *taps, *rest]
        if first == "out" and self.read.transposed:
            order = [1, 0, *taps]
        turned = TensorSpec(tuple(spec.shape[d] for d in order), WIDE, tuple(spec.stride[d] for d in order))
        weight = self.emit("permute.default", (weight, tuple(order)), turned)
        weight = self.emit("reshape.default", (weight, shape), dense(shape, WIDE))
        weight = self.emit("div.Scalar", (weight, float(self.count if self.what.mean else 1)), dense(shape, WIDE))
        return self._cast(weight, dense(shape, WIDE))

    def _convolution(self, x: Ref, bias: Ref | None, spatial: tuple[int, ...]) -> Ref:
        read = self.read
        kernel = [1 if d - 2 in spatial else n for d, n in enumerate(self.weight.shape)]
        kernel[0 if read.transposed else 1] *= math.prod(self.weight.shape[2 + k] for k in spatial)
        weight = self._weight(self.what.dims, tuple(kernel))
        settings = [list(s) for s in (read.stride, read.padding, read.dilation, read.output_padding)]
        for k in spatial:
            for setting, one in zip(settings, (1, 0, 1, 0), strict=True):
                setting[k] = one
        stride, padding, dilation, output_padding = map(tuple, settings)
        ones = tuple(1 if d in self.what.dims else n for d, n in enumerate(self.made.shape))
        args = (x, weight, bias, stride, padding, dilation, read.transposed, output_padding, read.groups)
        made = self.emit("convolution.default", args, dense(ones, self.dtype))
        if self.what.keeps:
            return made
        return self.emit("view.default", (made, self.out.shape), dense(self.out.shape, self.dtype))

    def _totals(self, part: Ref, shape: tuple[int, ...], dim: int, wanted: list[Pixels]) -> dict[Pixels, Ref]:
        """Sums over these pixels of one dimension, what they have in common added up once."""
        low, high = max(start for start, _, _ in wanted), min(stop for _, stop, _ in wanted)
        if len(set(wanted)) == 1 or low >= high or any(step != 1 for _, _, step in wanted):
            return {pixels: self._total(part, shape, dim, pixels) for pixels in dict.fromkeys(wanted)}
        spec = dense(tuple(1 if d == dim else n for d, n in enumerate(shape)), self.dtype)
        common, found = self._total(part, shape, dim, (low, high, 1)), {}
        for pixels in dict.fromkeys(wanted):
            found[pixels] = common
            for start, stop in ((pixels[0], low), (high, pixels[1])):
                if start < stop:
                    edge = self._total(part, shape, dim, (start, stop, 1))
                    found[pixels] = self.emit("add.Tensor", (found[pixels], edge), spec)
        return found

    def _total(self, part: Ref, shape: tuple[int, ...], dim: int, pixels: Pixels) -> Ref:
        start, stop, step = pixels
        size = len(range(start, stop, step))
        if size != shape[dim]:
            strides = dense(shape, self.dtype).stride
            cut = tuple(size if d == dim else n for d, n in enumerate(shape))
            spec = TensorSpec(cut, self.dtype, tuple(s * step if d == dim else s for d, s in enumerate(strides)))
            part = self.emit("slice.Tensor", (part, dim, start, stop, step), spec)
        ones = tuple(1 if d == dim else n for d, n in enumerate(shape))
        return self.emit("sum.dim_IntList", (part, (dim,), True), dense(ones, self.dtype), **self._in_dtype())

    def _reduced(self, value: Ref, shape: tuple[int, ...], name: str) -> Ref:
        what = self.what
        ones = tuple(1 if d in what.dims else n for d, n in enumerate(shape))
        left = ones if what.keeps else tuple(n for d, n in enumerate(shape) if d not in what.dims)
        return self.emit(name, (value, what.dims, what.keeps), dense(left, self.dtype), **self._in_dtype())

    def _nan_where_infinite(self, value: Ref, spec: TensorSpec) -> Ref:
        finite = self.emit("isfinite.default", (value,), replace(spec, dtype="bool"))
        return self.emit("where.ScalarOther", (finite, value, math.nan), spec)

    def _in_dtype(self) -> dict[str, Any]:
        return {} if self.dtype == self.narrow else {"dtype": Const("dtype", self.dtype)}

    def _bias(self, shift: Ref, factor: float) -> Ref:
        row = dense((self.channels,), WIDE)
        return self._cast(shift if factor == 1 else self.emit("mul.Scalar", (shift, float(factor)), row), row)

    def _cast(self, value: Ref, spec: TensorSpec) -> Ref:
        """In the dtype that is computed in."""
        if spec.dtype == self.dtype:
            return value
        return self.emit("_to_copy.default", (value,), dense(spec.shape, self.dtype), dtype=Const("dtype", self.dtype))

    def _finished(self, made: Ref) -> list[Op]:
        if self.dtype != self.narrow:
            self.emit("_to_copy.default", (made,), self.out, dtype=Const("dtype", self.narrow))
        return self.ops
