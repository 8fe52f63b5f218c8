"""A 1x1 convolution in channels-last memory as the matrix product it is: rows are pixels, columns are channels.

Batch norm becomes one factor and one summand for each channel; then every value is relabelled from [N, C, H, W] to
[N, H, W, C], which changes no address, and the convolution becomes `linear`. What is left is a GEMM with an epilogue,
for which there are templates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from fusescout import constants
from fusescout import convolution
from fusescout.constants import Split
from fusescout.contenders.framework.batch_norm import affine_batch_norm
from fusescout.contenders.framework.surgery import numbered
from fusescout.flops import op_class
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.reference import to_source


@dataclass(frozen=True, slots=True)
class Product:
    """A sub-graph as a GEMM with an epilogue.

    Attributes:
        split: what is prepared of parameters, or None.
        steady: the rest, or the whole sub-graph.
        inner: `steady` with its values relabelled: a GEMM with an epilogue, which a template is for.
    """

    split: Split | None
    steady: Subgraph
    inner: Subgraph

    def wrapped(self, run: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Runs `inner` on the tensors of `steady`."""
        forth = [
            None if new == old else (new.shape, new.stride)
            for old, new in zip(self.steady.inputs, self.inner.inputs, strict=True)
        ]
        back = [
            None if new == old else (old.shape, old.stride)
            for old, new in zip(self.steady.output_specs, self.inner.output_specs, strict=True)
        ]

        def call(inputs: Sequence[Any]) -> tuple[Any, ...]:
            turned = [t if v is None else t.as_strided(*v) for t, v in zip(inputs, forth, strict=True)]
            return tuple(o if v is None else o.as_strided(*v) for o, v in zip(run(turned), back, strict=True))

        return call

    def source(self, name: str) -> str:
        """Python that wraps the function `name` of the GEMM's tensors into one of the whole sub-graph's."""
        views = [f".as_strided({s.shape}, {s.stride})" for s in self.inner.inputs]
        if self.split is None:
            given, made = [f"inputs[{k}]" for k in range(len(views))], "()"
            text = ""
        else:
            kept, values = self.split.kept, len(self.split.prepare.outputs)
            given = [*(f"inputs[{k}]" for k in kept), *(f"prepared[{k}]" for k in range(values))]
            made = f"prepare({', '.join(f'inputs[{k}]' for k in self.split.sources)})"
            text = f"\n\n{to_source(self.split.prepare, 'prepare')}"
        arguments = ", ".join(g + v for g, v in zip(given, views, strict=True))
        back = ", ".join(
            f"outputs[{k}].as_strided({s.shape}, {s.stride})" for k, s in enumerate(self.steady.output_specs)
        )
        return f"""{text}

matrix_product, constants = {name}, []


def {name}(*inputs):
    if not constants:  # made once of the parameters
        constants.append({made})
    prepared = constants[0]
    outputs = matrix_product({arguments})
    return ({back},)
"""


def as_product(graph: Subgraph) -> Product | str:
    """The GEMM that a sub-graph is, or why it is none."""
    anchors = [op for op in graph.ops if op.name in convolution.CONVOLUTIONS]
    if len(anchors) != 1:
        return f"it holds {len(anchors)} convolutions, not one"
    while step := affine_batch_norm(graph):
        graph = step[1]
    split = constants.split(graph)
    steady = split.steady if split else graph
    gemm = _relabelled(steady)
    return gemm if isinstance(gemm, str) else Product(split, steady, gemm)


def _relabelled(graph: Subgraph) -> Subgraph | str:
    anchor = next((v, op) for v, op in numbered(graph) if op.name in convolution.CONVOLUTIONS)
    conv = convolution.read(graph, anchor[1])
    if conv is None or not conv.is_pointwise(graph):
        return "the convolution is not 1x1 with stride 1, no padding and one group"
    rank = conv.rank + 2
    first = len(graph.inputs)
    if conv.x >= first or conv.weight >= first or (conv.bias is not None and conv.bias >= first):
        return "an operand of the convolution is computed in the chain"
    weight = graph.tensor(conv.weight)
    inputs = [_turned(s) if len(s.shape) == rank else s for s in graph.inputs]
    channels = weight.shape[:2]
    if not _is_dense(weight):
        return "the weight has gaps in memory"
    inputs[conv.weight] = replace(weight, shape=channels, stride=(channels[1], 1))
    ops = []
    for value, op in numbered(graph):
        if not isinstance(op.out, TensorSpec):
            return f"{op.name} gives more than one tensor"
        if value == anchor[0]:
            bias = () if conv.bias is None else (Ref(conv.bias),)
            ops.append(Op("aten.linear.default", (Ref(conv.x), Ref(conv.weight), *bias), (), _turned(op.out)))
            continue
        shapes = [graph.tensor(i).shape for i in op.inputs]
        if op_class(op.target) != "pointwise" or op.name == "batch_norm":
            return f"{op.name} behind the convolution is not pointwise"
        if any(len(s) not in (0, rank) for s in shapes) or len(op.out.shape) != rank:
            return f"{op.name} takes an operand that is broadcast"
        ops.append(replace(op, out=_turned(op.out)))
    made = Subgraph(tuple(inputs), tuple(ops), graph.outputs)
    if not all(made.tensor(i).is_contiguous for i in (conv.x, *graph.outputs)):
        return "it is not in channels-last memory"
    return made


def _turned(spec: TensorSpec) -> TensorSpec:
    """[N, C, …] to [N, …, C]."""
    n, c, *rest = spec.shape
    first, channel, *strides = spec.stride
    return replace(spec, shape=(n, *rest, c), stride=(first, *strides, channel))


def _is_dense(weight: TensorSpec) -> bool:
    """Whether [out, in, 1, …] lies in memory as [out, in] does."""
    wanted = (weight.shape[1], 1)
    return math.prod(weight.shape[2:]) == 1 and all(
        n == 1 or s == w for n, s, w in zip(weight.shape, weight.stride, wanted, strict=False)
    )
