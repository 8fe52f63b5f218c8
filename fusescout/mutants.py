"""Planted bugs: faults that public kernels had, wrapped around eager, each of which the verifier must reject.

A verifier that accepts one is worth nothing, so `self_test` runs them on the user's own sub-graph. A bug that changes
no bit of any output on any case, or whose rounding is within what the rule allows, is "not distinguishable" here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusescout.contenders.base import Runner
from fusescout.ir import FLOAT8
from fusescout.ir import FLOATS
from fusescout.ir import Subgraph
from fusescout.mutants_attention import LOST_TILE
from fusescout.mutants_attention import attention_mutants
from fusescout.mutants_losses import MISSING_TILE
from fusescout.mutants_losses import loss_mutants
from fusescout.mutants_scaled import scaled_mutants
from fusescout.reference import build
from fusescout.verify import Verifier

REJECTED, SAME, ACCEPTED = "rejected", "not distinguishable", "ACCEPTED"
ROUNDING = frozenset(
    {"low-precision sum", "float16 arithmetic", "bfloat16 arithmetic", "1 % too large", MISSING_TILE, LOST_TILE}
)
"""Bugs of degree: they are wrong only as far as they err more than the rule allows."""
K_STEP = 16
Edit = Callable[[Tensor], Tensor]


def self_test(
    graph: Subgraph,
    captured: Sequence[Tensor] | None,
    device: str,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> dict[str, str]:
    """Plant every bug (or those in `names`) in eager and try to get it through the full check.

    Returns:
        By bug: "rejected: reason", "not distinguishable" or, if the verifier failed, "ACCEPTED".
    """
    verifier = Verifier(graph, captured, device, seed)
    found = {}
    for name, mutant in mutants(graph).items():
        if names is not None and name not in names:
            continue
        outcome = verifier.check(mutant, "full")
        if outcome.reason:
            found[name] = f"{REJECTED}: {outcome.reason}"
        else:
            harmless = name in ROUNDING or _changes_nothing(verifier, mutants(graph)[name])
            found[name] = SAME if harmless else ACCEPTED
    return found


def mutants(graph: Subgraph) -> dict[str, Runner]:
    """Every bug, by name. Each is a fresh runner, as some keep state."""
    eager = build(graph)
    found: dict[str, Runner] = {name: _edited(eager, edit) for name, edit in _EDITS.items()}
    found["wider output"] = _mapped(eager, lambda o: o.double() if o.dtype != torch.float64 else o.float())
    found["transposed memory"] = _mapped(eager, lambda o: o.mT.contiguous().mT if o.dim() > 1 else o)
    found["previous output"] = _previous(eager)
    found["writes its input"] = _writes_input(eager)
    found["returns its input's memory"] = _aliases(eager)
    for k, spec in enumerate(graph.inputs):
        if spec.dtype in FLOATS | FLOAT8:
            found[f"ignores input {k}"] = _ignoring(eager, k)
    found["low-precision sum"] = _low_sum(eager)
    found |= scaled_mutants(graph, eager)
    found |= loss_mutants(graph, eager)
    found |= attention_mutants(graph)
    wide = {s.dtype for s in graph.output_specs} & {"float32", "float64"}
    for dtype in ("float16", "bfloat16") if wide else ():
        try:
            narrow = build(graph, dtype)
        except ValueError:
            continue
        found[f"{dtype} arithmetic"] = _cast_back(narrow, graph)
    return found


def _edited(eager: Runner, edit: Edit) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(_like(edit(_computable(o)), o) if o.numel() else o for o in eager(inputs))

    return run


def _mapped(eager: Runner, edit: Edit) -> Runner:
    return lambda inputs: tuple(edit(o) for o in eager(inputs))


def _previous(eager: Runner) -> Runner:
    kept: list[tuple[Tensor, ...]] = []

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        kept.append(tuple(eager(inputs)))
        del kept[:-2]
        return tuple(o.clone() for o in kept[0])

    return run


def _writes_input(eager: Runner) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = tuple(eager(inputs))
        for t in inputs:
            if t.numel():
                t.as_strided((1,), (1,), t.storage_offset()).fill_(3)
        return outputs

    return run


def _aliases(eager: Runner) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = list(eager(inputs))
        for k, o in enumerate(outputs):
            room = next(
                (t for t in inputs if t.dtype == o.dtype and t.shape == o.shape and t.stride() == o.stride()), None
            )
            if room is not None:
                outputs[k] = room.copy_(o)
        return tuple(outputs)

    return run


def _ignoring(eager: Runner, index: int) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(eager([torch.zeros_like(t) if k == index else t for k, t in enumerate(inputs)]))

    return run


def _cast_back(narrow: Runner, graph: Subgraph) -> Runner:
    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = narrow(inputs)
        return tuple(o.to(getattr(torch, s.dtype)) for o, s in zip(outputs, graph.output_specs, strict=True))

    return run


def _low_sum(eager: Runner) -> Runner:
    """Matrix products whose accumulator is rounded to 16 bits every `K_STEP` terms."""

    def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode: Any = _LowSum
        with mode():
            return tuple(eager(inputs))

    return run


class _LowSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        factors = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "linear": 0, "mkldnn_linear": 0}
        at = factors.get(name)
        if at is None or (kwargs or {}):
            return func(*args, **(kwargs or {}))
        a, b = args[at], args[at + 1]
        if "linear" in name:
            b = b.mT
        low = torch.float16 if a.dtype == torch.float16 else torch.bfloat16
        total = torch.zeros((), dtype=torch.float32, device=a.device)
        for k in range(0, a.shape[-1], K_STEP):
            part = a[..., k : k + K_STEP].float() @ b[..., k : k + K_STEP, :].float()
            total = (total + part).to(low).float()
        bias = args[0] if at else args[2] if "linear" in name and len(args) > 2 else None
        return (total if bias is None else total + bias).to(a.dtype)


def _computable(o: Tensor) -> Tensor:
    """The same values in a dtype that there is arithmetic of."""
    return o.float() if o.dtype.is_floating_point and o.dtype.itemsize == 1 else o


def _like(value: Tensor, out: Tensor) -> Tensor:
    return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(value)


def _holed(rows: bool, last_only: bool) -> Edit:
    """Leave the last row, column or half of them unwritten: what the memory held stays."""

    def edit(o: Tensor) -> Tensor:
        held = torch.empty_like(o)
        dim = (0 if rows else -1) if o.dim() else None
        if dim is None:
            return held
        start = o.shape[dim] - 1 if last_only else (o.shape[dim] + 1) // 2
        held.narrow(dim, 0, start).copy_(o.narrow(dim, 0, start))
        return held

    return edit


def _stale_tile(o: Tensor) -> Tensor:
    """One tile holds zeros."""
    value = o.clone()
    corner = value[tuple(slice(n // 2, n // 2 + 16) for n in o.shape)]
    corner.zero_()
    return value


def _no_infinity(o: Tensor) -> Tensor:
    return o.clamp(torch.finfo(o.dtype).min, torch.finfo(o.dtype).max) if o.is_floating_point() else o


def _no_nan(o: Tensor) -> Tensor:
    return torch.where(o.isnan(), torch.zeros_like(o), o)


_EDITS: dict[str, Edit] = {
    "zeros": torch.zeros_like,
    "a constant": lambda o: torch.full_like(o, float(o.double().mean()) if o.is_floating_point() else 0),
    "missing tile": _stale_tile,
    "last row unwritten": _holed(rows=True, last_only=True),
    "last column unwritten": _holed(rows=False, last_only=True),
    "half the rows unwritten": _holed(rows=True, last_only=False),
    "rows off by one": lambda o: o.roll(1, 0) if o.dim() else o,
    "columns off by one": lambda o: o.roll(1, -1) if o.dim() else o,
    "infinity clamped": _no_infinity,
    "NaN swallowed": _no_nan,
    "1 % too large": lambda o: o * 1.01 if o.is_floating_point() else o + 1,
}


def _changes_nothing(verifier: Verifier, mutant: Runner) -> bool:
    with torch.no_grad():
        for case in verifier.inputs.names("full"):
            inputs = verifier.inputs.make(case)
            expected = verifier.eager(inputs)
            for want, got in zip(expected, mutant(inputs), strict=True):
                if not bool(((want == got) | (want.isnan() & got.isnan())).all()):
                    return False
    return True
