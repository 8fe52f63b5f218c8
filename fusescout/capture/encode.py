"""Write a captured graph down as plain data: operators, constants, shapes, where each node came from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from fusescout import ir
from fusescout.hoisting import CONTENT
from fusescout.hoisting import MARK
from fusescout.hoisting import STATIC
from fusescout.hoisting import TABLE
from fusescout.liveness import dead

WRITES_WHEN_TRAINING = {"batch_norm": 5, "instance_norm": 5}
"""Operators that write running statistics though their schema doesn't say so, and the place of the flag."""


def spec_of(tensor: Tensor) -> ir.TensorSpec:
    """Static facts of a tensor. A fake tensor's memory counts as aligned, so only its offset in it decides."""
    return ir.TensorSpec(
        shape=tuple(int(n) for n in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stride=tuple(int(n) for n in tensor.stride()) if tensor.layout == torch.strided else (0,) * tensor.dim(),
        requires_grad=tensor.requires_grad,
        aligned=_address(tensor) % 16 == 0,
    )


def _address(tensor: Tensor) -> int:
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size() if tensor.layout == torch.strided else 0
    return tensor.data_ptr()


def encode_graph(
    gm: fx.GraphModule,
    index: int,
    inputs: tuple[Any, ...] = (),
    modules: Mapping[int, str] | None = None,
) -> ir.Graph:
    """Plain-data form of a module made by `to_aten`.

    Args:
        gm: the ATen module.
        index: its number among the captured graphs.
        inputs: real inputs, where known: they tell which addresses are aligned.
        modules: `id(module)` → fully qualified name, for exact module paths.
    """
    real = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=False))
    nodes: list[ir.Node] = []
    outputs: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "output":
            outputs += _names(node.args)
            continue
        nodes.append(
            ir.Node(
                name=node.name,
                target=target_name(node),
                args=() if node.op == "placeholder" else _args(node),
                kwargs=tuple((k, encode_arg(v)) for k, v in node.kwargs.items()),
                out=_told(_out(real[node]) if node in real else _out(node.meta.get("val")), node),
                module=module_path(node.meta, modules or {}),
                source=source_line(node.meta),
                mutates=writes(node),
                is_parameter=_is_parameter(node),
            )
        )
    idle = dead(nodes, outputs)
    return ir.Graph(index, tuple(replace(n, dead=n.name in idle) for n in nodes), tuple(outputs))


def _told(out: ir.Out, node: fx.Node) -> ir.Out:
    """The facts with what is known of the values."""
    return replace(out, content=node.meta.get(CONTENT, "")) if isinstance(out, ir.TensorSpec) else out


def _is_parameter(node: fx.Node) -> bool:
    """A parameter, a buffer, or what is made of them alone, at sizes that they alone decide."""
    return (STATIC in node.meta.get("tensor_dict", {}) and TABLE not in node.meta) or bool(node.meta.get(MARK))


def target_name(node: fx.Node) -> str:
    """ "input", "attr", "getitem", "aten.linear.default", or the qualified name of anything else."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "attr"
    if isinstance(node.target, (OpOverload, str)):
        return str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return f"higher_order.{node.target}"
    name = str(getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", repr(node.target)))
    module = str(getattr(node.target, "__module__", None) or "")
    return name if module in ("_operator", "builtins") else f"{module}.{name}".lstrip(".")


def encode_arg(value: Any) -> ir.Arg:
    """One argument as plain data; anything unknown is kept as its text, so that no graph is lost to it."""
    if isinstance(value, fx.Node):
        return ir.Ref(value.name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(encode_arg(v) for v in value)
    if isinstance(value, torch.dtype):
        return ir.Const("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ir.Const("device", str(value))
    if isinstance(value, torch.layout):
        return ir.Const("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return ir.Const("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, complex):
        return ir.Const("complex", repr(value))
    if isinstance(value, dict):
        return tuple((str(k), encode_arg(v)) for k, v in value.items())
    return ir.Const("object", repr(value))


def writes(node: fx.Node) -> bool:
    """Whether running the node changes one of its arguments or a global state."""
    target = node.target
    if isinstance(target, OpOverload):
        flag = WRITES_WHEN_TRAINING.get(target._schema.name.removeprefix("aten::"))
        training = flag is not None and node.args[3] is not None and bool(node.args[flag])
        return training or any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments)
    if isinstance(target, HigherOrderOperator):
        bodies = [
            getattr(node.graph.owning_module, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"
        ]
        return any(writes(n) for b in bodies if isinstance(b, fx.GraphModule) for n in b.graph.nodes)
    return node.op == "call_function" and target_name(node) != "getitem"


def module_path(meta: Mapping[str, Any], modules: Mapping[int, str]) -> str:
    """Fully qualified name of the innermost module the node ran in, "" for the root."""
    for key, (path, _) in reversed(list((meta.get("nn_module_stack") or {}).items())):
        number = str(key).partition("@")[0]
        if number.isdigit() and int(number) in modules:
            return modules[int(number)]
        return normalise(path)
    return ""


def normalise(path: str) -> str:
    """ "L['self']._modules['blocks']._modules['0'].fc" → "blocks.0.fc"."""
    path = re.sub(r"\._modules\[(['\"])(.*?)\1\]", r".\2", path)
    path = re.sub(r"^[LG]\[(['\"]).*?\1\]|^self\b", "", path)
    path = re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", path)
    path = re.sub(r"\._?orig_mod\b|@\d+", "", path)
    return re.sub(r"\.+", ".", path).strip(".")


def source_line(meta: Mapping[str, Any]) -> str:
    """ "model.py:12 x = self.fc(x)" of the innermost frame."""
    frames = re.findall(r'File "(.*?)", line (\d+), in .*?\n\s*(.*)', meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{shorten(file)}:{line} {code.strip()}"


def shorten(file: str) -> str:
    """A path as people say it: relative to here, or to the package folder it is installed in."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here) if file.startswith(here) else file.rpartition("site-packages/")[2]


def _args(node: fx.Node) -> tuple[ir.Arg, ...]:
    if node.op == "get_attr":
        return (str(node.target),)
    return tuple(encode_arg(a) for a in node.args)


def _out(value: Any) -> ir.Out:
    if isinstance(value, Tensor):
        return spec_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(v) if isinstance(v, Tensor) else None for v in value)
    return None


def _names(arg: Any) -> list[str]:
    return [str(name) for name in ir.refs(encode_arg(arg))]
