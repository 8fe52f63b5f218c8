"""Several matrix products of one input as one call: q, k and v of BERT, ViT, Llama, T5."""

from __future__ import annotations

import math
from dataclasses import replace

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import swapped
from fusescout.ir import DTYPE_BYTES
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.shared_input import Shared
from fusescout.shared_input import Writer
from fusescout.shared_input import dense
from fusescout.shared_input import packed
from fusescout.shared_input import read

LINEAR, BMM = "one linear", "one bmm"
ALIGNMENT = 16
"""Bytes. Whatever reads a result may rely on its address being a multiple of this."""


def one_product(graph: Subgraph) -> Step | None:
    """One `bmm` where the products are equal in size and nothing is added, else one `linear` and a copy of each part.

    A `bmm` leaves its results one after the other in memory, so that none has to be copied.
    """
    shared = read(graph)
    if isinstance(shared, str):
        return None
    if _is_batch(graph, shared):
        return BMM, _batched(graph, shared)
    rows = math.prod(graph.tensor(shared.x).shape[:-1])
    if rows == 1 and any(n * DTYPE_BYTES[graph.tensor(shared.x).dtype] % ALIGNMENT for n in shared.columns[:-1]):
        return None
    return LINEAR, packed(graph, shared)


def kept_bytes(graph: Subgraph) -> int:
    """Bytes that the weights side by side take beside the model's own."""
    shared = read(graph)
    operands = [] if isinstance(shared, str) else [v for p in shared.projections for v in (p.weight, p.bias)]
    return sum(graph.tensor(int(v)).nbytes for v in operands if v is not None)


def _is_batch(graph: Subgraph, shared: Shared) -> bool:
    x, out = graph.tensor(shared.x), graph.output_specs[0]
    plain = len(set(shared.columns)) == 1 and all(p.bias is None for p in shared.projections)
    return plain and x.is_contiguous and out.nbytes % ALIGNMENT == 0 and math.prod(x.shape[:-1]) > 1


def _batched(graph: Subgraph, shared: Shared) -> Subgraph:
    write, x = Writer(graph), graph.tensor(shared.x)
    count, n, k = len(shared.columns), shared.columns[0], x.shape[-1]
    rows = math.prod(x.shape[:-1])
    weights = tuple(write.rows_of(p) for p in shared.projections)
    stacked = dense((count, n, k), x.dtype)
    turned = write.emit("transpose.int", swapped(stacked), write.emit("stack.default", stacked, weights, 0), 1, 2)
    one = dense((1, rows, k), x.dtype)
    flat = write.emit("view.default", one, Ref(shared.x), one.shape)
    many = replace(one, shape=(count, rows, k), stride=(0, k, 1))
    product = write.emit(
        "bmm.default",
        dense((count, rows, n), x.dtype),
        write.emit("expand.default", many, flat, many.shape),
        turned,
    )
    results = []
    for g, spec in enumerate(graph.output_specs):
        part = write.emit("select.int", dense((rows, n), x.dtype), product, 0, g)
        results.append(write.emit("view.default", spec, part, spec.shape))
    return write.subgraph(results)
