"""Remembers which chains of a model were raced and which were left, so that the next analysis of it decides alike.

Profiles scatter. A chain at the bar of half a percent was left by one analysis of a CPU example, raced by the next,
which then took 53 s instead of 28, and left again by the one after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusescout.device import Device
from fusescout.ir import Graph
from fusescout.session import write_atomic

RACED, LEFT = 2.0, 0.5
"""What a chain's possible gain counts for where an earlier analysis raced it, and where it left it."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What the last analysis of a model did.

    Attributes:
        file: where it is kept; None remembers nothing.
        raced: keys of the chains that were raced.
        left: keys of the chains whose gain was too small, or smaller than others'.
    """

    file: Path | None
    raced: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graphs: Sequence[Graph], device: Device, top: int, cache_dir: Path | None) -> Recall:
        """What is remembered of these graphs here, where as many were asked for; an unreadable file is none."""
        if cache_dir is None:
            return cls(None)
        what = [[n.target, str(n.out)] for g in graphs for n in g.nodes]
        identity = json.dumps([device.kind, device.name, device.cores, top, what])
        file = cache_dir / "rankings" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
        try:
            raw = json.loads(file.read_bytes())
            return cls(file, frozenset(map(str, raw["raced"])), frozenset(map(str, raw["left"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls(file)

    def weight(self, key: str) -> float:
        """What the chain's possible gain counts for."""
        return RACED if key in self.raced else LEFT if key in self.left else 1.0

    def keep(self, raced: Iterable[str], left: Iterable[str]) -> None:
        """Remember this analysis too; a folder that can't be written costs the memory, nothing else."""
        if self.file is None:
            return
        now = self.raced | set(raced)
        text = json.dumps({"raced": sorted(now), "left": sorted((self.left | set(left)) - now)})
        with suppress(OSError):
            write_atomic(self.file, text.encode())
