"""From what the user types to a `Workload`: `model.py`, `file.py:attr`, `pkg.mod:attr`, or a script of its own.

A file is read with `ast` before it is run, so that a training script is never executed by mistake. `load` is the entry
point for models; `is_script` says when `usercode.run_script` has to be used instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from fusescout.errors import NoModelFound
from fusescout.errors import TargetNotFound
from fusescout.usercode import Outline
from fusescout.usercode import as_script
from fusescout.usercode import import_file
from fusescout.usercode import import_module
from fusescout.usercode import outline
from fusescout.usercode import run_script as run_script
from fusescout.usercode import user_code
from fusescout.workload import Workload as Workload
from fusescout.workload import build
from fusescout.workload import resolve_device

if TYPE_CHECKING:
    from torch import nn

ACCEPTED = (
    "fusescout_workload() -> (model, inputs); "
    "get_model() with get_inputs(); "
    "KernelBench's Model, get_inputs() and get_init_inputs()"
)
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Spec:
    """A target, taken apart: a file or a module, and an attribute of it."""

    text: str
    file: Path | None
    module: str
    attribute: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read `model.py`, `file.py:attr`, `pkg.mod` or `pkg.mod:attr`.

        Raises:
            TargetNotFound: it is none of these.
        """
        place, colon, attribute = text.rpartition(":") if not Path(text).exists() else (text, "", "")
        if not colon:
            place, attribute = text, ""
        if (colon and not DOTTED.fullmatch(attribute)) or not place:
            raise TargetNotFound(text, "It isn't in one of the forms FuseScout knows.")
        if place.endswith(".py") or os.sep in place or Path(place).exists():
            return cls(text, Path(place), "", attribute)
        if not DOTTED.fullmatch(place):
            raise TargetNotFound(text, "It is neither a file here nor a module name.")
        return cls(text, None, place, attribute)


def is_script(spec: str) -> bool:
    """Whether the target is a script that calls FuseScout itself: it imports it and offers no model. Runs nothing."""
    parsed = Spec.parse(spec)
    if parsed.file is None or parsed.attribute or not parsed.file.is_file():
        return False
    known = outline(parsed.file)
    return known.imports_fusescout and not known.open_ended and not _offers_model(known, known.imports_fusescout)


def load(
    spec: str,
    *,
    argv: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    mode: str = "inference",
    seed: int | None = None,
) -> Workload:
    """Load a model and its inputs, put them where they should run, and prove with one call that they fit.

    Args:
        spec: `model.py`, `file.py:attr`, `pkg.mod` or `pkg.mod:attr`. An attribute is a module, a module class, or a
            function without arguments that gives a module or (module, inputs).
        argv: `sys.argv[1:]` while the user's file is imported.
        device, dtype, mode: as in `workload.build`.
        seed: seeds torch before the user's file makes weights and inputs; None leaves the RNG.

    Raises:
        TargetNotFound: no such file, module or attribute.
        NoModelFound: nothing that is a model, or a model without inputs.
        UserCodeRaised: the user's code raised.
        FuseScoutError: whatever `workload.build` raises.
    """
    parsed = Spec.parse(spec)
    known = _outline(parsed)
    resolve_device(device)
    folder = str(parsed.file.resolve().parent) if parsed.file else os.getcwd()
    with as_script(folder, [str(parsed.file or parsed.module), *argv]):
        if seed is not None:
            import torch

            torch.manual_seed(seed)
        space = vars(import_file(parsed.file) if parsed.file else import_module(parsed.module))
        found = _attribute(space, parsed) if parsed.attribute else _provided(space, parsed, known)
        loss = found.loss if isinstance(found, Workload) else space.get("loss")
        model, inputs = _model_and_inputs(found, space, parsed)
        args, kwargs = as_call(inputs, model)
        return build(
            model,
            args,
            kwargs,
            device=device,
            dtype=dtype,
            mode=mode,
            name=spec,
            loss=loss if mode == "training" and callable(loss) else None,
        )


def as_call(inputs: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs in any accepted form as (args, kwargs).

    `(args, kwargs)` where the first is a tuple or list and the second a dict; a tuple or list is positional; a mapping
    with text keys is keywords; a dataclass instance is keywords if forward() has all its fields as parameters, else one
    argument; anything else is one argument.
    """
    match inputs:
        case (tuple() | list() as args, dict() as kwargs) if all(isinstance(k, str) for k in kwargs):
            return tuple(args), kwargs
        case tuple() | list():
            return tuple(inputs), {}
        case Mapping() if inputs and all(isinstance(k, str) for k in inputs):
            return (), dict(inputs)
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        if fields.keys() <= inspect.signature(model.forward).parameters.keys():
            return (), fields
    return (inputs,), {}


def _outline(spec: Spec) -> Outline | None:
    """What the target's file offers, known before it is run."""
    if spec.file is None:
        return None
    if not spec.file.exists():
        near = difflib.get_close_matches(spec.file.name, [p.name for p in spec.file.parent.glob("*.py")], n=1)
        raise TargetNotFound(spec.text, "There is no such file.", f"Did you mean {near[0]}?" if near else "")
    known = outline(spec.file)
    if not spec.attribute and not known.open_ended and not _offers_model(known, known.imports_fusescout):
        raise _nothing(spec, known)
    return known


def _offers_model(known: Outline, calls_fusescout: bool) -> bool:
    """A script of its own often has a `Model` or `get_model` too: there, inputs must be offered as well."""
    names = known.names
    if "fusescout_workload" in names:
        return True
    makes_model = "get_model" in names or "Model" in names
    return makes_model and ("get_inputs" in names or not calls_fusescout)


def _nothing(spec: Spec, known: Outline | None) -> NoModelFound:
    classes = known.modules if known else ()
    hint = f" Or name one: {' or '.join(f'{spec.text}:{c}' for c in classes[:3])}." if classes else ""
    return NoModelFound(spec.text, "It defines none of the names FuseScout looks for.", f"Define {ACCEPTED}.{hint}")


def _provided(space: dict[str, Any], spec: Spec, known: Outline | None) -> Any:
    for name in ("fusescout_workload", "get_model", "Model"):
        if name in space:
            return _made(space[name], name, space, spec)
    raise _nothing(spec, known)


def _attribute(space: dict[str, Any], spec: Spec) -> Any:
    head, _, rest = spec.attribute.partition(".")
    try:
        value = attrgetter(rest)(space[head]) if rest else space[head]
    except (KeyError, AttributeError):
        public = [n for n in space if not n.startswith("_")]
        near = difflib.get_close_matches(spec.attribute, public, n=1)
        place = spec.file or spec.module
        fix = f"Did you mean {place}:{near[0]}?" if near else ""
        raise TargetNotFound(spec.text, f"{place} has no attribute {spec.attribute}.", fix) from None
    return _made(value, spec.attribute, space, spec)


def _made(value: Any, name: str, space: dict[str, Any], spec: Spec) -> Any:
    """What a model, a model class or a factory stands for."""
    from torch import nn

    if isinstance(value, nn.Module | Workload | tuple):
        return value
    if not callable(value):
        raise NoModelFound(spec.text, f"{name} is a {type(value).__name__}.", "Name a module, its class or a factory.")
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise NoModelFound(
            spec.text, f"The class {name} is no torch.nn.Module.", "Name a module, its class or a factory."
        )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(value, type) and "get_init_inputs" in space:
        init = _call(space["get_init_inputs"], "get_init_inputs", spec)
        args, kwargs = ((), dict(init)) if isinstance(init, Mapping) else (tuple(init), {})
    return _call(value, name, spec, *args, **kwargs)


def _call(function: Callable[..., Any], name: str, spec: Spec, *args: Any, **kwargs: Any) -> Any:
    if not callable(function):
        raise NoModelFound(spec.text, f"{name} is a {type(function).__name__}.", f"Make {name} a function.")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        pass  # builtins have no signature; the call itself will tell
    except TypeError as error:
        why = f"{name}{inspect.signature(function)} can't be called with what there is: {error}."
        fix = "Give a function without arguments, or get_init_inputs() for a class."
        raise NoModelFound(spec.text, why, fix) from None
    with user_code(f"{name}() in {spec.text} raised."):
        return function(*args, **kwargs)


def _model_and_inputs(found: Any, space: dict[str, Any], spec: Spec) -> tuple[nn.Module, Any]:
    from torch import nn

    match found:
        case Workload():
            return found.model, (found.args, found.kwargs)
        case (nn.Module() as model, inputs):
            return model, inputs
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return model, (tuple(args), dict(kwargs))
        case nn.Module() as model:
            return model, _inputs_beside(model, space, spec)
    given = (
        f"a tuple of {', '.join(type(x).__name__ for x in found)}" if isinstance(found, tuple) else type(found).__name__
    )
    fix = "Return a torch.nn.Module, (model, inputs) or (model, args, kwargs)."
    raise NoModelFound(spec.text, f"What it gives is {given}.", fix)


def _inputs_beside(model: nn.Module, space: dict[str, Any], spec: Spec) -> Any:
    if "get_inputs" in space:
        inputs = _call(space["get_inputs"], "get_inputs", spec)
        if inputs is not None:
            return inputs
    for name in ("dummy_inputs", "example_input_array"):
        with user_code(f"{type(model).__name__}.{name} raised."):
            inputs = getattr(model, name, None)
        if inputs is not None:
            return inputs
    forward = f"forward{inspect.signature(model.forward)}"
    why = f"{type(model).__name__} has no inputs to call it with."
    raise NoModelFound(spec.text, why, f"Define get_inputs() beside it, returning the arguments of {forward}.")
