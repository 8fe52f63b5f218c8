"""What is computed of each pixel and pooled in front of a 1x1 convolution as one kernel; the convolution stays.

The pooling comes behind the convolution in the model (`framework/pooled.py`), as in DenseNet's transitions.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusescout.contenders.convolution_tail import strided
from fusescout.contenders.framework.pooled import pooled
from fusescout.convolution import CONVOLUTIONS
from fusescout.flops import op_class
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import substitute
from fusescout.reference import build
from fusescout.reference import to_source


@dataclass(frozen=True, slots=True)
class Front:
    """A sub-graph in two parts.

    Attributes:
        inner: from the inputs `taken` of the whole to the convolution's input: what a template is for.
        taken: which inputs of the whole `inner` takes, in order.
        convolution: from the inputs `kept` of the whole and what `inner` gives to the result.
        kept: which inputs of the whole `convolution` takes, in order.
    """

    inner: Subgraph
    taken: tuple[int, ...]
    convolution: Subgraph
    kept: tuple[int, ...]
    split: None = None
    """Nothing is prepared."""

    def wrapped(self, run: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """The whole sub-graph, where `run` computes `inner`."""
        convolve, taken, kept = build(self.convolution), self.taken, self.kept
        (spec,) = self.convolution.output_specs

        def call(inputs: Sequence[Any]) -> tuple[Any, ...]:
            (x,) = run([inputs[k] for k in taken])
            (made,) = convolve([*(inputs[k] for k in kept), x])
            return (strided(made, spec.stride),)

        return call

    def source(self, name: str) -> str:
        """Python that wraps the function `name` of `inner` into one of the whole sub-graph."""
        (spec,) = self.convolution.output_specs
        return f"""

{to_source(self.convolution, "convolution")}

before = {name}


def {name}(*inputs):
    (x,) = before({", ".join(f"inputs[{k}]" for k in self.taken)})
    (made,) = convolution({"".join(f"inputs[{k}], " for k in self.kept)}x)
    return (made if made.stride() == {spec.stride} else made.new_empty_strided(made.shape, {spec.stride}).copy_(made),)
"""


def as_front(graph: Subgraph) -> Front | None:
    """The two parts of a sub-graph whose pooling can be taken before its convolution; None if there is more or less."""
    step = pooled(graph)
    if step is None:
        return None
    graph = step[1]
    first, last = len(graph.inputs), graph.ops[-1]
    x, *parameters = last.inputs
    single = graph.outputs == (first + len(graph.ops) - 1,) and last.name in CONVOLUTIONS
    before = graph.ops[:-1]
    if (
        not single
        or any(p >= first for p in parameters)
        or len([o for o in before if op_class(o.target) != "view"]) < 2
    ):
        return None
    if any(o.name in CONVOLUTIONS for o in before):
        return None
    taken = tuple(sorted({i for op in before for i in op.inputs if i < first}))
    number = {v: k for k, v in enumerate((*taken, *range(first, first + len(before))))}
    inner = Subgraph(tuple(graph.inputs[k] for k in taken), tuple(_renamed(o, number) for o in before), (number[x],))
    kept = tuple(parameters)
    number = {v: k for k, v in enumerate((*kept, x))}
    specs = (*(graph.inputs[k] for k in kept), graph.tensor(x))
    return Front(inner, taken, Subgraph(specs, (_renamed(last, number),), (len(specs),)), kept)


def _renamed(op: Op, number: dict[int, int]) -> Op:
    return Op(op.target, substitute(op.args, number), tuple((k, substitute(v, number)) for k, v in op.kwargs), op.out)
