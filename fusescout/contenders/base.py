"""What a contender is: one way to run a captured sub-graph, raced under the same rules as all others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol

from fusescout.constants import Parts
from fusescout.device import Device
from fusescout.ir import Subgraph

Runner = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Takes the sub-graph's inputs in order, gives its outputs in order as new tensors."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What choosing this contender costs a maintainer."""

    lines: int
    rests_on: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """A contender ready to run.

    `source` is what was generated for it, if anything. `parts` is set where it prepares constants: `run` joins them.
    `call`, if there is one, is `run` for those in a hurry: the inputs are its arguments, and it gives the output itself
    or a tuple of several. It trusts its arguments.
    """

    run: Runner
    compile_s: float
    source: str = ""
    parts: Parts | None = None
    call: Callable[..., Any] | None = None


class Contender(Protocol):
    """One way to run sub-graphs. `name` is its kind: eager, framework, inductor, tilelang, cuda."""

    name: str

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        """Configurations to try, best guess first; or a sentence why it can't run this sub-graph."""

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        """Make one variant ready; raises `ContenderFailed` with a reason."""

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep: ...

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        """A stand-alone script that builds, checks and times it without FuseScout."""
