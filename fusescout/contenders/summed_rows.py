"""A linear whose columns are only added up as what a kernel for rows can compute: the product itself is not needed."""

from __future__ import annotations

from fusescout import constants
from fusescout.contenders.framework.summed import summed
from fusescout.contenders.pointwise_convolution import Product
from fusescout.ir import Subgraph
from fusescout.regions import GEMMS
from fusescout.sums import is_summed


def as_rows(graph: Subgraph) -> Product | None:
    """The rest of a sub-graph, with what is made of its parameters prepared; None if it keeps a matrix product."""
    if not is_summed(graph):
        return None
    while step := summed(graph):
        graph = step[1]
    split = constants.split(graph)
    if split is None or any(op.name in GEMMS for op in split.steady.ops):
        return None
    return Product(split, split.steady, split.steady)
