"""A plan: which chains to replace, with what, on which evidence. Made by an analysis, applied by `patch.py`.

A plan holds no weights and no code: sub-graphs as plain data, a contender's name and its variant. Order is priority:
where two entries claim the same node, the first one gets it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import ValidationError

from fusescout.errors import PlanMismatch
from fusescout.errors import PlanUnreadable
from fusescout.ir import Subgraph
from fusescout.session import Interval
from fusescout.session import write_atomic

PLAN_VERSION = 1
Composition = Literal["eager", "inductor", "cudagraph", "replay"]
"""What runs the rest: its operators, Inductor, Inductor with CUDA graphs, its operators in CUDA graphs."""
COMPILED: frozenset[Composition] = frozenset({"inductor", "cudagraph"})
"""Where Inductor runs the rest."""
GRAPHED: frozenset[Composition] = frozenset({"cudagraph", "replay"})
"""Where CUDA graphs do."""
MemoryFormat = Literal["preserved", "channels_last", "row_major"]
LAYOUTS: dict[MemoryFormat, str] = {
    "preserved": "",
    "channels_last": "convolutions channels-last",
    "row_major": "pointwise operators row-major",
}
"""How a sentence says that a model was patched so."""


class Entry(BaseModel):
    """One chain to replace everywhere it occurs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    family: str
    chain: list[str]
    subgraph: str
    """`Subgraph.to_json()`; its key is what sites are found by."""
    contender: str
    variant: dict[str, Any]
    sites: int
    speedup: Interval | None = None
    source_hash: str = ""
    """sha256 of the generated kernel source the evidence was measured on."""

    @property
    def key(self) -> str:
        return Subgraph.from_json(self.subgraph).key


class Plan(BaseModel):
    """What to patch, how, and on what it was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan_version: int = PLAN_VERSION
    target: str
    mode: str
    device_kind: str
    device_name: str
    torch: str
    tilelang: str | None = None
    composition: Composition = "eager"
    """How the part that isn't replaced runs."""
    memory_format: MemoryFormat = "preserved"
    """In which memory layout the model runs; entries were found in graphs of this layout."""
    constant_masks: bool = False
    """Attention masks that are the same in every call are left out of the graphs, others made dense."""
    computed_once: bool = False
    """What no input decides is made once, not in every call; entries were found in graphs without it."""
    entries: list[Entry] = []
    templates: list[str] = []
    """Extra template folders that the entries need."""

    def save(self, path: Path | str) -> None:
        write_atomic(Path(path), self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan file (or the `plan.json` of a run folder).

        Raises:
            PlanUnreadable: missing, not JSON, another version, or fields that don't fit.
        """
        path = Path(path)
        file = path / "plan.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise PlanUnreadable(str(file), error.strerror or str(error)) from error
        except ValueError as error:
            raise PlanUnreadable(str(file), f"it is not JSON ({error})") from error
        version = raw.get("plan_version") if isinstance(raw, dict) else None
        if version != PLAN_VERSION:
            raise PlanUnreadable(str(file), f"its plan_version is {version!r}, this FuseScout reads {PLAN_VERSION}")
        try:
            plan = cls.model_validate(raw)
            for entry in plan.entries:
                Subgraph.from_json(entry.subgraph)
        except ValidationError as error:
            first = error.errors()[0]
            raise PlanUnreadable(str(file), f"field {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise PlanUnreadable(str(file), f"an entry's sub-graph is damaged ({error!r})") from error
        return plan

    @property
    def is_empty(self) -> bool:
        """Whether it replaces nothing: `composition` alone says how a model runs then; with "eager", as it is."""
        return self == self.emptied()

    def emptied(self) -> Plan:
        nothing = {"entries": [], "memory_format": "preserved", "constant_masks": False, "computed_once": False}
        return self.model_copy(update=nothing)

    def without(self, ids: set[str]) -> Plan:
        """The same plan less some entries."""
        return self.model_copy(update={"entries": [e for e in self.entries if e.id not in ids]})

    def composed(self, composition: Composition) -> Plan:
        return self.model_copy(update={"composition": composition})

    def merged(self, other: Plan) -> Plan:
        """This plan with another's entries after its own: one plan for all shapes that both were measured at.

        Where both have an entry for a chain, and in how the rest runs, this one counts, unless it is empty; of two
        empty ones that counts which leaves the model to something else than eager.

        Raises:
            PlanMismatch: they are for different devices, modes or memory formats.
        """
        for what, field in (("device", "device_name"), ("mode", "mode"), ("memory format", "memory_format")):
            mine, given = getattr(self, field), getattr(other, field)
            if mine != given and not (field == "memory_format" and (self.is_empty or other.is_empty)):
                raise PlanMismatch(what, mine, given)
        if self.is_empty and (not other.is_empty or self.composition == "eager" != other.composition):
            return other.merged(self)
        known = {(e.family, e.key) for e in self.entries}
        return self.model_copy(
            update={
                "entries": [*self.entries, *(e for e in other.entries if (e.family, e.key) not in known)],
                "templates": list(dict.fromkeys((*self.templates, *other.templates))),
                "constant_masks": self.constant_masks or other.constant_masks,
                "computed_once": self.computed_once or other.computed_once,
            }
        )
