"""Values of a sub-graph around its GEMM: which memory they are views of, and what an operator takes."""

from dataclasses import replace

from fusescout.templates.gemm_batch import Refused

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

GEMMS = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm")
REGROUPS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"})
"""Views that keep the row-major order of the elements."""
REORDERS = frozenset({"t", "transpose", "permute"})
VIEWS = REGROUPS | REORDERS | {"expand", "alias", "detach"}
"""Operators whose result is fully told by its shape and strides over the same memory."""


def op_of(graph: Subgraph, value: int) -> Op:
    """The operator that makes a value."""
    op = graph.op_of(value)
    assert op is not None
    return op


def ref_of(op: Op, position: int) -> int:
    """The value that is an operator's argument."""
    arg = op.args[position] if position < len(op.args) else None
    if not isinstance(arg, Ref):
        raise Refused(f"argument {position} of {op.name} is not a tensor")
    return int(arg.to)


def root_of(graph: Subgraph, value: int) -> int:
    """The sub-graph input whose memory `value` is a view of; the view's own spec tells its layout."""
    while value >= len(graph.inputs):
        op = op_of(graph, value)
        if op.name not in VIEWS:
            raise Refused(f"an operand is computed by {op.name}, which is not a view of an input")
        source = ref_of(op, 0)
        if op.name in ("reshape", "flatten") and not graph.tensor(source).is_contiguous:
            raise Refused(f"{op.name} of a strided operand copies it")
        value = source
    return value


def derived(graph: Subgraph, anchors: tuple) -> frozenset:
    """Values that depend on a GEMM's result."""
    main = set(anchors)
    for k, op in enumerate(graph.ops):
        if any(i in main for i in op.inputs):
            main.add(len(graph.inputs) + k)
    return frozenset(main)


def flipped(spec: TensorSpec) -> TensorSpec:
    """The transpose of a matrix, or of each of a batch."""

    def flip(dims: tuple) -> tuple:
        return (*dims[:-2], dims[-1], dims[-2])

    return replace(spec, shape=flip(spec.shape), stride=flip(spec.stride))
