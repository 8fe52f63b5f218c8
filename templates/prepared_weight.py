"""A weight that is a parameter, beside a sub-graph in another form, which is made once."""

from dataclasses import replace

from fusescout.constants import Split
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute


def can_prepare(graph: Subgraph, weight: int) -> bool:
    """Whether an input is a parameter, and no gradients are wanted."""
    wanted = any(isinstance(op.out, TensorSpec) and op.out.requires_grad for op in graph.ops)
    return graph.inputs[weight].constant and not wanted


def beside(graph: Subgraph, weight: int, prepare: Subgraph) -> Split:
    """The parts of a sub-graph: `prepare` makes the other form of an input.

    The steady part is the whole sub-graph with one more input, the last one, which only a kernel reads.
    """
    first = len(graph.inputs)
    number = {v: v + (v >= first) for v in range(first + len(graph.ops))}
    ops = tuple(
        Op(o.target, substitute(o.args, number), tuple((k, substitute(v, number)) for k, v in o.kwargs), o.out)
        for o in graph.ops
    )
    made = tuple(replace(spec, constant=True) for spec in prepare.output_specs)
    steady = Subgraph((*graph.inputs, *made), ops, tuple(number[o] for o in graph.outputs))
    return Split(prepare, (weight,), steady, tuple(range(first)))
