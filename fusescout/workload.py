"""A model with the inputs of one call: what every stage after loading works on.

`build` puts a model and its inputs on a device and into a dtype, then proves with one real forward call that they fit
together and compute something. torch is imported inside the functions, so that the command line starts without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from fusescout.admission import check_call
from fusescout.admission import check_finite
from fusescout.admission import check_materialised
from fusescout.admission import check_model
from fusescout.environment import require_torch
from fusescout.errors import DeviceUnavailable
from fusescout.errors import UsageProblem
from fusescout.nest import convert
from fusescout.nest import tensors
from fusescout.session import WorkloadInfo
from fusescout.usercode import user_code

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Workload:
    """One call of a model.

    Attributes:
        model: the user's module, on `device`, in eval() or train() as `mode` says.
        args, kwargs: what forward() gets.
        mode: "inference" or "training".
        device: "cpu", "cuda:0", …
        dtype: name of the model's floating dtype ("float32").
        name: the target as the user wrote it.
        loss: makes a scalar of the output, in training; None is the default of `loss_of`.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: str = "inference"
    device: str = "cpu"
    dtype: str = "float32"
    name: str = ""
    loss: Callable[[Any], torch.Tensor] | None = None

    @property
    def inputs(self) -> list[str]:
        """Name, dtype and shape of every input, such as "x: float32[8,16]"."""
        try:
            known = list(inspect.signature(self.model.forward).parameters)
        except (TypeError, ValueError):
            known = []
        positional = (known[i] if i < len(known) else f"[{i}]" for i in range(len(self.args)))
        names = [*positional, *self.kwargs]
        values = [*self.args, *self.kwargs.values()]
        return [f"{name}: {_shape(value)}" for name, value in zip(names, values, strict=True)]

    def info(self, command: str = "") -> WorkloadInfo:
        """What reports say about it."""
        return WorkloadInfo(
            target=self.name,
            model=type(self.model).__name__,
            mode=self.mode,
            device=self.device,
            dtype=self.dtype,
            inputs=self.inputs,
            parameters=sum(p.numel() for p in self.model.parameters()),
            command=command,
        )

    def call(self) -> Any:
        """Run the model once: without gradients in inference, with them in training. Gives its output."""
        import torch

        with torch.set_grad_enabled(self.mode == "training"):
            return self.model(*self.args, **self.kwargs)

    def loss_of(self, output: Any) -> torch.Tensor:
        """The scalar that training differentiates.

        It is the user's `loss(output)`, else `output.loss` where the model computes one itself, else the sum of the
        means of all floating outputs.

        Raises:
            UsageProblem: there is no floating output to make one of.
        """
        import torch

        if self.loss is not None:
            return self.loss(output)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor) and own.numel() == 1:
            return own.reshape(())
        floating = [t.mean() for t in tensors(output) if t.is_floating_point() and t.numel()]
        if not floating:
            raise UsageProblem(
                f"There is nothing to train in {self.name}.",
                "The output has no floating tensor.",
                "Define loss(output) beside the model, or use --mode inference.",
            )
        return torch.stack([t.float() for t in floating]).sum()

    def step(self) -> Any:
        """One whole step: the call, and in training its backward pass too (gradients add up in `.grad`)."""
        output = self.call()
        if self.mode == "training":
            self.loss_of(output).backward()  # type: ignore[no-untyped-call]
        return output


def build(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    mode: str = "inference",
    name: str = "",
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Workload:
    """Make a checked `Workload`.

    The model itself is moved, cast and switched; inputs are copied where they change. Integer tensors keep their dtype.
    RNG and buffers are as before the check.

    Args:
        device: "auto" (CUDA where there is a GPU), "cpu", "cuda", "cuda:N", or None: leave all where it is.
        dtype: dtype name for floating parameters, buffers and inputs, or None: leave.

    Raises:
        UsageProblem: `model` is no module, or `args` a tensor; in training, the loss doesn't depend on a parameter.
        AlreadyCompiled: the model or a part of it is compiled or patched.
        DeviceUnavailable: no such device here.
        NoModelFound: the model has no values (meta device).
        ModelHasNaN: NaN or inf in a parameter, NaN in a buffer or an input.
        ModelEmpty: forward() returns no tensor, or runs no operator.
        UserCodeRaised: forward() or loss() raised; quotes the exception.
    """
    import torch

    check_model(model, args)
    place = resolve_device(device)
    kind = getattr(torch, dtype) if dtype else None
    check_materialised(model, name)
    if place or kind:
        with user_code(f"Moving the model to {place or dtype} raised."):
            # Not Module.to(dtype): that would cast complex parameters to real ones.
            model._apply(  # type: ignore[no-untyped-call]
                lambda t: t.to(device=place, dtype=kind if t.is_floating_point() and t.dtype.itemsize > 1 else None)
            )
    model.train(mode == "training")
    memo: dict[int, tuple[Any, Any]] = {}
    args = convert(tuple(args), place, kind, memo)
    named = convert(dict(kwargs or {}), place, kind, memo)
    values = [*model.parameters(), *model.buffers(), *tensors((args, named))]
    where = str(values[0].device) if values else place or "cpu"
    floats = (t.dtype for t in values if t.is_floating_point() and t.dtype.itemsize > 1)
    used = next((str(d).removeprefix("torch.") for d in floats), dtype or "float32")
    workload = Workload(model, args, named, mode, where, used, name, loss)
    check_finite(workload)
    check_call(workload)
    return workload


def resolve_device(device: str | None) -> str | None:
    """ "auto" as a real device; None stays None.

    Raises:
        DeviceUnavailable: CUDA is asked for and torch can't use it, or there is no GPU of that number.
        MissingPackage: torch isn't installed.
    """
    require_torch()
    import torch

    if device is None or device == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return f"cuda:{torch.cuda.current_device()}" if count else "cpu"
    if not count:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable NVIDIA GPU"
        works = "--device cpu works here: analysis, verification and the TileLang CPU target. Reports need no GPU."
        raise DeviceUnavailable(device, f"{why[0].upper()}{why[1:]}.", works)
    index = int(device.partition(":")[2] or torch.cuda.current_device())
    if index >= count:
        raise DeviceUnavailable(device, f"There are {count} GPUs.", f"Use cuda:0 to cuda:{count - 1}.")
    return f"cuda:{index}"


def _shape(value: Any) -> str:
    found = [f"{str(t.dtype).removeprefix('torch.')}[{','.join(map(str, t.shape))}]" for t in tensors(value)]
    return " ".join(found) or type(value).__name__
