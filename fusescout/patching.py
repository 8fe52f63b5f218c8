"""Applies a plan to a live model, and takes it back.

It works on the instance, as `nn.Module.compile` does: Dynamo captures each graph with its guards (shapes, dtypes,
strides, train/eval, grad mode), the planned chains are replaced, the rest runs as the plan's composition says. The
class, the parameters, `state_dict` keys, hooks and `deepcopy` stay as they were. A call that no guard fits is captured
anew; chains of it that the plan doesn't know run as the framework runs them and are counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch import nn

from fusescout.capture.aten import CONSTANT_MASKS
from fusescout.capture.aten import to_aten
from fusescout.capture.encode import encode_graph
from fusescout.capture.recompute import run_eagerly
from fusescout.compose import compose
from fusescout.config import load
from fusescout.contenders import contender_named
from fusescout.contenders.base import Contender
from fusescout.device import Device
from fusescout.errors import CompositionUnavailable
from fusescout.errors import ContenderFailed
from fusescout.errors import NotCapturable
from fusescout.errors import PlanMismatch
from fusescout.flops import op_class
from fusescout.hoisting import Hoisted
from fusescout.hoisting import hoist
from fusescout.ir import Subgraph
from fusescout.memory_format import channels_last
from fusescout.operators import define
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.rewrite import Prepared
from fusescout.rewrite import rewrite


class Counters:
    """What the patch did so far, over all captures of this model."""

    def __init__(self) -> None:
        self.captures = 0
        """Graphs captured: one for each new shape, dtype, mode or graph piece."""
        self.replaced: dict[str, int] = {}
        """Sites replaced, by entry id."""
        self.relaid = 0
        """Graphs whose convolutions run channels-last."""
        self.masks = 0
        """Constant attention masks left out."""
        self.fallbacks: dict[str, str] = {}
        """Why an entry or a graph was left to the framework."""

    @property
    def sites(self) -> int:
        return sum(self.replaced.values())

    @property
    def changed(self) -> bool:
        """Whether any graph runs otherwise than the framework runs it."""
        return bool(self.sites or self.relaid or self.masks)


class Backend:
    """A Dynamo back end that carries out a plan."""

    def __init__(self, plan: Plan, device: Device | None = None, cache_dir: Path | None = None) -> None:
        if plan.composition == "cudagraph" and plan.device_kind != "cuda":
            raise CompositionUnavailable("cudagraph", f"CUDA graphs need a GPU, and the plan is for {plan.device_kind}")
        self.plan = plan
        self.cache_dir = cache_dir or load().cache_dir
        self.device = device or describe_device(plan.device_kind)
        self.counters = Counters()
        self.hoisted: list[Hoisted] = []
        self._operators: dict[str, Any] = {}
        self._lock = threading.RLock()

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with self._lock:
            self.counters.captures += 1
            number = self.counters.captures - 1
            if os.environ.get("FUSESCOUT_DISABLE", "") not in ("", "0"):
                self.counters.fallbacks[f"graph {number}"] = "FUSESCOUT_DISABLE is set"
                return run_eagerly(module)
            try:
                aten = to_aten(module, inputs)
                relaid = self._relaid(number, aten)
                graph = encode_graph(aten, number)
            except NotCapturable as error:
                self.counters.fallbacks[f"graph {number}"] = error.reason
                return self._compose(number, module, module, inputs)
            entries = [e for e in self.plan.entries if self._ready(e)]
            done = rewrite(aten, graph, entries, lambda e, _: self._operators[e.id])
            for replacement in done:
                self.counters.replaced[replacement.entry] = self.counters.replaced.get(replacement.entry, 0) + 1
            masks = aten.meta.get(CONSTANT_MASKS, 0) if self.plan.constant_masks else 0
            self.counters.masks += masks
            if not done and not relaid and not masks:
                self.counters.fallbacks.setdefault(f"graph {number}", "no chain of it is in the plan")
                return self._compose(number, module, module, inputs)
            hoisted = hoist(aten)
            if hoisted is None:
                return self._compose(number, module, aten, inputs)
            self.hoisted.append(hoisted)
            return hoisted.bind(self._compose(number, module, aten, [*inputs, *hoisted.examples(inputs)]))

    def _relaid(self, number: int, aten: fx.GraphModule) -> bool:
        """Bring the graph's convolutions into the plan's memory format; whether that changed anything."""
        if self.plan.memory_format == "preserved":
            return False
        reason = channels_last(aten)
        if reason:
            self.counters.fallbacks[f"memory format of graph {number}"] = reason
            return False
        self.counters.relaid += 1
        return True

    def _compose(
        self, number: int, module: fx.GraphModule, rewritten: fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        if self.plan.composition != "eager" and _is_recurrent(rewritten):
            self.counters.fallbacks[f"graph {number}"] = (
                f"{self.plan.composition} would unroll a recurrent layer step by step; the graph runs eagerly"
            )
            return run_eagerly(rewritten)
        try:
            return compose(module, rewritten, inputs, self.plan.composition)
        except Exception as error:  # isolation boundary: the compiler may fail on any graph; the model must still run
            if self.plan.composition == "eager":
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            self.counters.fallbacks[f"graph {number}"] = (
                f"{self.plan.composition} failed with {type(error).__name__}: {first[:200]}; the graph runs eagerly"
            )
            return run_eagerly(rewritten)

    def _contender(self, name: str) -> Contender:
        return contender_named(name, self.plan.templates, cache_dir=self.cache_dir)

    def _ready(self, entry: Entry) -> bool:
        """Build the entry's kernel once; a failure is counted and the chain stays with the framework."""
        if entry.id in self._operators:
            return self._operators[entry.id] is not None
        subgraph = Subgraph.from_json(entry.subgraph)
        try:
            built = self._contender(entry.contender).build(subgraph, entry.variant, self.device)
        except ContenderFailed as error:
            self.counters.fallbacks[entry.id] = str(error)
            self._operators[entry.id] = None
            return False
        name, kind = operator_name(entry), self.plan.device_kind
        if built.parts is None:
            self._operators[entry.id] = define(name, subgraph, built.run, kind, built.call)
        else:
            split = built.parts.split
            self._operators[entry.id] = Prepared(
                split,
                define(f"{name}_prepare", split.prepare, built.parts.prepare, kind),
                define(f"{name}_steady", split.steady, built.parts.steady, kind),
            )
        return True


def operator_name(entry: Entry) -> str:
    variant = hashlib.sha256(json.dumps(entry.variant, sort_keys=True).encode()).hexdigest()
    return f"{entry.family}_{entry.key[:12]}_{entry.contender}_{variant[:8]}"


class Patched:
    """A patched model's handle. `undo()` takes the patch back; as a context manager it does so at the end."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.model = model
        self.plan = backend.plan
        self.counters = backend.counters
        self._hoisted = backend.hoisted
        self._undone = False
        self._before = vars(model).get("_compiled_call_impl")
        compiled = torch.compile(_private(model), backend=_GuardHooks(backend), dynamic=False)
        self._ours = model._compiled_call_impl = _restoring_hook_guards(compiled)
        self._ours.patch = self  # type: ignore[attr-defined]

    def refresh(self) -> None:
        """Make anew what was prepared of parameters; needed only after a write through `.data`, which torch hides."""
        for hoisted in self._hoisted:
            hoisted.forget()

    def undo(self) -> None:
        """Give the model back the call it had, in any order with other patches. Calling it twice does nothing more."""
        self._undone = True
        if getattr(self.model, "_compiled_call_impl", None) is self._ours:
            before = self._before
            while isinstance(earlier := getattr(before, "patch", None), Patched) and earlier._undone:
                before = earlier._before
            self.model._compiled_call_impl = before
            if before is None:
                del self.model._compiled_call_impl  # the class has it as None

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _private(model: nn.Module) -> Callable[..., Any]:
    """The model's call in a code object of its own.

    Dynamo counts captures by code object, and all modules share that of `Module._call_impl`, all of a class that of its
    `forward`: the ninth patched model of a process would silently have run as it was.
    """
    implementation = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace()
    return call


class _GuardHooks:
    """The back end, with guards on module hooks for what is captured.

    Dynamo leaves them out by default, and a hook that is added later would be ignored silently. The setting is read
    when guards are made, after the back end has returned, so `_restoring_hook_guards` puts it back.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = self.backend(module, inputs)
        if _changed.get() is None:
            _changed.set(torch._dynamo.config.skip_nnmodule_hook_guards)
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        return compiled


_changed: ContextVar[bool | None] = ContextVar("hook guards before", default=None)


def _is_recurrent(module: fx.GraphModule) -> bool:
    names = (getattr(n.target, "__name__", "").split(".")[0] for n in module.graph.nodes if n.op == "call_function")
    return any(op_class(f"aten.{name}.default") == "rnn" for name in names)


def _restoring_hook_guards(call: Callable[..., Any]) -> Callable[..., Any]:
    def patched_call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The user's own torch.compile traces through: the model's plain operators are its to compile.
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            before = _changed.get()
            if before is not None:
                torch._dynamo.config.skip_nnmodule_hook_guards = before
                _changed.set(None)

    return patched_call


def patch(model: nn.Module, plan: Plan | str | Path, *, composition: Composition | None = None) -> Patched:
    """Replace a model's planned chains by their fused kernels, on this instance only.

    Args:
        model: the live model, on the device the plan was made for.
        plan: a `Plan`, or the path of a plan file or run folder.
        composition: run the rest this way instead of the plan's.

    Raises:
        PlanUnreadable: the file is no plan.
        PlanMismatch: it was measured on another device.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(Path(plan))
    if composition is not None:
        plan = plan.composed(composition)
    where = next((t.device.type for t in model.parameters()), None) or next(
        (t.device.type for t in model.buffers()), None
    )
    if where is not None and where != plan.device_kind:
        raise PlanMismatch("device", plan.device_kind, where)
    device = describe_device(plan.device_kind)
    if device.name != plan.device_name:
        raise PlanMismatch("device", plan.device_name, device.name)
    return Patched(model, Backend(plan, device))


@contextmanager
def patched(model: nn.Module, plan: Plan | str | Path) -> Iterator[Patched]:
    """`with fusescout.patched(model, plan): …` patches inside the block only."""
    handle = patch(model, plan)
    try:
        yield handle
    finally:
        handle.undo()
