"""Use Dynamo for one capture without a trace: its settings, counters and the code it cached are put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from fusescout.capture.encode import shorten
from fusescout.session import GraphBreak

SETTINGS = {
    "specialize_int": True,
    "specialize_float": True,
    "automatic_dynamic_shapes": False,
    "suppress_errors": False,
    "recompile_limit": 256,
    "accumulated_recompile_limit": 4096,
}
"""Every shape and number is fixed, and all graphs of one call are kept, however many.

Recurrent layers stay outside of graphs, as Dynamo leaves them unless the user sets `allow_rnn`: on fake tensors they
are unrolled step by step, which takes seconds a layer for 64 steps, and there is nothing to fuse in them.
"""


@dataclass
class Notes:
    """What Dynamo said during a capture; complete once the context is left."""

    breaks: list[GraphBreak] = field(default_factory=list)


@contextmanager
def fixed_shapes(backend: Any) -> Iterator[Notes]:
    """Dynamo for captures with `backend`."""
    from torch._dynamo import config
    from torch._dynamo import output_graph
    from torch._dynamo.utils import counters

    notes = Notes()
    reasons: list[Any] = vars(output_graph)["graph_break_reasons"]
    logger = logging.getLogger("torch._dynamo")
    level, already = logger.level, len(reasons)
    saved = {kind: counter.copy() for kind, counter in counters.items()}
    counters.clear()
    logger.setLevel(logging.ERROR)
    try:
        with config.patch(SETTINGS):
            yield notes
    finally:
        logger.setLevel(level)
        notes.breaks = _breaks(reasons[already:], counters.get("graph_break", {}))
        del reasons[already:]
        counters.clear()
        counters.update(saved)
        for code in _codes():
            _drop(code, [entry for entry in _entries(code) if entry.backend is backend])


@contextmanager
def forgotten() -> Iterator[None]:
    """What Dynamo compiles inside is dropped after.

    It is kept on the user's code objects, where it would hold memory and count against the user's recompile limit.
    """
    known = {id(entry.guard_manager) for code in _codes() for entry in _entries(code)}
    try:
        yield
    finally:
        for code in _codes():
            _drop(code, [entry for entry in _entries(code) if id(entry.guard_manager) not in known])


def _codes() -> Iterator[Any]:
    """All code objects that Dynamo has compiled something for."""
    from torch._dynamo.convert_frame import input_codes

    for reference in list(input_codes.seen):
        code = reference()
        if code is not None:
            yield code


def _entries(code: Any) -> list[Any]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def _drop(code: Any, entries: list[Any]) -> None:
    """Drop some of a code object's entries; those of the user's stay.

    A dropped entry leaves an empty one behind, which still counts against the recompile limit; so if nothing else is
    there, the whole list goes.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    if not entries:
        return
    for entry in entries:
        manager = entry.guard_manager
        if manager.extra_state is not None:
            manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("FuseScout is done with it"))
    if all(isinstance(entry.guard_manager, DeletedGuardManagerWrapper) for entry in _entries(code)):
        reset_code(code)


def _breaks(reasons: list[Any], counted: Any) -> list[GraphBreak]:
    """Each break once, in order; those that Dynamo only counted have no place."""
    placed = [GraphBreak(reason=_headline(r.reason), where=_place(r.user_stack)) for r in reasons]
    known = {b.reason for b in placed}
    silent = [GraphBreak(reason=_headline(r)) for r in counted if _headline(r) not in known]
    return list({(b.reason, b.where): b for b in (*placed, *silent)}.values())


def _headline(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    explanation = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0]}: {explanation}" if explanation else lines[0]


def _place(stack: Any) -> str:
    if not stack:
        return ""
    frame = stack[-1]
    return f"{shorten(frame.filename)}:{frame.lineno} in {frame.name}"
