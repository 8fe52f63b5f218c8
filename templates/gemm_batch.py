"""Batch dimensions of a batched matrix product: one set of sizes that suits every operand.

Each operand comes with its own dimensions, outermost first, as (size, stride): a product of [6, M, K] whose result is
viewed as [2, 3, M, N] has a mask of [2, 1, 1, N]. They are cut at the same places, then joined where all can be.
"""

import math
from itertools import pairwise


class Refused(Exception):
    """The sub-graph is not a GEMM with an epilogue this template covers; the message is the reason."""


def agreed(every: list) -> tuple:
    """(sizes, strides of each operand) of dimension lists that all hold the same number of matrices."""
    every = [[(n, s) for n, s in dims if n != 1] for dims in every]
    cuts = sorted({inner for dims in every for inner in _inner(dims)})
    every = [_cut(dims, cuts) for dims in every]
    sizes = [n for n, _ in every[0]]
    if any([n for n, _ in dims] != sizes for dims in every):
        raise Refused("batch dimensions don't line up")
    groups: list = []
    for k in range(len(sizes)):
        if groups and all(dims[k - 1][1] == sizes[k] * dims[k][1] for dims in every):
            groups[-1].append(k)
        else:
            groups.append([k])
    joined = tuple(math.prod(sizes[k] for k in g) for g in groups)
    return joined, [tuple(dims[g[-1]][1] for g in groups) for dims in every]


def regrouped(dims: list, sizes: tuple) -> list:
    """Strides of dimensions, (size, stride) each, that are cut and joined to others of these sizes."""
    cuts = _inner([(n, 0) for n in sizes])
    pieces = _cut([d for d in dims if d[0] != 1], cuts)
    strides = []
    for size in sizes:
        run: list = []
        while math.prod(n for n, _ in run) < size:
            run.append(pieces.pop(0))
        if any(outer != n * inner for (_, outer), (n, inner) in pairwise(run)):
            raise Refused("an operand's rows are not evenly spaced in memory")
        strides.append(run[-1][1] if run else 0)
    return strides


def indices(sizes: tuple, position: str) -> list:
    """Texts of the index in each dimension, from the text of the number of the matrix."""
    texts, inner = [], 1
    for k in range(len(sizes) - 1, -1, -1):
        text = position if inner == 1 else f"{position} // {inner}"
        texts.insert(0, text if k == 0 else f"{text} % {sizes[k]}")
        inner *= sizes[k]
    return texts


def _inner(dims: list) -> list:
    """How many matrices lie inside one step of each dimension."""
    found, inner = [], 1
    for n, _ in reversed(dims):
        found.append(inner)
        inner *= n
    return found


def _cut(dims: list, cuts: list) -> list:
    found, inner = [], 1
    for n, stride in reversed(dims):
        places = [c for c in cuts if inner < c < inner * n]
        for place, end in zip([inner, *places], [*places, inner * n], strict=True):
            if end % place or place % inner:
                raise Refused("batch dimensions don't line up")
            found.insert(0, (end // place, stride * (place // inner)))
        inner *= n
    return found
