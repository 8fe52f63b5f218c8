"""Make autocast explicit: each cast it would do becomes a node, so a piece of the graph means the same anywhere.

Which casts autocast does isn't public, so it is observed: each operator runs once on fake tensors with autocast on,
once with it off, and the extra casts of its own arguments are written into the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast
from torch.amp.autocast_mode import _exit_autocast
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map_only

from fusescout.capture.recompute import trace_region
from fusescout.errors import NotCapturable

_enter: Any = _enter_autocast
_exit: Any = _exit_autocast

DEVICES = ("cpu", "cuda", "xpu", "mps")

Casts = dict[int, torch.dtype]


def ambient() -> dict[str, torch.dtype]:
    """Device kinds for which autocast is on right now, with the dtype it casts to."""
    return {kind: torch.get_autocast_dtype(kind) for kind in DEVICES if torch.is_autocast_enabled(kind)}


def uses_autocast(gm: fx.GraphModule) -> bool:
    """Whether any autocast, around the graph or inside it, decides what it computes."""
    inside = (n.target is _enter_autocast for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
    return bool(ambient()) or any(inside)


@contextmanager
def state(active: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Autocast on for exactly `active`, without its cache and unseen by tracers; restored after."""
    cache = torch.is_autocast_cache_enabled()
    saved = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES}
    try:
        torch.set_autocast_cache_enabled(False)
        for kind in DEVICES:
            torch.set_autocast_enabled(kind, kind in active)
            if kind in active:
                torch.set_autocast_dtype(kind, active[kind])
        yield
    finally:
        for kind, (enabled, dtype) in saved.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)


class ExplicitAutocast(fx.Interpreter):
    """Runs an ATen graph under a tracer, with autocast off and its casts spelled out."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.active = [ambient()]
        self.cached: dict[tuple[int, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        around = self.active[0]
        with state({}):
            # The result is right only with autocast off, also where it is called with autocast on.
            entered = [_enter(kind, dtype, False, False) for kind, dtype in around.items()]
            out = super().run(*args, **kwargs)
            for token in reversed(entered):
                _exit(token)
            return out

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _enter_autocast:
            kind, dtype, enabled = args[0], args[1], args[2] if len(args) > 2 else True
            rest = {k: v for k, v in self.active[-1].items() if k != kind}
            self.active.append(rest | ({kind: dtype or torch.get_autocast_dtype(kind)} if enabled else {}))
            return None
        if target is _exit_autocast:
            self.active.pop()
            return None
        active = self.active[-1]
        if not active and target is tag_activation_checkpoint:
            return trace_region(super().call_function, args, kwargs)
        if not active:
            return super().call_function(target, args, kwargs)
        if isinstance(target, HigherOrderOperator):
            raise NotCapturable(f"{target} under autocast isn't supported")
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            return super().call_function(target, args, kwargs)
        casts, dtypes = _observe(target, args, kwargs, active)
        args, kwargs = tree_map_only(Tensor, lambda t: self._cast(t, casts.get(_storage(t))), (args, kwargs))
        if _dtypes_without(target, args, kwargs) != dtypes and _takes_dtype(target) and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": dtypes[0]}
        if _dtypes_without(target, args, kwargs) != dtypes:
            raise NotCapturable(f"autocast changes {target} in a way that explicit casts of its arguments don't")
        return super().call_function(target, args, kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype is None or dtype == tensor.dtype or not tensor.is_floating_point():
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        # Autocast casts a weight once however often it is used: gradients then meet in the low precision.
        key = (id(tensor), dtype, torch.is_grad_enabled())
        if key not in self.cached:
            self.cached[key] = tensor, tensor.to(dtype)
        return self.cached[key][1]


class _CastLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: Casts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.casts[_storage(args[0])] = kwargs["dtype"]
        return func(*args, **kwargs)


def _observe(
    target: OpOverload, args: Any, kwargs: Any, active: Mapping[str, torch.dtype]
) -> tuple[Casts, list[torch.dtype]]:
    logs = []
    for mode in ({}, active):
        with state(mode), _unseen(), _CastLog() as log:
            try:
                out = target(*args, **kwargs)
            except RuntimeError:
                if mode:
                    raise
                out = None  # mixed dtypes that only autocast makes agree
        logs.append(log.casts)
    plain, cast = logs
    return {k: v for k, v in cast.items() if plain.get(k) != v}, _dtypes(out)


def _dtypes_without(target: OpOverload, args: Any, kwargs: Any) -> list[torch.dtype] | None:
    try:
        with _unseen():
            return _dtypes(target(*args, **kwargs))
    except RuntimeError:
        return None


@contextmanager
def _unseen() -> Iterator[None]:
    """Without gradients, and unseen by the tracer, which would write down the switches of the grad mode too."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _dtypes(out: Any) -> list[torch.dtype]:
    return [t.dtype for t in tree_leaves(out) if isinstance(t, Tensor)]


def _takes_dtype(target: OpOverload) -> bool:
    return any(a.name == "dtype" for a in target._schema.arguments)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
