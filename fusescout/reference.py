"""Turn a sub-graph back into code: the one definition of what it computes, for eager, for truth and for repro scripts.

`build` executes exactly the text that `to_source` shows, so a script carries the same reference the race was run with.

Of a sub-graph in 16 bits there is a form that rounds less than eager, as fused code does (`UNROUNDED`): contractions
read and give 16 bits, as the library's kernels do, and everything between them is float32. The bias of a convolution
is added in float32: cuDNN's kernels leave it to an addition, which rounds once more in eager and not in fused code.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusescout import ir
from fusescout.capture.encode import spec_of
from fusescout.convolution import BIAS
from fusescout.convolution import CONVOLUTIONS
from fusescout.flops import op_class
from fusescout.scaled import spelled_out

__all__ = ["UNROUNDED", "build", "make_inputs_source", "spec_of", "to_source"]

UNROUNDED = "unrounded"
"""Override that keeps 16-bit values in float32 between contractions."""
HALVES = frozenset({"float16", "bfloat16"})
CONTRACTIONS = frozenset({"conv", "gemm", "attention", "rnn"})
"""Kinds of operator that read and give rounded numbers whatever is around them."""

BIT_CASTS = frozenset({"aten.view.dtype"})
FLOATS = ir.FLOATS | ir.FLOAT8
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
COMPLEX = {"float64": "complex128", "float32": "complex64"}


def build(subgraph: ir.Subgraph, dtype_override: str | None = None) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """A function that runs the sub-graph's ATen operators.

    Args:
        subgraph: what to compute.
        dtype_override: compute in this floating dtype instead, inputs, casts and constants included: "float64" gives
            the truth, which no intermediate cast rounds. Integers and booleans stay what they are. `UNROUNDED` gives
            the form in which only contractions and the outputs are rounded to 16 bits.

    Returns:
        A function from the inputs in order to the outputs in order. It frees intermediates as eager does.

    Raises:
        ValueError: an operator that can't be run this way (not an overload, or it reinterprets bits under an override).
    """
    text = to_source(subgraph, dtype_override=dtype_override, free=True)
    file = f"<fusescout reference {subgraph.key[:12]} {dtype_override or 'as captured'}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"torch": torch, "ops": torch.ops}
    exec(compile(text, file, "exec"), scope)
    function = scope["reference"]
    return lambda inputs: function(*inputs)


def to_source(
    subgraph: ir.Subgraph, name: str = "reference", *, dtype_override: str | None = None, free: bool = False
) -> str:
    """Python source of the sub-graph as one function `name(x0, x1, …) -> tuple`; it needs `import torch`.

    Args:
        subgraph: what to compute.
        name: the function's name.
        dtype_override: as for `build`.
        free: delete each intermediate after its last use.
    """
    if dtype_override not in (None, UNROUNDED):
        subgraph = spelled_out(subgraph)
    names = [f"x{k}" for k in range(len(subgraph.inputs))]
    names += [f"v{len(names) + k}" for k in range(len(subgraph.ops))]
    lines = [f"def {name}({', '.join(names[: len(subgraph.inputs)])}):"]
    last = {i: k for k, op in enumerate(subgraph.ops) for i in op.inputs}
    if dtype_override is not None:
        for k, spec in enumerate(subgraph.inputs):
            if (dtype := _override(spec.dtype, dtype_override)) != spec.dtype:
                lines.append(f"    x{k} = x{k}.to(torch.{dtype})  # {spec}")
    for k, op in enumerate(subgraph.ops):
        index = len(subgraph.inputs) + k
        if dtype_override == UNROUNDED and op_class(op.target) in CONTRACTIONS:
            call = _rounded(op, names, subgraph)
        else:
            call = _call(op, _promoted(op, names, subgraph, dtype_override), dtype_override)
        lines.append(f"    {names[index]} = {call}  # {_describe(op.out)}")
        if dtype_override is not None and (made := _factory_dtype(op, dtype_override)):
            lines.append(f"    {names[index]} = {names[index]}.to(torch.{made})")
        dead = [
            names[i] for i, at in last.items() if at == k and i >= len(subgraph.inputs) and i not in subgraph.outputs
        ]
        if free and dead:
            lines.append(f"    del {', '.join(dead)}")
    returned = "".join(f"{_output(subgraph, i, names[i], dtype_override)}, " for i in subgraph.outputs)
    lines.append(f"    return ({returned.removesuffix(' ')})")
    return "\n".join(lines) + "\n"


def make_inputs_source(subgraph: ir.Subgraph, name: str = "make_inputs") -> str:
    """Python source of `name(device, seed=0) -> list`: random inputs with the captured shapes, strides and dtypes.

    Integer inputs stay below the smallest size they can index, so that an embedding or gather finds its rows, and the
    variances of a batch norm are positive.
    """
    norms = [op for op in subgraph.ops if op.name == "batch_norm"]
    variances = {int(op.args[4].to) for op in norms if isinstance(op.args[4], ir.Ref)}
    lines = [
        f'def {name}(device="cuda", seed=0):',
        "    generator = torch.Generator(device).manual_seed(seed)",
        "    inputs = []",
    ]
    for k, spec in enumerate(subgraph.inputs):
        extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) if spec.numel else 0
        skip = 0 if spec.aligned else 1
        size, place = f"({skip + extent},)", "generator=generator, device=device"
        if spec.content:
            order = {ir.LOWER: "tril()", ir.UPPER: "triu(1)"}[spec.content]
            lines.append(f"    mask = torch.ones({spec.shape[-2:]}, dtype=torch.bool, device=device).{order}")
            distinct = tuple(1 if s == 0 else n for n, s in zip(spec.shape, spec.stride, strict=True))
            kept = f"torch.empty_strided({distinct}, {spec.stride}, dtype=torch.bool, device=device)"
            lines.append(f"    inputs.append({kept}.copy_(mask).expand({spec.shape}))")
            continue
        if spec.dtype == "bool":
            flat = f"torch.randint(0, 2, {size}, {place}).bool()"
        elif spec.dtype in FLOATS:
            flat = f"torch.randn({size}, {place}){'.abs()' if k in variances else ''}.to(torch.{spec.dtype})"
        elif spec.dtype.startswith("complex"):
            flat = f"torch.randn({size}, {place}, dtype=torch.{spec.dtype})"
        else:
            flat = f"torch.randint(0, {_index_limit(subgraph, k)}, {size}, {place}).to(torch.{spec.dtype})"
        grad = ".requires_grad_()" if spec.requires_grad else ""
        lines.append(f"    inputs.append({flat}.as_strided({spec.shape}, {spec.stride}, {skip}){grad})")
    return "\n".join([*lines, "    return inputs"]) + "\n"


def _call(op: ir.Op, names: list[str], override: str | None) -> str:
    args = [_literal(a, names, override) for a in op.args]
    if op.target == "getitem":
        return f"{args[0]}[{args[1]}]"
    if op.target.count(".") != 2 or op.target.startswith("higher_order."):
        raise ValueError(f"{op.target} is not an operator overload and can't be run on its own")
    if override is not None and op.target in BIT_CASTS:
        raise ValueError(f"{op.target} reinterprets bits, so it has no {override} version")
    namespace, packet, overload = op.target.split(".")
    resolve(op.target)
    args += [f"{k}={_literal(v, names, override)}" for k, v in op.kwargs]
    return f"torch.ops.{namespace}.{packet}.{overload}({', '.join(args)})"


def _rounded(op: ir.Op, names: list[str], subgraph: ir.Subgraph) -> str:
    """The call of a contraction that reads its operands as captured and whose result is float32 from there on."""
    read = list(names)
    for i in op.inputs:
        if (dtype := _dtype(subgraph, i)) in HALVES:
            read[i] = f"{names[i]}.to(torch.{dtype})"
    if not isinstance(op.out, ir.TensorSpec):
        halves = "(torch.float16, torch.bfloat16)"
        return f"[v.float() if getattr(v, 'dtype', None) in {halves} else v for v in {_call(op, read, None)}]"
    if op.out.dtype not in HALVES:
        return _call(op, read, None)
    bias = op.kwarg("bias", op.args[BIAS] if len(op.args) > BIAS else None)
    if op.name not in CONVOLUTIONS or not isinstance(bias, ir.Ref):
        return f"{_call(op, read, None)}.float()"
    args = tuple(None if k == BIAS else a for k, a in enumerate(op.args))
    bare = ir.Op(op.target, args, tuple((k, v) for k, v in op.kwargs if k != "bias"), op.out)
    rank = len(subgraph.tensor(op.inputs[1]).shape) - 2
    return f"{_call(bare, read, None)}.float().add_({names[int(bias.to)]}.view(-1{', 1' * rank}))"


def _output(subgraph: ir.Subgraph, index: int, name: str, override: str | None) -> str:
    dtype = _dtype(subgraph, index)
    return f"{name}.to(torch.{dtype})" if override == UNROUNDED and dtype in HALVES else name


def _dtype(subgraph: ir.Subgraph, index: int) -> str | None:
    spec = subgraph.value(index)
    return spec.dtype if isinstance(spec, ir.TensorSpec) else None


def resolve(target: str) -> Any:
    """The operator overload named `target`.

    Raises:
        ValueError: this torch has no such operator.
    """
    try:
        namespace, packet, overload = target.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"there is no operator {target} in torch {torch.__version__}") from error


def _literal(arg: Any, names: list[str], override: str | None) -> str:
    if isinstance(arg, ir.Ref):
        return names[int(arg.to)]
    if isinstance(arg, tuple):
        return f"[{', '.join(_literal(a, names, override) for a in arg)}]"
    if isinstance(arg, float):
        return repr(arg) if abs(arg) < float("inf") else f'float("{arg}")'
    if not isinstance(arg, ir.Const):
        return repr(arg)
    match arg.kind:
        case "dtype":
            return f"torch.{_override(arg.value, override)}"
        case "device":
            return f'torch.device("{arg.value}")'
        case "layout" | "memory_format":
            return f"torch.{arg.value}"
        case "complex":
            return f"complex({arg.value!r})"
    raise ValueError(f"a {arg.kind} argument ({arg.value}) can't be written as source")


def _override(dtype: str, override: str | None) -> str:
    if override is None:
        return dtype
    if override == UNROUNDED:
        return "float32" if dtype in HALVES else dtype
    if dtype in FLOATS:
        return override
    return COMPLEX.get(override, dtype) if dtype.startswith("complex") else dtype


def _promoted(op: ir.Op, names: list[str], subgraph: ir.Subgraph, override: str | None) -> list[str]:
    """Names of the values as `op` reads them: integers of which it makes floats would be promoted to float32 only."""
    if override in (None, UNROUNDED) or not isinstance(op.out, ir.TensorSpec) or op.out.dtype not in FLOATS:
        return names
    integers = [i for i in op.inputs if _is_tensor(subgraph, i) and subgraph.tensor(i).dtype in INTEGERS]
    if len(integers) < len(op.inputs):  # another operand, such as an embedding's table, decides
        return names
    return [f"{n}.to(torch.{override})" if i in integers else n for i, n in enumerate(names)]


def _factory_dtype(op: ir.Op, override: str) -> str | None:
    """What an operator without tensor inputs makes in the default dtype still has to be cast to."""
    if op.inputs or not isinstance(op.out, ir.TensorSpec):
        return None
    dtype = _override(op.out.dtype, override)
    return dtype if dtype != op.out.dtype else None


def _describe(out: ir.Out) -> str:
    return f"({', '.join(map(str, out))})" if isinstance(out, tuple) else str(out)


def _index_limit(subgraph: ir.Subgraph, index: int) -> int:
    """One more than the largest value that integer input `index` may hold."""
    limits = [2]
    for user in subgraph.users(index):
        op = subgraph.op_of(user)
        sizes = [subgraph.tensor(i).shape for i in op.inputs if i != index and _is_tensor(subgraph, i)] if op else []
        if op and op.name in ("embedding", "index_select", "gather", "index", "nll_loss", "cross_entropy_loss"):
            limits += [max(1, min(n for n in shape)) for shape in sizes if shape][:1]
            limits = limits[1:] or limits
    return min(limits)


def _is_tensor(subgraph: ir.Subgraph, index: int) -> bool:
    return isinstance(subgraph.value(index), ir.TensorSpec)
