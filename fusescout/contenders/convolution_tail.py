"""A convolution without its bias, then all that follows it, bias first, as one kernel.

On CUDA torch adds the bias in a pass of its own behind cuDNN's convolution, and each operator behind it takes one more.
The convolution stays the library's here; its bias joins the chain that one template computes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from fusescout import convolution
from fusescout.contenders.framework.surgery import numbered
from fusescout.convolution import BIAS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute
from fusescout.reference import build
from fusescout.reference import to_source


@dataclass(frozen=True, slots=True)
class Tail:
    """A sub-graph in two parts.

    Attributes:
        convolutions: from all inputs of the whole to the convolutions' results, without biases.
        inner: what is computed of the inputs `kept` and these results: what a template is for.
        kept: which inputs of the whole `inner` takes, in order, before the convolutions' results.
    """

    convolutions: Subgraph
    inner: Subgraph
    kept: tuple[int, ...]
    split: None = None
    """Nothing is prepared."""

    def wrapped(self, run: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """The whole sub-graph, where `run` computes `inner`."""
        convolve, kept = build(self.convolutions), self.kept
        strides = tuple(s.stride for s in self.convolutions.output_specs)

        def call(inputs: Sequence[Any]) -> tuple[Any, ...]:
            made = [_strided(t, s) for t, s in zip(convolve(inputs), strides, strict=True)]
            return run([*(inputs[k] for k in kept), *made])

        return call

    def source(self, name: str) -> str:
        """Python that wraps the function `name` of `inner` into one of the whole sub-graph."""
        strides = [s.stride for s in self.convolutions.output_specs]
        return f"""

{to_source(self.convolutions, "convolutions")}

behind = {name}


def strided(x, stride):
    return x if x.stride() == stride else x.new_empty_strided(x.shape, stride).copy_(x)


def {name}(*inputs):
    made = [strided(x, s) for x, s in zip(convolutions(*inputs), {strides})]
    return behind({"".join(f"inputs[{k}], " for k in self.kept)}*made)
"""


def _strided(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """In the strides that the kernel was built for, should a library choose others without a bias."""
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def as_tail(graph: Subgraph) -> Tail | str:
    """The two parts of a sub-graph, or why it has none."""
    first = len(graph.inputs)
    anchors = {v: op for v, op in numbered(graph) if op.name in convolution.CONVOLUTIONS}
    found = {v: convolution.read(graph, op) for v, op in anchors.items()}
    if any(isinstance(op.out, TensorSpec) and op.out.requires_grad for op in graph.ops):
        return "gradients are wanted"
    if any(c is None or max(c.x, c.weight, c.bias or 0) >= first for c in found.values()):
        return "an operand of the convolution is computed in the chain"
    if all(c is None or c.bias is None for c in found.values()):
        return "it has no bias that could join what follows"
    if any(v in graph.outputs and (c is None or c.bias is None) for v, c in found.items()):
        return "the result of a convolution without a bias is needed as it is"
    bare = tuple(replace(op, args=_without_bias(op), kwargs=_named(op)) for op in anchors.values())
    convolutions = Subgraph(graph.inputs, bare, tuple(range(first, first + len(bare))))
    biases = {v: c.bias for v, c in found.items() if c is not None and c.bias is not None}
    if any(graph.tensor(b).dtype != graph.tensor(v).dtype for v, b in biases.items()):
        return "its bias has another dtype"
    read = {i for v, op in numbered(graph) if v not in anchors for i in op.inputs if i < first}
    kept = tuple(sorted(read | set(biases.values())))
    return Tail(convolutions, _behind(graph, kept, biases, list(anchors)), kept)


def _without_bias(op: Op) -> tuple[Any, ...]:
    return tuple(None if k == BIAS else a for k, a in enumerate(op.args))


def _named(op: Op) -> tuple[tuple[str, Any], ...]:
    return tuple((k, v) for k, v in op.kwargs if k != "bias")


def _behind(graph: Subgraph, kept: tuple[int, ...], biases: dict[int, int], anchors: list[int]) -> Subgraph:
    """The operators behind the convolutions, with the biases in front of them."""
    inputs = (*(graph.inputs[k] for k in kept), *(replace(graph.tensor(v), constant=False) for v in anchors))
    number: dict[Any, Any] = {v: k for k, v in enumerate((*kept, *anchors))}
    ops: list[Op] = []

    def emit(op: Op) -> int:
        ops.append(op)
        return len(inputs) + len(ops) - 1

    for v in anchors:
        if v not in biases:
            continue
        row, out = graph.tensor(biases[v]), graph.tensor(v)
        shape = (row.shape[0], *(1 for _ in out.shape[2:]))
        spec = TensorSpec(shape, row.dtype, (row.stride[0], *(1 for _ in out.shape[2:])))
        view = emit(Op("aten.view.default", (Ref(number[biases[v]]), shape), (), spec))
        number[v] = emit(Op("aten.add.Tensor", (Ref(number[v]), Ref(view)), (), out))
    for value, op in numbered(graph):
        if value not in anchors:
            kwargs = tuple((k, substitute(a, number)) for k, a in op.kwargs)
            number[value] = emit(Op(op.target, substitute(op.args, number), kwargs, op.out))
    return Subgraph(inputs, tuple(ops), tuple(number[o] for o in graph.outputs))
