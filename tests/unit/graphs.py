"""Builds plain-data graphs by hand, for tests that must not need torch."""

from __future__ import annotations

import math
from typing import Any

from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    return TensorSpec(shape, dtype, strides)


class Builder:
    """`b.op("add", spec(4), x, y)` appends a node and gives its name."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def input(self, out: TensorSpec) -> str:
        return self._add("input", (), out, False)

    def op(self, name: str, out: TensorSpec, *args: Any, mutates: bool = False, module: str = "") -> str:
        target = name if "." in name else f"aten.{name}.default"
        return self._add(target, tuple(Ref(a) if isinstance(a, str) else a for a in args), out, mutates, module)

    def _add(self, target: str, args: tuple[Any, ...], out: TensorSpec, mutates: bool, module: str = "") -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(Node(name, target, args, (), out, mutates=mutates, module=module))
        return name

    def graph(self, *outputs: str, index: int = 0) -> Graph:
        return Graph(index, tuple(self.nodes), outputs)
