"""`torch.compile(model, backend="fusescout", options={"plan": "plan.json"})`, found through torch's entry points."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from fusescout.errors import BackendOption

if TYPE_CHECKING:
    from torch import fx

    from fusescout.patching import Backend

OPTIONS = ("plan", "composition")


def backend(
    module: fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Carry out a plan in one captured graph.

    Args:
        module: what Dynamo captured.
        inputs: its example inputs.
        options: "plan" (a `Plan`, or the path of a plan file or run folder) is required; "composition" overrides the
            plan's way to run the rest: "eager", "inductor", "cudagraph" or "replay".

    Raises:
        BackendOption: no plan, or an unknown option.
        PlanUnreadable: the file is no plan.
    """
    given = dict(options or {})
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise BackendOption(f"it does not know {', '.join(unknown)}")
    if "plan" not in given:
        raise BackendOption("it needs a plan")
    from fusescout.integrations.by_shape import ByShape
    from fusescout.integrations.by_shape import is_open

    plan = given["plan"]
    carry_out = _backend(plan if not isinstance(plan, str | Path) else str(plan), given.get("composition"))
    return ByShape(carry_out, module, inputs) if is_open(inputs) else carry_out(module, inputs)


@functools.lru_cache(maxsize=16)
def _load(path: str) -> Any:
    from fusescout.plan import Plan

    return Plan.load(Path(path))


_backends: dict[tuple[str, str | None], Backend] = {}


def _backend(plan: Any, composition: Any) -> Backend:
    """One back end for each plan, so that its kernels are built once and its counters add up."""
    from fusescout.patching import Backend

    loaded = _load(plan) if isinstance(plan, str) else plan
    key = (loaded.model_dump_json(), composition)
    if key not in _backends:
        _backends[key] = Backend(loaded.composed(composition) if composition else loaded)
    return _backends[key]
