"""A model's call through Dynamo and a back end: in a code object of its own, and under settings of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch import nn

from fusescout.counters import Counters

MOST_CAPTURES = 64
"""Captures of one piece of code. Dynamo's own limit is 8: a model's ninth shape would silently run unpatched."""
BackEnd = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def live_call(
    model: nn.Module, backend: BackEnd, counters: Counters, refresh: Callable[[], None]
) -> Callable[..., Any]:
    """What calls `model` with each graph that is captured of it carried out by `backend`.

    `refresh` makes anew what is kept of parameters and buffers; it is called where torch doesn't say that they changed.
    """
    compiled = torch.compile(_private(model, counters), backend=_GuardHooks(backend), dynamic=False)
    return _with_settings(compiled, model, refresh)


def _private(model: nn.Module, counters: Counters) -> Callable[..., Any]:
    """The model's call in a code object of its own.

    Dynamo counts captures by code object, and all modules share that of `Module._call_impl`, all of a class that of its
    `forward`: the ninth patched model of a process would silently have run as it was.
    """
    implementation = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and counters.captures >= MOST_CAPTURES:  # Dynamo runs it uncaptured
            counters.framework_calls += 1
            counters.fallbacks["shapes"] = f"{MOST_CAPTURES} captures were made; shapes that came later run eagerly"
        return implementation(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace()
    return call


class _GuardHooks:
    """The back end, with guards on module hooks for what is captured.

    Dynamo leaves them out by default, and a hook that is added later would be ignored silently. The setting is read
    when guards are made, after the back end has returned, so `_Settings` puts it back.
    """

    def __init__(self, backend: BackEnd) -> None:
        self.backend = backend

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = self.backend(module, inputs)
        _ours.change("skip_nnmodule_hook_guards", False)
        return compiled


class _InFlight:
    """How many calls are in flight, and what the settings were before the first."""

    def __init__(self) -> None:
        self.calls = 0
        self.before: dict[str, Any] = {}


class _InFlightHere(threading.local, _InFlight):
    """The same for each thread."""


class _Settings:
    """Dynamo's settings as ours from the first call in flight to the last; then the user's.

    Torch 2.13 has settings of their own for each thread, older ones one for all: then it is the last call of any.
    """

    def __init__(self) -> None:
        entry = getattr(torch._dynamo.config, "_config", {}).get("recompile_limit")
        own = isinstance(getattr(entry, "user_override", None), ContextVar)
        self._state = _InFlightHere() if own else _InFlight()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._state.calls += 1
        if torch._dynamo.config.recompile_limit < MOST_CAPTURES:
            self.change("recompile_limit", MOST_CAPTURES)
        if torch._dynamo.config.error_on_nested_fx_trace:
            # Another thread may be compiling: tracing is one switch for all of them, and this call no part of it.
            self.change("error_on_nested_fx_trace", False)

    def change(self, name: str, value: Any) -> None:
        with self._lock:
            self._state.before.setdefault(name, getattr(torch._dynamo.config, name))
            setattr(torch._dynamo.config, name, value)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._state.calls -= 1
            if not self._state.calls:
                for name, value in self._state.before.items():
                    setattr(torch._dynamo.config, name, value)
                self._state.before = {}


_ours = _Settings()


def _with_settings(call: Callable[..., Any], model: nn.Module, refresh: Callable[[], None]) -> Callable[..., Any]:
    """The call under Dynamo settings of ours, and after statistics of batch norms have moved with `refresh` first."""
    norms = [m for m in model.modules() if m._buffers.get("num_batches_tracked") is not None]
    counted = _batches(norms)

    def patched_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        if torch.compiler.is_compiling():
            # The user's own torch.compile traces through: the model's plain operators are its to compile.
            return call(*args, **kwargs)
        if norms and (now := _batches(norms)) != counted:
            refresh()
            counted = now
        with _ours:
            return call(*args, **kwargs)

    return patched_call


def _batches(norms: Sequence[nn.Module]) -> list[int]:
    """Moves on with each batch in training mode: torch doesn't count that the running statistics are written to."""
    found = []
    for norm in norms:
        batches = norm._buffers.get("num_batches_tracked")
        found.append(-1 if batches is None or batches.is_inference() else batches._version)
    return found
