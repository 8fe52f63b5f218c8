"""Plain-data form of a captured graph: what every stage after capture works on.

`Graph` is one captured ATen graph with names and origins; `Subgraph` is a canonical, name-free piece of it whose
`key` identifies equal chains in other layers, other runs and plan files. Nothing here imports torch, so candidates,
plans and reports can be made and read on a machine without it. `reference.py` turns a `Subgraph` back into code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from functools import cached_property
from typing import Any

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Floats that are only stored and multiplied: nothing is computed in them."""
LOWER, UPPER = "lower", "upper"
"""What masks hold: true on and below the diagonal of each matrix and false above it, or the reverse."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Static facts of one tensor. `stride` is in elements; `aligned` says its address is a multiple of 16 bytes.

    `constant` marks a parameter or buffer of the model, or what is made of these alone: it changes rarely. `content`
    is `LOWER` or `UPPER` where the values are known to be that; while a patched model runs, they are watched.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool = False
    aligned: bool = True
    constant: bool = False
    content: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes a single pass must touch: a stride-0 dimension is read once."""
        distinct = math.prod(n for n, s in zip(self.shape, self.stride, strict=True) if s != 0 or n == 0)
        return distinct * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n == 0:
                return True
            if n != 1 and s != expected:
                return False
            expected *= n
        return True

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return text if self.is_contiguous else f"{text} stride {list(self.stride)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another value: a node name in a `Graph`, a value index in a `Subgraph`."""

    to: str | int


@dataclass(frozen=True, slots=True)
class Const:
    """A non-numeric constant: kind "dtype" | "device" | "layout" | "memory_format" | "complex", value as text."""

    kind: str
    value: str


Arg = Ref | Const | bool | int | float | str | None | tuple["Arg", ...]
Out = TensorSpec | tuple[TensorSpec | None, ...] | None


def refs(arg: Any) -> Iterator[str | int]:
    """Every value an argument tree refers to, in order, with repeats."""
    if isinstance(arg, Ref):
        yield arg.to
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def substitute(arg: Any, to: dict[Any, Any]) -> Any:
    """The argument tree with each `Ref` renamed through `to`."""
    if isinstance(arg, Ref):
        return Ref(to[arg.to])
    if isinstance(arg, tuple):
        return tuple(substitute(item, to) for item in arg)
    return arg


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a captured graph. `target` is "input", "attr" or an overload such as "aten.linear.default"."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    out: Out
    module: str = ""
    source: str = ""
    mutates: bool = False
    is_parameter: bool = False
    dead: bool = False
    """Nobody reads its result, so it counts as no reader either (`liveness.py`)."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the nodes it reads, each once, in argument order."""
        return tuple(dict.fromkeys(str(r) for r in refs((*self.args, *(v for _, v in self.kwargs)))))

    @property
    def is_op(self) -> bool:
        return self.target not in ("input", "attr")

    @property
    def op(self) -> str:
        """Short operator name: "linear" for "aten.linear.default"."""
        return self.target.split(".")[1] if self.target.count(".") >= 2 else self.target


@dataclass(frozen=True)
class Graph:
    """One captured graph in topological order. `outputs` are the names it returns."""

    index: int
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Who reads each node, dead ones left out."""
        found: dict[str, list[str]] = {n.name: [] for n in self.nodes}
        for node in self.nodes:
            for name in () if node.dead else node.inputs:
                found[name].append(node.name)
        return {k: tuple(v) for k, v in found.items()}

    def escapes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Members of `names` whose value is used outside of it or returned, in graph order."""
        inside = set(names)
        kept = set(self.outputs)
        return tuple(
            n.name
            for n in self.nodes
            if n.name in inside and (n.name in kept or any(u not in inside for u in self.users[n.name]))
        )

    def subgraph(self, names: Iterable[str]) -> tuple[Subgraph, tuple[str, ...]]:
        """Cut `names` out as a `Subgraph`; also gives the node names its inputs come from, in input order."""
        inside = set(names)
        members = [n for n in self.nodes if n.name in inside]
        inputs = tuple(dict.fromkeys(i for n in members for i in n.inputs if i not in inside))
        number: dict[Any, Any] = {name: k for k, name in enumerate(inputs)}
        number |= {n.name: len(inputs) + k for k, n in enumerate(members)}
        ops = tuple(
            Op(n.target, substitute(n.args, number), tuple((k, substitute(v, number)) for k, v in n.kwargs), n.out)
            for n in members
        )
        specs = []
        for name in inputs:
            node = self.by_name[name]
            if not isinstance(node.out, TensorSpec):
                raise ValueError(f"{name} is not a single tensor and can't be an input of a sub-graph")
            specs.append(replace(node.out, constant=True) if node.is_parameter else node.out)
        return Subgraph(tuple(specs), ops, tuple(number[n] for n in self.escapes(inside))), inputs


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of a `Subgraph`; `Ref.to` is a value index (inputs first, then ops in order)."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    out: Out

    @property
    def name(self) -> str:
        return self.target.split(".")[1] if self.target.count(".") >= 2 else self.target

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(int(r) for r in refs((*self.args, *(v for _, v in self.kwargs)))))

    def kwarg(self, name: str, default: Any = None) -> Any:
        return dict(self.kwargs).get(name, default)


@dataclass(frozen=True)
class Subgraph:
    """A canonical chain: tensors in, operators, value indices out. Value k is input k, or op k - len(inputs)."""

    inputs: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    def value(self, index: int) -> Out:
        return self.inputs[index] if index < len(self.inputs) else self.ops[index - len(self.inputs)].out

    def tensor(self, index: int) -> TensorSpec:
        out = self.value(index)
        if not isinstance(out, TensorSpec):
            raise ValueError(f"value {index} is not a single tensor: {out}")
        return out

    def op_of(self, index: int) -> Op | None:
        """The op that makes value `index`, or None for an input."""
        return self.ops[index - len(self.inputs)] if index >= len(self.inputs) else None

    def users(self, index: int) -> tuple[int, ...]:
        """Value indices of the ops that read value `index`."""
        return tuple(len(self.inputs) + k for k, op in enumerate(self.ops) if index in op.inputs)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self.tensor(i) for i in self.outputs)

    @property
    def chain(self) -> tuple[str, ...]:
        """Short operator names in data-flow order."""
        return tuple(op.name for op in self.ops)

    @cached_property
    def key(self) -> str:
        """sha256 over everything that decides what is computed: ops, constants, shapes, strides, dtypes, grad needs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(encode(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Subgraph:
        raw = json.loads(text)
        return cls(
            tuple(_spec(s) for s in raw["inputs"]),
            tuple(
                Op(o["target"], decode(o["args"]), tuple((k, decode(v)) for k, v in o["kwargs"]), _out(o["out"]))
                for o in raw["ops"]
            ),
            tuple(raw["outputs"]),
        )


def encode(value: Any) -> Any:
    """JSON form of specs, args and sub-graphs. Floats that JSON can't hold are spelled as text."""
    if isinstance(value, TensorSpec):
        raw = {
            "shape": list(value.shape), "dtype": value.dtype, "stride": list(value.stride),
            "requires_grad": value.requires_grad, "aligned": value.aligned,
        }  # fmt: skip
        raw |= {"constant": True} if value.constant else {}
        return raw | {"content": value.content} if value.content else raw
    if isinstance(value, Ref):
        return {"ref": value.to}
    if isinstance(value, Const):
        return {"const": [value.kind, value.value]}
    if isinstance(value, Op):
        return {
            "target": value.target, "args": encode(value.args), "kwargs": [[k, encode(v)] for k, v in value.kwargs],
            "out": encode(value.out),
        }  # fmt: skip
    if isinstance(value, Subgraph):
        return {"inputs": encode(value.inputs), "ops": encode(value.ops), "outputs": list(value.outputs)}
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(raw: Any) -> Any:
    """The argument tree that `encode` wrote."""
    if isinstance(raw, list):
        return tuple(decode(v) for v in raw)
    if isinstance(raw, dict):
        if "ref" in raw:
            return Ref(raw["ref"])
        if "float" in raw:
            return float(raw["float"])
        return Const(*raw["const"])
    return raw


def _spec(raw: dict[str, Any]) -> TensorSpec:
    return TensorSpec(
        tuple(raw["shape"]),
        raw["dtype"],
        tuple(raw["stride"]),
        raw["requires_grad"],
        raw["aligned"],
        raw.get("constant", False),
        raw.get("content", ""),
    )


def _out(raw: Any) -> Out:
    if raw is None:
        return None
    if isinstance(raw, list):
        return tuple(None if r is None else _spec(r) for r in raw)
    return _spec(raw)
