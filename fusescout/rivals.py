"""The framework's own ways to run the whole model, built and warmed up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusescout.config import Config
from fusescout.session import Rival
from fusescout.ways import Way
from fusescout.ways import failure
from fusescout.ways import most_bytes
from fusescout.ways import stepper
from fusescout.ways import untouched
from fusescout.ways import warm
from fusescout.workload import Workload

ROOM = 8
"""So many times the memory of a step must be free on a GPU for a rival to be held through the races."""
OnEvent = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Rivals:
    """Those that run, and why others don't."""

    ways: tuple[Way, ...]
    failed: tuple[Rival, ...]


def build(workload: Workload, config: Config, on_event: OnEvent) -> Rivals:
    """Compile the model in the framework's ways; to be called inside of `ways.compiling`.

    Raises:
        DiskFull: a compiler found no room for its files.
    """
    cuda = workload.device.startswith("cuda")
    known: list[tuple[str, dict[str, Any]]] = [("compile", {})]
    if cuda:
        known.append(("compile + CUDA graphs", {"mode": "reduce-overhead"}))
    if config.effort == "max":
        known.append(("compile max-autotune", {"mode": "max-autotune" if cuda else "max-autotune-no-cudagraphs"}))
    ways, failed = [], []
    for name, options in known:
        on_event("end to end", 0, 0, f"building {name}")
        try:
            ways.append(warm(name, workload, torch.compile(workload.model, dynamic=False, **options)))
        except Exception as error:  # isolation boundary: a rival that can't run is a fact to report
            failed.append(Rival(name=name, reason=failure(name, workload, error)))
    return Rivals(tuple(ways), tuple(failed))


def have_room(workload: Workload) -> bool:
    """Whether the rivals may be built while something else is still to be measured.

    On a GPU that has memory to spare: a captured CUDA graph holds what a step takes. Not on a CPU, whose cores compile
    one thing after the other anyhow.
    """
    if not workload.device.startswith("cuda"):
        return False
    with untouched(workload):
        needed = most_bytes(stepper(workload), workload.device) or 0
    return torch.cuda.mem_get_info(workload.device)[0] > ROOM * needed
