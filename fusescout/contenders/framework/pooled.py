"""Average pooling behind a 1x1 convolution, taken before it: the convolution then has that many pixels less.

Both are linear, and each looks at one dimension that the other leaves alone: channels here, pixels there. An average of
convolved pixels is more exact than a convolved average, though, which is rounded once before: in 16 bits and in strict
float32 that misses the accuracy rule. cuDNN's TF32 rounds weights alike either way, so there it holds.
"""

from __future__ import annotations

from dataclasses import replace

from fusescout import convolution
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.regions.pooled import is_plain_average


def pooled(graph: Subgraph) -> Step | None:
    """The first 1x1 convolution that only an average pooling without padding reads."""
    for value, op in numbered(graph):
        conv = convolution.read(graph, op)
        users = graph.users(value)
        pool = graph.op_of(users[0]) if len(users) == 1 and value not in graph.outputs else None
        if conv is None or pool is None or not conv.is_pointwise(graph) or not is_plain_average(pool.name, pool.args):
            continue
        x, out = graph.tensor(conv.x), graph.tensor(users[0])
        if pool.kwargs or out.requires_grad or (x.dtype, out.dtype) != ("float32", "float32"):
            continue
        smaller = like(x, (*x.shape[:2], *out.shape[2:]))
        new = [
            Op(pool.target, (Ref(conv.x), *pool.args[1:]), (), smaller),
            Op(op.target, (Ref(-1), *op.args[1:]), op.kwargs, out),
        ]
        return f"{pool.name} before convolution", splice(graph, {value, users[0]}, users[0], new)
    return None


def like(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a new tensor of this shape whose dimensions lie in memory in the order of `spec`'s."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (spec.stride[d], -d)):
        strides[dim] = step
        step *= shape[dim]
    return replace(spec, shape=shape, stride=tuple(strides), constant=False)
