"""What a table of kernels and shapes is made of: a chain with its inputs, and which of its variants is meant.

Chains are traced on tensors without memory, so that a table of many hundreds can be checked in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

import torch
from template_cases import trace
from torch import Tensor

from fusescout.ir import Subgraph


@dataclass
class Make:
    """Makes the inputs of a chain on a device: numbers as models have them, or on "meta" nothing but sizes."""

    device: str
    dtype: torch.dtype
    made: int = 0

    def __call__(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """Standard normal numbers times `scale`."""
        if self.device == "meta":
            return torch.empty(sizes, device="meta", dtype=self.dtype)
        return (torch.randn(sizes, generator=self._generator(), device=self.device) * scale).to(self.dtype)

    def weight(self, rows: int, columns: int, across: bool = False) -> Tensor:
        """Of a linear, [rows, columns]; `across` that of a Conv1D."""
        return self(rows, columns, scale=(rows if across else columns) ** -0.5)

    def beside(self, *sizes: int, gap: int) -> Tensor:
        """A tensor whose rows are `gap` elements apart."""
        return self(*sizes[:-1], sizes[-1] + gap)[..., : sizes[-1]]

    def odd(self, *sizes: int) -> Tensor:
        """A tensor that begins at an odd address."""
        count = torch.Size(sizes).numel()
        return self(count + 1)[1:].view(sizes)

    def classes(self, count: int, *sizes: int, ignored: bool = True) -> Tensor:
        if self.device == "meta":
            return torch.empty(sizes, device="meta", dtype=torch.int64)
        made = torch.randint(count, sizes, generator=self._generator(), device=self.device)
        return made.masked_fill_(made % 3 == 0, -100) if ignored else made

    def mask(self, *sizes: int) -> Tensor:
        return self(*sizes) > -0.5

    def _generator(self) -> torch.Generator:
        self.made += 1
        return torch.Generator(self.device).manual_seed(self.made)


@dataclass(frozen=True)
class Shape:
    """One kernel to be checked.

    Attributes:
        name: what it is, unique in its group.
        template: the template that must cover it.
        function: the chain.
        inputs: its inputs from a `Make`.
        wants: entries that the variant must have; None stands for one that it must not have.
        constants: places of inputs that are parameters.
        dtype: of the floating-point inputs.
        covers: names of the columns of the table that this is one entry of.
        run: tracing runs it: without memory, convolutions and attention don't tell how their results lie.
    """

    name: str
    template: str
    function: Callable[..., Any]
    inputs: Callable[[Make], tuple[Tensor, ...]]
    wants: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    covers: tuple[str, ...] = ()
    run: bool = False

    def traced(self, device: str = "cpu") -> tuple[Subgraph, list[int]]:
        """The sub-graph, and which of the inputs each of its inputs is; what must be run is, on `device`."""
        given = self.inputs(Make(device if self.run else "meta", self.dtype))
        graph, order = trace(self.function, given)
        places = [next(k for k, t in enumerate(given) if t is o) for o in order]
        specs = (
            replace(s, constant=k in self.constants, aligned=_offset(given[k]) % 16 == 0)
            for s, k in zip(graph.inputs, places, strict=True)
        )
        return replace(graph, inputs=tuple(specs)), places

    def chosen(self, variants: list[Mapping[str, Any]] | str) -> Mapping[str, Any]:
        """The first variant of the kind that is meant.

        Raises:
            LookupError: there is none; a table that names a kernel which isn't there is wrong.
        """
        if isinstance(variants, str):
            raise LookupError(f"{self.name}: {variants}")
        for variant in variants:
            if variant["template"] == self.template and all(_is(variant, k, w) for k, w in self.wants.items()):
                return variant
        kinds = sorted({str({k: v.get(k) for k in ("template", *self.wants)}) for v in variants})
        raise LookupError(f"{self.name}: no variant has {dict(self.wants)}, there are {', '.join(kinds)}")


def _is(variant: Mapping[str, Any], key: str, wanted: Any) -> bool:
    found = variant.get(key)
    return bool(wanted(found)) if callable(wanted) else bool(found == wanted)


def _offset(tensor: Tensor) -> int:
    """Bytes from where the memory begins, which is aligned."""
    return tensor.storage_offset() * tensor.element_size()
