"""A model's call through Dynamo and a back end: in a code object of its own, and under settings of ours."""

from __future__ import annotations

from collections.abc import Callable
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


def live_call(model: nn.Module, backend: BackEnd, counters: Counters) -> Callable[..., Any]:
    """What calls `model` with each graph that is captured of it carried out by `backend`."""
    return _with_settings(torch.compile(_private(model, counters), backend=_GuardHooks(backend), dynamic=False))


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
    when guards are made, after the back end has returned, so `_with_settings` puts it back.
    """

    def __init__(self, backend: BackEnd) -> None:
        self.backend = backend

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = self.backend(module, inputs)
        if _changed.get() is None:
            _changed.set(torch._dynamo.config.skip_nnmodule_hook_guards)
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        return compiled


_changed: ContextVar[bool | None] = ContextVar("hook guards before", default=None)


def _with_settings(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call under Dynamo settings of ours, which are the user's again after it."""

    def patched_call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The user's own torch.compile traces through: the model's plain operators are its to compile.
            return call(*args, **kwargs)
        config = torch._dynamo.config
        limit = config.recompile_limit
        if limit < MOST_CAPTURES:
            config.recompile_limit = MOST_CAPTURES
        try:
            return call(*args, **kwargs)
        finally:
            if limit < MOST_CAPTURES:
                config.recompile_limit = limit
            before = _changed.get()
            if before is not None:
                torch._dynamo.config.skip_nnmodule_hook_guards = before
                _changed.set(None)

    return patched_call
