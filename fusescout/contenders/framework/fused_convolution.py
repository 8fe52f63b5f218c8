"""Convolution with bias, residual and activation as one call into the library: cuDNN on CUDA, oneDNN on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusescout import convolution
from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import numbered
from fusescout.contenders.framework.surgery import splice
from fusescout.convolution import Convolution
from fusescout.ir import Const
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows a convolution. `other` is added before the activation."""

    conv: int
    op: Op
    read: Convolution
    members: frozenset[int]
    other: int | None


def cudnn_convolution(graph: Subgraph) -> Step | None:
    """2-D and 3-D convolution, an optional residual, relu: `cudnn_convolution_relu` or `cudnn_convolution_add_relu`."""
    for index, op in numbered(graph):
        if op.name != "relu":
            continue
        tail = _tail(graph, op.inputs[0], (index,))
        if tail is None or tail.read.transposed or tail.read.rank == 1:
            continue
        out, conv = graph.tensor(index), tail.read
        new: list[Op] = []
        if conv.bias is None:  # cuDNN's operator would make zeros in every call; here they are made once
            new.append(_zeros(graph, conv, out))
        bias = Ref(-1) if conv.bias is None else Ref(conv.bias)
        settings = (bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        name = "cudnn_convolution_relu" if tail.other is None else "cudnn_convolution_add_relu"
        residual: tuple[Any, ...] = () if tail.other is None else (Ref(tail.other), 1.0)
        args = (Ref(conv.x), Ref(conv.weight), *residual, *settings)
        new.append(Op(f"aten.{name}.default", args, (), out))
        return name, splice(graph, set(tail.members), index, new)
    return None


def _zeros(graph: Subgraph, conv: Convolution, out: TensorSpec) -> Op:
    """A zero bias, made of the weight so that it counts as a constant where that is one."""
    shape, dtype = (out.shape[1],), Const("dtype", out.dtype)
    return Op(
        "aten.new_zeros.default", (Ref(conv.weight), shape), (("dtype", dtype),), TensorSpec(shape, out.dtype, (1,))
    )


def onednn_convolution(graph: Subgraph) -> Step | None:
    """2-D convolution in fp32, an optional residual, an activation: oneDNN's fused operator, as Inductor calls it."""
    for index, op in numbered(graph):
        activation = _onednn_activation(op)
        tail = _tail(graph, op.inputs[0], (index,)) if activation else _sum(graph, index)
        if tail is None or tail.read.transposed or tail.read.rank != 2:
            continue
        out, conv = graph.tensor(index), tail.read
        if out.dtype != "float32":
            continue
        name, scalars, algorithm = activation or ("none", (), "none")
        bias = None if conv.bias is None else Ref(conv.bias)
        settings = (bias, conv.padding, conv.stride, conv.dilation, conv.groups)
        if tail.other is None:
            args: tuple[Any, ...] = (Ref(conv.x), Ref(conv.weight), *settings, name, scalars, algorithm)
            new = Op("mkldnn._convolution_pointwise.default", args, (), out)
        else:
            if activation:  # it has a residual with relu only
                continue
            args = (Ref(conv.x), Ref(tail.other), Ref(conv.weight), *settings, "add", 1.0, None, (), None)
            new = Op("mkldnn._convolution_pointwise.binary", args, (), out)
        return "mkldnn._convolution_pointwise", splice(graph, set(tail.members), index, [new])
    return None


def _onednn_activation(op: Op) -> tuple[str, tuple[float, ...], str] | None:
    """Name, numbers and algorithm by which oneDNN knows an activation.

    Its relu, hardtanh and hardsigmoid turn NaN into a number, which eager's don't.
    """
    match op.name:
        case "sigmoid" | "tanh" | "hardswish":
            return op.name, (), "none"
        case "silu":
            return "swish", (), "none"
        case "gelu":
            return "gelu", (), str(op.kwarg("approximate", "none"))
        case _:
            return None


def _tail(graph: Subgraph, value: int, members: tuple[int, ...]) -> _Tail | None:
    """A convolution, or one plus a tensor of its shape, that ends in `value` and is read by nobody else."""
    if graph.users(value) != members[-1:] or value in graph.outputs:
        return None
    plain = _plain(graph, value, frozenset(members))
    return plain or _sum(graph, value, members)


def _sum(graph: Subgraph, value: int, members: tuple[int, ...] = ()) -> _Tail | None:
    add = graph.op_of(value)
    if add is None or add.name != "add" or add.kwargs or len(add.inputs) != 2 or len(add.args) != 2:
        return None
    for conv, other in (add.inputs, tuple(reversed(add.inputs))):
        spec, out = graph.value(other), graph.tensor(value)
        if graph.users(conv) != (value,) or conv in graph.outputs or not isinstance(spec, TensorSpec):
            continue
        if (spec.shape, spec.dtype) != (out.shape, out.dtype):
            continue
        found = _plain(graph, conv, frozenset((*members, value)))
        if found:
            return _Tail(found.conv, found.op, found.read, found.members, other)
    return None


def _plain(graph: Subgraph, value: int, members: frozenset[int]) -> _Tail | None:
    op = graph.op_of(value)
    conv = convolution.read(graph, op) if op else None
    if op is None or conv is None or graph.tensor(value).requires_grad:
        return None
    return _Tail(value, op, conv, members | {value}, None)
