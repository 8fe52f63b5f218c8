"""A linear whose result is cut in two, as in packed gated MLPs, read as two linears on the halves of its weight."""

import math
from dataclasses import dataclass
from dataclasses import replace

from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

SPLITS = ("chunk", "split", "split_with_sizes")


@dataclass(frozen=True)
class Restated:
    """A sub-graph in other words, and for each of its inputs: which input of the first it is, and from which row on."""

    graph: Subgraph
    origins: tuple


def unpacked(graph: Subgraph) -> Restated | None:
    """The sub-graph with a linear for each half; None if it isn't one linear whose result is only used in halves."""
    first = len(graph.inputs)
    products = [first + k for k, op in enumerate(graph.ops) if op.name == "linear"]
    if len(products) != 1 or products[0] in graph.outputs:
        return None
    (product,) = products
    parts = _halves(graph, product)
    op = graph.op_of(product)
    operands = [a.to for a in op.args[1:] if isinstance(a, Ref)]  # weight and bias
    if parts is None or any(i >= first or graph.inputs[i].shape[0] % 2 for i in operands):
        return None
    if any(i in other.inputs for other in graph.ops if other is not op for i in operands) or op.args[0].to in operands:
        return None  # it is used whole, too
    return _rebuilt(graph, product, parts, operands)


def _halves(graph: Subgraph, product: int) -> dict | None:
    """For each value that is one half of the product's columns which, 0 or 1. Values between are mapped to None."""
    first, n = len(graph.inputs), graph.tensor(product).shape[-1]
    cut: dict = {}
    for k, op in enumerate(graph.ops):
        value = first + k
        source = op.args[0].to if op.args and isinstance(op.args[0], Ref) else None
        if op.name in SPLITS and source == product and _is_last(op, graph.tensor(product)):
            cut[value] = None
        elif op.name == "getitem" and source in cut:
            cut[value] = op.args[1]
        elif op.name == "slice" and source == product and _is_last(op, graph.tensor(product)):
            start = op.args[2] if len(op.args) > 2 else 0
            cut[value] = 1 if start in (n // 2, -(n // 2)) else 0
        elif product in op.inputs or any(cut.get(i, 0) is None for i in op.inputs if i in cut):
            return None
    halves = [v for v, half in cut.items() if half is not None]
    if n % 2 or any(graph.tensor(v).shape[-1] != n // 2 for v in halves) or {cut[v] for v in halves} != {0, 1}:
        return None
    return None if any(v in graph.outputs for v in cut) else cut


def _is_last(op: Op, spec: TensorSpec) -> bool:
    """Whether it cuts the last dimension; a slice with a step of 1."""
    at = 1 if op.name == "slice" else 2
    dim = op.args[at] if len(op.args) > at else op.kwarg("dim", 0)
    return dim in (-1, len(spec.shape) - 1) and (op.name != "slice" or len(op.args) < 5 or op.args[4] == 1)


def _rebuilt(graph: Subgraph, product: int, parts: dict, operands: list) -> Restated:
    first, op = len(graph.inputs), graph.op_of(product)
    shape = (*op.out.shape[:-1], op.out.shape[-1] // 2)
    half = replace(op.out, shape=shape, stride=tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))))
    inputs = list(graph.inputs)
    origins = [(k, 0) for k in range(first)]
    second = {}
    for i in operands:
        whole = graph.inputs[i]
        inputs[i] = replace(whole, shape=(whole.shape[0] // 2, *whole.shape[1:]))
        second[i] = len(inputs)
        inputs.append(inputs[i])
        origins.append((i, whole.shape[0] // 2))
    name = {k: k for k in range(first)}
    ops: list = []
    halves = []
    for k, other in enumerate(graph.ops):
        value = first + k
        if value == product:
            for to in (name, name | second):
                halves.append(len(inputs) + len(ops))
                ops.append(Op(op.target, substitute(op.args, to), op.kwargs, half))
        elif value in parts:
            name[value] = halves[parts[value] or 0]
        else:
            name[value] = len(inputs) + len(ops)
            kwargs = tuple((a, substitute(b, name)) for a, b in other.kwargs)
            ops.append(Op(other.target, substitute(other.args, name), kwargs, other.out))
    return Restated(Subgraph(tuple(inputs), tuple(ops), tuple(name[v] for v in graph.outputs)), tuple(origins))
