"""Registers fused chains as operators in `torch.ops.fusescout`, with fake and autograd.

`Library.impl` is used rather than `custom_op`: it costs 13 µs a call against 21 µs (H200 host, torch 2.11). The
backward recomputes the captured sub-graph with the framework's operators, so gradients are eager's own.

An operator checks its arguments, for anyone may call it. A patched graph that runs as it is calls `direct` functions,
which don't: Dynamo's guards have fixed every shape, stride and dtype in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from fusescout import reference
from fusescout.capture.autocast import state
from fusescout.contenders.binding import generated
from fusescout.errors import OperatorMisused
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec

Call = Callable[..., Any]
_library: Any = torch.library.Library("fusescout", "FRAGMENT")  # type: ignore[no-untyped-call]
_calls: dict[str, Call] = {}
_graphs: dict[str, Subgraph] = {}
_lock = threading.Lock()


def define(
    name: str,
    subgraph: Subgraph,
    run: Callable[[Sequence[Any]], tuple[Any, ...]],
    device_kind: str,
    call: Call | None = None,
) -> Any:
    """Register `run` as `torch.ops.fusescout.<name>` and give the overload; a second call replaces the runner.

    Args:
        name: a valid operator name, unique for (sub-graph, contender, variant).
        subgraph: what it computes; gives schema, fake results and gradients.
        run: takes the inputs, gives new output tensors.
        device_kind: "cpu" or "cuda".
        call: the same with the inputs as arguments and a single output by itself, where the contender has that.
    """
    with _lock:
        known = name in _calls
        _calls[name] = call or _unpacked(run, len(subgraph.outputs))
        _graphs[name] = subgraph
        if not known:
            _register(name, subgraph, device_kind)
    return getattr(torch.ops.fusescout, name).default


def direct(operator: Any) -> Call | None:
    """What an operator of ours runs, without torch's dispatcher and without checks; None where gradients may be asked.

    It may stand only where shapes, strides, dtypes and devices are known to be those of the sub-graph.
    """
    name = str(operator).removeprefix("fusescout.").removesuffix(".default")
    if getattr(operator, "namespace", "") != "fusescout" or name not in _calls:
        return None
    return None if any(spec.requires_grad for spec in _graphs[name].output_specs) else _calls[name]


def _unpacked(run: Callable[[Sequence[Any]], tuple[Any, ...]], outputs: int) -> Call:
    return (lambda *inputs: run(inputs)[0]) if outputs == 1 else (lambda *inputs: run(inputs))


def _register(name: str, subgraph: Subgraph, device_kind: str) -> None:
    arguments = ", ".join(f"Tensor a{k}" for k in range(len(subgraph.inputs)))
    single = len(subgraph.outputs) == 1
    result = "Tensor" if single else "(" + ", ".join("Tensor" for _ in subgraph.outputs) + ")"
    _library.define(f"{name}({arguments}) -> {result}")
    _library.impl(name, _checked(name, subgraph), device_kind.upper())

    def fake(*inputs: torch.Tensor) -> Any:
        made = tuple(
            inputs[0].new_empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype))
            for spec in subgraph.output_specs
        )
        return made[0] if single else made

    torch.library.register_fake(f"fusescout::{name}", fake, lib=_library)
    if any(spec.requires_grad for spec in subgraph.output_specs):
        _register_backward(name, subgraph)


def _checked(name: str, subgraph: Subgraph) -> Call:
    """The operator's implementation: a kernel would read and write wherever a wrong shape leads it."""
    known: dict[str, Any] = {"calls": _calls, "fitted": lambda *inputs: _calls[name](*_fitted(name, inputs))}
    tests = []
    for k, spec in enumerate(subgraph.inputs):
        known |= {f"s{k}": spec.shape, f"t{k}": spec.stride, f"d{k}": getattr(torch, spec.dtype)}
        tests.append(f"a{k}.dtype is d{k} and a{k}.shape == s{k} and a{k}.stride() == t{k}")
    given = ", ".join(f"a{k}" for k in range(len(tests)))
    lines = [f"if {' and '.join(tests)}:", f"    return calls[{name!r}]({given})", f"return fitted({given})"]
    return generated(name, len(tests), lines, known)


def _fitted(name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs in the strides that the kernel was built for; what differs in more than strides is refused."""
    fitting = []
    for k, (given, spec) in enumerate(zip(inputs, _graphs[name].inputs, strict=True)):
        alike = str(given.dtype) == f"torch.{spec.dtype}" and tuple(given.shape) == spec.shape
        strides = [(old, new) for n, old, new in zip(given.shape, given.stride(), spec.stride, strict=False) if n != 1]
        if not alike or any(new == 0 != old for old, new in strides):  # the kernel would read one element for many
            what = TensorSpec(tuple(given.shape), str(given.dtype).removeprefix("torch."), given.stride())
            raise OperatorMisused(name, k, str(spec), str(what))
        if any(old != new for old, new in strides):
            made = torch.empty_strided(spec.shape, spec.stride, dtype=given.dtype, device=given.device)
            given = made.copy_(given)
        fitting.append(given)
    return fitting


def _register_backward(name: str, subgraph: Subgraph) -> None:
    recompute = reference.build(subgraph)

    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)  # a parameter that eager gives no gradient must not get zeros: AdamW decays it
        outputs = output if isinstance(output, tuple) else (output,)
        constant = [o for o, spec in zip(outputs, subgraph.output_specs, strict=True) if not spec.requires_grad]
        ctx.mark_non_differentiable(*constant)

    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = [k for k in range(len(subgraph.inputs)) if ctx.needs_input_grad[k]]
        twice = torch.is_grad_enabled()  # create_graph=True: gradients of these gradients will be asked for
        with torch.enable_grad(), state({}):  # casts of autocast are in the sub-graph already
            inputs = [
                x.view_as(x) if twice and k in wanted else x.detach().requires_grad_(k in wanted)
                for k, x in enumerate(ctx.saved_tensors)
            ]
            outputs = recompute(inputs)
            pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None and o.requires_grad]
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [inputs[k] for k in wanted],
                [g for _, g in pairs],
                allow_unused=True,
                create_graph=twice,
            )
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        for k, gradient in zip(wanted, found, strict=True):
            gradients[k] = gradient
        return tuple(gradients)

    torch.library.register_autograd(f"fusescout::{name}", backward, setup_context=setup_context, lib=_library)
