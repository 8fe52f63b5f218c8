"""What a workload must satisfy before anything is measured: it has values, they are finite, and one call computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

from fusescout.errors import AlreadyCompiled
from fusescout.errors import ModelEmpty
from fusescout.errors import ModelHasNaN
from fusescout.errors import NoModelFound
from fusescout.errors import UsageProblem
from fusescout.nest import tensors
from fusescout.usercode import user_code

if TYPE_CHECKING:
    import torch

    from fusescout.workload import Workload


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    from torch.nn.parameter import is_lazy

    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            yield name, parameter, True
    for name, buffer in model.named_buffers():
        if not is_lazy(buffer):
            yield name, buffer, False


def check_model(model: Any, args: Any) -> None:
    """Raise `UsageProblem` for what is no model or no tuple, `AlreadyCompiled` where a call would not be eager's."""
    import torch

    call = "Give a model and the arguments of one call: fusescout.analyze(model, (x,))."
    if not isinstance(model, torch.nn.Module):
        given = type(model).__name__
        raise UsageProblem("There is no model to analyse.", f"{given} is no torch.nn.Module.", call)
    if isinstance(args, torch.Tensor):
        raise UsageProblem("args must be a tuple.", "A tensor would be taken apart along its first dimension.", call)
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None:
            raise AlreadyCompiled(f"Its module {name}" if name else "The model")


def check_materialised(model: torch.nn.Module, name: str) -> None:
    """Raise `NoModelFound` where a parameter or buffer is on the meta device."""
    for key, value, _ in _named(model):
        if value.is_meta:
            raise NoModelFound(name, f"{key} is on the meta device: it has no values.", "Load the weights first.")


def check_finite(workload: Workload) -> None:
    """Raise `ModelHasNaN` for NaN or inf in a parameter, or NaN in a buffer or an input."""
    import torch

    for name, value, is_parameter in _named(workload.model):
        if not (value.is_floating_point() or value.is_complex()) or value.element_size() < 2:
            continue
        if value.sum().isfinite():
            continue  # one pass, and no copy: 0.5 s less for 30 M parameters; a sum may overflow, so only this is final
        if value.isnan().any():
            raise ModelHasNaN(f"{'Parameter' if is_parameter else 'Buffer'} {name}", "NaN")
        # A buffer may hold -inf: attention masks do.
        if is_parameter and value.isinf().any():
            raise ModelHasNaN(f"Parameter {name}", "inf")
    for value in tensors((workload.args, workload.kwargs)):
        checkable = value.layout is torch.strided and value.is_floating_point() and value.element_size() > 1
        if checkable and value.isnan().any():
            raise ModelHasNaN(f"An input of shape {list(value.shape)}", "NaN")


def check_call(workload: Workload) -> None:
    """Run one real forward call (in training the loss too); RNG and buffers are put back.

    Raises:
        UserCodeRaised: it raised; quotes the exception and the inputs.
        ModelEmpty: it gives no tensor, or runs no operator.
        UsageProblem: in training, nothing would get a gradient.
    """
    given = "; ".join(workload.inputs) or "no inputs"
    fix = f"forward() was called with {given}. Run the model alone first; make its inputs fit."
    with _untouched(workload), user_code(f"The model in {workload.name} raised when it was called.", fix):
        output = workload.call()
        found = list(tensors(output))
        if not found:
            raise ModelEmpty(workload.name, f"forward() returned {type(output).__name__}, which holds no tensor.")
        outside = {id(t) for t in tensors((workload.args, workload.kwargs))} | {
            id(v) for _, v, _ in _named(workload.model)
        }
        if all(id(t) in outside for t in found) and not _operators(workload):
            raise ModelEmpty(workload.name, "forward() runs no operator: it returns what it was given.")
        if workload.mode == "training" and not workload.loss_of(output).requires_grad:
            raise UsageProblem(
                f"There is nothing to train in {workload.name}.",
                "The loss depends on no parameter that requires a gradient.",
                "Unfreeze a parameter, or use --mode inference.",
            )


def _operators(workload: Workload) -> int:
    """How many operators one call runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ran = []

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        workload.call()
    return len(ran)


@contextlib.contextmanager
def _untouched(workload: Workload) -> Iterator[None]:
    """Run something and put RNG and buffers back: batch norm counts calls, caches fill."""
    import torch
    from torch.nn.parameter import is_lazy

    kept = [
        (module, name, buffer, buffer.clone())
        for module in workload.model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    index = [torch.device(workload.device).index or 0] if workload.device.startswith("cuda") else []
    try:
        with torch.random.fork_rng(index):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
