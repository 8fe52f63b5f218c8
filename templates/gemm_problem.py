"""Reads a captured sub-graph as one GEMM and its epilogue: sizes, layouts, and where each operand is found.

Every value behind the GEMM lives in one space of M rows and N columns, or of a batch of those. Views that only regroup
the leading dimensions don't change a value's place in it, so they vanish here; an operand is known by its strides
alone, so a transposed or expanded view of an input needs no operator either.
"""

import math
from dataclasses import dataclass
from dataclasses import replace
from itertools import pairwise

from fusescout.templates.gemm_batch import Refused
from fusescout.templates.gemm_batch import agreed
from fusescout.templates.gemm_oriented import oriented
from fusescout.templates.gemm_packed import unpacked
from fusescout.templates.gemm_views import GEMMS
from fusescout.templates.gemm_views import REGROUPS
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
from fusescout.scaled import spelled_out
from fusescout.scaled import sums_exactly


@dataclass(frozen=True)
class Matrix:
    """A 2-D operand of the GEMM: rows x columns, `pitch` elements from row to row, columns adjacent.

    `batch` has the elements from matrix to matrix in each batch dimension, 0 where all share one. While a problem is
    being read it has (size, stride) pairs instead. `offset` rows lie before it in the tensor that is passed.
    Where it is `turned` the rows are adjacent, and `pitch` is from column to column.
    """

    input: int
    rows: int
    columns: int
    pitch: int
    dtype: str
    aligned: bool
    batch: tuple = ()
    offset: int = 0
    turned: bool = False


@dataclass(frozen=True)
class Operand:
    """An epilogue input. `kind` tells its address for result element (m, n).

    "full" [m, n], "row" [n], "column" [m], "scalar" [0], "cycle" [m % period, n], "block" [m // period, n],
    "cycle_column" [m % period], "block_column" [m // period]. `offset` elements of a row lie before it, as in `Matrix`.
    """

    value: int
    input: int
    kind: str
    shape: tuple
    stride: tuple
    dtype: str
    period: int = 1
    batch: tuple = ()
    offset: int = 0


@dataclass(frozen=True)
class Output:
    """One result: the value it holds and the pitch of its rows in memory."""

    value: int
    pitch: int
    dtype: str
    batch: tuple = ()


@dataclass(frozen=True)
class Problem:
    """`x[M, K] @ w` and what happens to the result. `w` is [N, K] (`transposed`) or [K, N].

    Attributes:
        anchor: value index of the GEMM itself.
        graph: the sub-graph without views; `epilogue` are the value indices of its ops that must be computed.
        bias: value index added to the GEMM by the operator itself, or None. `alpha` and `beta` scale as in addmm.
        batch: sizes of the batch dimensions, outermost first; M, N and K are of one matrix.
        promoted: sums must not stay in the tensor cores' accumulators for long (`gemm_promoted.py`).
    """

    M: int
    N: int
    K: int
    x: Matrix
    weights: tuple
    transposed: bool
    anchors: tuple
    bias: tuple
    alpha: float
    beta: float
    operands: tuple
    outputs: tuple
    graph: Subgraph
    epilogue: tuple
    batch: tuple = ()
    promoted: bool = False

    @property
    def w(self):
        return self.weights[0]

    @property
    def anchor(self):
        return self.anchors[0]


def read(graph: Subgraph, gemms: int = 1, turned: bool = False) -> Problem:
    """The problem a sub-graph states; raises `Refused` with the reason if it isn't `gemms` GEMMs with an epilogue.

    The input and results may be `turned` where the caller knows how to deal with that.
    """
    promoted = sums_exactly(graph)
    try:
        graph = spelled_out(graph)
    except ValueError as reason:
        raise Refused(str(reason)) from reason
    restated = unpacked(graph) if gemms == 2 else oriented(graph) if turned else None
    problem = replace(_read(restated.graph if restated else graph, gemms), promoted=promoted)
    if problem.x.turned and not turned:
        raise Refused("the rows of the GEMM's input are not contiguous in memory")
    if restated is None:
        return problem
    if gemms == 2 and not problem.transposed:
        raise Refused("the halves of its weight lie side by side")

    def placed(o):
        origin, offset = restated.origins[o.input]
        return replace(o, input=origin, offset=offset)

    return replace(
        problem, x=placed(problem.x), weights=tuple(map(placed, problem.weights)),
        operands=tuple(map(placed, problem.operands)),
    )  # fmt: skip


def _read(graph: Subgraph, gemms: int) -> Problem:
    first = len(graph.inputs)
    anchors = tuple(first + k for k, op in enumerate(graph.ops) if op.name in GEMMS)
    if len(anchors) != gemms:
        raise Refused(f"it holds {len(anchors)} matrix products, not {gemms}")
    if several := [op.name for op in graph.ops if not isinstance(op.out, TensorSpec)]:
        raise Refused(f"{several[0]} behind the GEMM cuts its columns")
    x, w, transposed, biases, alpha, beta = _gemm(graph, anchors[0])
    weights, bias = [w], [biases]
    for anchor in anchors[1:]:
        other_x, other_w, other_transposed, other_bias, *scales = _gemm(graph, anchor)
        if (
            other_x != x
            or replace(other_w, input=w.input) != w
            or other_transposed != transposed
            or scales != [1.0, 1.0]
        ):
            raise Refused("its matrix products differ in input, shape or layout")
        weights.append(other_w)
        bias.append(other_bias)
    main = derived(graph, anchors)
    plain, epilogue = _without_views(graph, anchors, main, w.rows if transposed else w.columns)
    n = w.rows if transposed else w.columns
    spaces = _spaces(graph, anchors, main, epilogue, bias)
    used = {i for k in epilogue for i in op_of(plain, k).inputs} | {b for b in bias if b is not None}
    operands = [_operand(graph, v, spaces, x.rows) for v in sorted(used) if v not in main and v not in epilogue]
    outputs = [_output(graph, v, main, graph.tensor(anchors[0]).numel, (x.rows, n)) for v in graph.outputs]
    every = [x, *weights, *operands, *outputs]
    batch, strides = agreed([list(o.batch) for o in every])
    x, *every = (replace(o, batch=s) for o, s in zip(every, strides, strict=True))
    weights, operands, outputs = every[:gemms], every[gemms : len(every) - len(outputs)], every[-len(outputs) :]
    return Problem(
        x.rows, n, x.columns, x, tuple(weights), transposed, anchors, tuple(bias), alpha, beta, tuple(operands),
        tuple(outputs), plain, epilogue, batch,
    )  # fmt: skip


def _gemm(graph: Subgraph, anchor: int):
    op = op_of(graph, anchor)
    shift = 1 if op.name in ("addmm", "baddbmm") else 0
    bias = ref_of(op, 0) if shift else None
    if op.name == "linear" and len(op.args) > 2 and isinstance(op.args[2], Ref):
        bias = int(op.args[2].to)
    left, right = ref_of(op, shift), ref_of(op, shift + 1)
    if len(graph.tensor(right).shape) < 2 or len(graph.tensor(left).shape) < 2:
        raise Refused("the matrix product has a vector operand")
    x = _matrix(graph, left) if len(graph.tensor(right).shape) == 2 else None
    batch = () if x else graph.tensor(anchor).shape[:-2]
    x = x or _matrix(graph, left, None, batch)
    x = x or _turned(graph, left, batch)
    if x is None:
        raise Refused("the rows of the GEMM's input are not contiguous in memory")
    spec = graph.tensor(right)
    logical = spec if op.name != "linear" else flipped(spec)
    w = _matrix(graph, right, logical, batch)
    transposed = w is None or (w.rows > 1 and w.columns == 1 and logical.stride[-2] == 1)
    if transposed:  # column-major [K, N] is row-major [N, K]
        w = _matrix(graph, right, flipped(logical), batch)
    if w is None:
        raise Refused("the weight is strided in both dimensions")
    return x, w, transposed, bias, float(op.kwarg("alpha", 1) or 0), float(op.kwarg("beta", 1) or 0)


def _turned(graph: Subgraph, value: int, batch: tuple) -> Matrix | None:
    """A value whose columns are contiguous in memory instead of its rows."""
    spec = graph.tensor(value)
    found = _matrix(graph, value, flipped(spec), batch) if batch or len(spec.shape) == 2 else None
    return found and replace(found, rows=found.columns, columns=found.rows, turned=True)


def _matrix(graph: Subgraph, value: int, spec: TensorSpec | None = None, batch: tuple = ()) -> Matrix | None:
    """A value as a matrix; with `batch`, as so many of them, which it may be broadcast to."""
    spec = spec or graph.tensor(value)
    lead = [0] * (len(batch) + 2 - len(spec.shape)) if batch else []
    if batch:
        lead += [0 if n == 1 else s for n, s in zip(spec.shape[:-2], spec.stride[:-2], strict=True)]
        spec = replace(spec, shape=spec.shape[-2:], stride=spec.stride[-2:])
    pitch = _pitch(spec.shape, spec.stride)
    if pitch is None or (spec.stride[-1] != 1 and spec.shape[-1] != 1):
        return None
    if pitch < spec.shape[-1] and math.prod(spec.shape[:-1]) > 1:
        return None  # rows that overlap
    root = graph.inputs[root_of(graph, value)]
    rows, dims = math.prod(spec.shape[:-1]), tuple(zip(batch, lead, strict=True))
    return Matrix(root_of(graph, value), rows, spec.shape[-1], pitch, spec.dtype, root.aligned, dims)


def _pitch(shape: tuple, stride: tuple) -> int | None:
    """Elements from row to row if the leading dimensions form one evenly spaced run, else None."""
    dims = [(n, s) for n, s in zip(shape[:-1], stride[:-1], strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(dims):
        if outer != n * inner:
            return None
    return dims[-1][1] if dims else shape[-1]


def _without_views(graph: Subgraph, anchors: tuple, main: frozenset, n: int):
    """The sub-graph with views of computed values bypassed, and the values that are left to compute."""
    name = {k: k for k in range(len(graph.inputs) + len(graph.ops))}
    ops, epilogue = [], []
    for k, op in enumerate(graph.ops):
        value = len(graph.inputs) + k
        ops.append(
            Op(op.target, substitute(op.args, name), tuple((a, substitute(b, name)) for a, b in op.kwargs), op.out)
        )
        if value in anchors:
            continue
        if value in main and any(i in anchors for i in op.inputs) and op.name in GEMMS:
            raise Refused("one matrix product feeds another")
        if value in main and op.name in REGROUPS:
            spec = graph.tensor(value)
            if not spec.shape or spec.shape[-1] != n or graph.tensor(ref_of(op, 0)).shape[-1:] != (n,):
                raise Refused(f"{op.name} behind the GEMM regroups its columns")
            name[value] = name[ref_of(op, 0)]
        elif value in main and op.name in VIEWS - {"alias", "detach"}:
            raise Refused(f"{op.name} behind the GEMM reorders its result")
        elif value in main or op.name not in VIEWS:
            epilogue.append(value)
    outputs = tuple(name[v] for v in graph.outputs)
    return Subgraph(graph.inputs, tuple(ops), outputs), tuple(epilogue)


def _spaces(graph: Subgraph, anchors: tuple, main: frozenset, epilogue: tuple, bias: list) -> dict:
    """For every value the epilogue reads: the shape of the result it is broadcast to."""
    spaces: dict[int, set] = {}
    for anchor, b in zip(anchors, bias, strict=True):
        if b is not None:
            spaces.setdefault(b, set()).add(graph.tensor(anchor).shape)
    for value in reversed(epilogue):
        shapes = {graph.tensor(value).shape} if value in main else spaces.get(value, set())
        for i in op_of(graph, value).inputs:
            if i not in main:
                spaces.setdefault(i, set()).update(shapes)
    return spaces


def _operand(graph: Subgraph, value: int, spaces: dict, rows: int) -> Operand:
    spec, root = graph.tensor(value), root_of(graph, value)
    found = {_place(spec, space, rows) for space in spaces[value]}
    if len({f[:4] for f in found}) != 1:
        raise Refused("an operand is broadcast in two different ways")
    kind, shape, stride, period, batch = min(found, key=lambda f: len(f[4]))
    if any(agreed([list(batch), list(f[4])])[1][0] != agreed([list(batch), list(f[4])])[1][1] for f in found):
        raise Refused("an operand is broadcast in two different ways")
    if kind != "scalar" and not graph.tensor(root).aligned:
        raise Refused("an input of its epilogue doesn't begin at a multiple of 16 bytes, as vectors are read")
    return Operand(value, root, kind, shape, stride, spec.dtype, period, batch)


def _split(shape: tuple, rows: int) -> int:
    """Where the leading dimensions of (..., N) part into those of the batch and those of the rows of one matrix."""
    for k in range(len(shape)):
        if math.prod(shape[k:-1]) == rows:
            return k
    raise Refused("a view behind the GEMM mixes rows of different matrices")


def _place(spec: TensorSpec, space: tuple, m: int) -> tuple:
    """(kind, shape, stride, period, batch) of an operand that is broadcast to `space` = (..., N) of `m` rows."""
    pad = len(space) - len(spec.shape)
    if pad < 0:
        raise Refused("an operand has more dimensions than the result")
    strides = [0] * pad + [0 if n == 1 else s for n, s in zip(spec.shape, spec.stride, strict=True)]
    n, step, cut = space[-1], strides[-1], _split(space, m)
    batch = tuple(zip(space[:cut], strides[:cut], strict=True))
    dims = [(d, s) for d, s in zip(space[cut:-1], strides[cut:-1], strict=True) if d != 1]
    lead = 0
    while lead < len(dims) and dims[lead][1] == 0:
        lead += 1
    trail = len(dims)
    while trail > lead and dims[trail - 1][1] == 0:
        trail -= 1
    core = dims[lead:trail]
    rows = math.prod(d for d, _ in core)
    for (_, outer), (d, inner) in pairwise(core):
        if outer != d * inner:
            raise Refused("an operand's rows are not evenly spaced in memory")
    if step not in (0, 1) and n != 1 and not core:
        raise Refused("an operand's columns are not adjacent in memory")
    if not core:
        return ("row", (n,), (1,), 1, batch) if step else ("scalar", (1,), (1,), 1, batch)
    if lead and trail < len(dims):
        raise Refused("an operand is broadcast on both sides of its rows")
    pitch = core[-1][1]
    shape, stride = ((rows, n), (pitch, step)) if step else ((rows,), (pitch,))
    tail = "" if step else "_column"
    if lead:
        return f"cycle{tail}", shape, stride, rows, batch
    if trail < len(dims):
        return f"block{tail}", shape, stride, m // rows, batch
    return "full" if step else "column", shape, stride, 1, batch


def _output(graph: Subgraph, value: int, main: frozenset, numel: int, size: tuple) -> Output:
    spec, (m, n) = graph.tensor(value), size
    if value not in main or spec.numel != numel or spec.shape[-1] != n:
        raise Refused("a result is not computed from the GEMM")
    cut = _split(spec.shape, m)
    pitch = _pitch(spec.shape[cut:], spec.stride[cut:])
    if pitch is None or (spec.stride[-1] != 1 and n != 1):
        raise Refused("a result's rows are not evenly spaced in memory")
    return Output(value, pitch, spec.dtype, tuple(zip(spec.shape[:cut], spec.stride[:cut], strict=True)))
