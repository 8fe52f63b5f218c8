"""Binds a compiled kernel to tensors: what a call of a patched site costs the host is what happens here.

The Python of a call is generated for its kernel, one line for each thing that must happen: no loop, no look-up. It uses
the allocation and view functions that Inductor's generated code uses, which cost a third of torch's public ones.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from fusescout.contenders.base import Runner
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.template import Kernel

_fast: Any = getattr(torch._C._dynamo, "guards", None)


def bind(graph: Subgraph, kernel: Kernel, launch: Callable[..., None], device: Device) -> Runner:
    """The runner of a kernel: takes the sub-graph's inputs in order, gives new outputs exactly as specified."""
    return runner(straight(graph, kernel, launch, device), len(graph.outputs))


def runner(call: Callable[..., Any], outputs: int) -> Runner:
    """A `straight` function in the form that contenders have."""
    if outputs == 1:
        return lambda inputs: (call(*inputs),)
    return lambda inputs: call(*inputs)


def straight(graph: Subgraph, kernel: Kernel, launch: Callable[..., None], device: Device) -> Callable[..., Any]:
    """A function of the inputs as arguments that gives the output, or a tuple of several.

    It trusts its arguments: shapes, strides and dtypes must be the sub-graph's. Guards or `operators.py` see to that.

    Args:
        graph: what the kernel computes.
        kernel: says which tensor each of its parameters is, and in which shape it takes it.
        launch: runs the compiled kernel on its parameters' tensors.
        device: where it runs.
    """
    cuda = device.kind == "cuda"
    known: dict[str, Any] = {"launch": launch, "realigned": _realigned, "view": _view(), "empty": _empty(device.kind)}
    lines: list[str] = []
    read = [p.index for p in kernel.params if p.role == "input"]
    if cuda:
        # a number that eager takes from the host
        lines += [f"if not a{k}.is_cuda: a{k} = a{k}.cuda()" for k in read if not graph.inputs[k].shape]
        # vector loads need 16-byte addresses; where the captured tensor had one, a caller's later view may not
        lines += [f"if a{k}.data_ptr() & 15: a{k} = realigned(a{k})" for k in read if graph.inputs[k].aligned]
    for k, spec in enumerate(graph.output_specs):
        lines.append(f"o{k} = {_made(f'o{k}', spec, known)}")
    arguments: list[str] = []
    for p in kernel.params:
        name, spec = p.name, TensorSpec(p.shape, p.dtype, p.stride)
        if p.role == "scratch":
            name = f"s{len(lines)}"
            lines.append(f"{name} = {_made(name, spec, known)}")
        else:
            name = f"{'a' if p.role == 'input' else 'o'}{p.index}"
            own = graph.inputs[p.index] if p.role == "input" else graph.output_specs[p.index]
            if cuda and (p.shape, p.stride) != (own.shape, own.stride):  # a CPU kernel takes addresses only
                known |= {f"vs{len(arguments)}": p.shape, f"vt{len(arguments)}": p.stride}
                name = f"view({name}, vs{len(arguments)}, vt{len(arguments)}, 0)"
        arguments.append(name)
    outputs = ", ".join(f"o{k}" for k in range(len(graph.outputs)))
    lines += [f"launch({', '.join(arguments)})", f"return {outputs}"]
    return generated("call", len(graph.inputs), lines, known)


def generated(name: str, arguments: int, lines: Sequence[str], known: dict[str, Any]) -> Callable[..., Any]:
    """A Python function `name(a0, a1, …)` with these lines as its body, seeing `known` as its globals."""
    given = ", ".join(f"a{k}" for k in range(arguments))
    text = "\n    ".join([f"def {name}({given}):", *lines]) + "\n"
    file = f"<fusescout {name} {hash(text):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    known["__name__"] = __name__
    exec(compile(text, file, "exec"), known)
    return known[name]  # type: ignore[no-any-return]


def _made(name: str, spec: TensorSpec, known: dict[str, Any]) -> str:
    known |= {f"{name}_shape": spec.shape, f"{name}_stride": spec.stride, f"{name}_dtype": getattr(torch, spec.dtype)}
    return f"empty({name}_shape, {name}_stride, {name}_dtype)"


def _empty(kind: str) -> Callable[..., Any]:
    """Makes an uninitialised tensor of a shape, strides and dtype."""
    fast = getattr(_fast, f"_empty_strided_{kind}", None)
    if fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=kind)


def _view() -> Callable[..., Any]:
    """Sees a tensor's memory in another shape and strides, starting where it starts."""
    fast = getattr(_fast, "_reinterpret_tensor", None)
    return fast or (lambda tensor, shape, stride, _: tensor.as_strided(shape, stride))


def _realigned(tensor: Any) -> Any:
    """The same values and strides at a fresh address."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
