"""The template contract and its registry.

A template is a module with the functions of `Template`. It is found through the entry-point group
`fusescout.templates` (the built-ins too), or as a `.py` file in a `--templates` folder. A template never states what
is computed: that is the captured `Subgraph` itself. It says which sub-graphs it covers and how to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Protocol

from fusescout.device import Device
from fusescout.ir import Subgraph

Config = Mapping[str, Any]
"""One point of a template's search space: JSON-safe values only, it becomes part of plans and cache keys."""


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter, in call order, and the tensor that is passed for it.

    Attributes:
        name: the parameter's name in the kernel.
        role: "input" (sub-graph input `index`), "output" (sub-graph output number `index`) or "scratch".
        shape: shape the kernel declares; the launcher passes `tensor.as_strided(shape, stride)`, or the tensor
            itself where nothing differs.
        stride: strides of that view in elements.
        dtype: dtype name; for "scratch" also what is allocated.
    """

    name: str
    role: str
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiated template.

    Attributes:
        func: the TileLang `prim_func`.
        params: the kernel's parameters in call order.
        source: its TileLang source text, for reports and repro scripts.
        pass_configs: TileLang pass configs it needs.
    """

    func: Any
    params: tuple[Param, ...]
    source: str
    pass_configs: Mapping[str, Any] = field(default_factory=dict)


class Template(Protocol):
    """What a template module has.

    One more function is optional: `prepared(graph, config) -> constants.Split | None` gives the parts of a sub-graph
    where a config wants something made of parameters once. `kernel` then gets the steady part in place of the whole.
    """

    NAME: str
    FAMILY: str

    def supports(self, graph: Subgraph, device: Device) -> str | None:
        """None if it covers all of `graph`, else a one-sentence reason why not."""

    def configs(self, graph: Subgraph, device: Device) -> list[Config]:
        """Search space, best guess first (a cost model orders it, so that the first 8 are worth trying)."""

    def kernel(self, graph: Subgraph, config: Config, device: Device) -> Kernel:
        """Build the kernel for `device` (its `kind` picks the dialect); the module imports TileLang here."""
