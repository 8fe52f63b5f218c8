"""The ways to run a candidate, by name, cheapest upkeep first. Each is imported only when it's asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fusescout.contenders.base import Contender
from fusescout.errors import ContenderFailed

CLASSES = {
    "eager": "fusescout.contenders.eager:Eager",
    "framework": "fusescout.contenders.framework:Framework",
    "inductor": "fusescout.contenders.inductor:Inductor",
    "tilelang": "fusescout.contenders.tilelang:TileLang",
}
NAMES = tuple(CLASSES)
PEERS = {
    "bare": "fusescout.contenders.bare:Bare",
    "inductor-autotune": "fusescout.contenders.inductor_modes:Autotune",
    "inductor-default": "fusescout.contenders.inductor_modes:Default",
    "liger": "fusescout.contenders.liger:Liger",
}
"""What a bench races besides. None of them gets into a plan."""


def contender_named(
    name: str, templates: Sequence[str | Path] = (), *, cold: bool = False, cache_dir: Path | None = None
) -> Contender:
    """Make one contender.

    Args:
        name: one of `NAMES` or `PEERS`.
        templates: more template folders, for those that use templates.
        cold: let Inductor keep what it compiles under `cache_dir`, apart from what this user compiled before, so that
            its compile time means something.
        cache_dir: keeps compiled kernels; by default the user's cache folder.

    Raises:
        ContenderFailed: there is none of this name, or a package it needs is missing.
    """
    known = CLASSES | PEERS
    if name not in known:
        raise ContenderFailed(f"There is no contender {name}; there are {', '.join(known)}.")
    module, attribute = known[name].split(":")
    try:
        made = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ContenderFailed(f"{name} needs a package that can't be imported ({error}).") from error
    if name == "tilelang":
        return made(tuple(templates), cache_dir)  # type: ignore[no-any-return]
    return made(cold=cold, cache_dir=cache_dir) if name.startswith("inductor") else made()  # type: ignore[no-any-return]


def all_contenders(
    templates: Sequence[str | Path] = (), *, cold: bool = False, cache_dir: Path | None = None
) -> dict[str, Contender | str]:
    """Every contender by name; one that can't be imported is the reason why instead."""
    found: dict[str, Contender | str] = {}
    for name in NAMES:
        try:
            found[name] = contender_named(name, templates, cold=cold, cache_dir=cache_dir)
        except ContenderFailed as error:
            found[name] = str(error)
    return found
