"""The framework's own fused operators in place of a chain that spells one out.

Each step rewrites the sub-graph as plain data, and the result is run by `reference.build` like eager. What a region
with one tensor in and one out computes is found by asking it: in float64 on a few rows it must agree with the built-in.
So it matters not how a model spells GELU or a norm. Attention and GEMM epilogues are matched by structure. Whether a
rewritten sub-graph is right in its own dtype is for `verify.py` to say, as for every contender.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fusescout.contenders import repro
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.ir import FLOATS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import refs
from fusescout.ir import substitute
from fusescout.reference import build
from fusescout.reference import to_source

ROWS = 4
AGREE = 1e-7
LARGEST_REGION = 16
Step = tuple[str, Subgraph]


class Framework:
    """Runs the sub-graph with fused built-ins."""

    name = "framework"

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        calls = [name for name, _ in rewrites(graph, device)]
        if not calls:
            return "No fused operator of the framework covers a part of this chain that it doesn't use already."
        return [{"calls": calls[:n]} for n in range(len(calls), 0, -1)]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        rewritten = self._rewritten(graph, variant, device)
        try:
            return Built(build(rewritten), 0.0, to_source(rewritten, "framework"))
        except ValueError as error:
            raise ContenderFailed(f"{error}.") from error

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        private = tuple(f"torch.{c}" for c in variant["calls"] if c.startswith("_"))
        return Upkeep(len(variant["calls"]), private, ("cuda",) if private else ("cpu", "cuda"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        code = to_source(self._rewritten(graph, variant, device), "contender")
        return repro.script(graph, device, "framework", code)

    def _rewritten(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Subgraph:
        steps = rewrites(graph, device)
        wanted = list(variant["calls"])
        if [name for name, _ in steps[: len(wanted)]] != wanted or not wanted:
            raise ContenderFailed(
                f"This sub-graph can't be rewritten to {', '.join(wanted)} with torch {torch.__version__}."
            )
        return steps[len(wanted) - 1][1]


def rewrites(graph: Subgraph, device: Device) -> list[Step]:
    """Every step that applies, in order; each one's sub-graph includes those before it."""
    steps: list[Step] = []
    rules: tuple[Callable[[Subgraph], Step | None], ...] = (_spelled_out, _affine, _attention)
    if device.kind == "cuda":
        rules = (*rules, _gemm_activation)
    while len(steps) < 8:
        found = next((step for rule in rules if (step := rule(graph))), None)
        if found is None:
            return steps
        steps.append(found)
        graph = found[1]
    return steps


def _spelled_out(graph: Subgraph) -> Step | None:
    """A region with one tensor in and one out that computes what a built-in does; the largest one first."""
    regions = sorted(_regions(graph), key=lambda r: (-len(r[2]), r[1]))
    for source, result, members in regions:
        spec, out = graph.value(source), graph.value(result)
        if (
            not isinstance(spec, TensorSpec)
            or not isinstance(out, TensorSpec)
            or not 1 < len(members) <= LARGEST_REGION
        ):
            continue
        if spec.dtype not in FLOATS or (spec.dtype, spec.shape) != (out.dtype, out.shape) or not spec.numel:
            continue
        ops = [graph.ops[i - len(graph.inputs)] for i in members]
        for target, args, kwargs in _proposals(ops, spec):
            op = Op(target, (Ref(source), *args), kwargs, out)
            rewritten = _splice(graph, set(members), result, [op])
            alone = Op(target, (Ref(0), *args), kwargs, out)
            if _agree(_cut(graph, source, members), Subgraph((spec,), (alone,), (1,))):
                return op.name, rewritten
    return None


def _proposals(ops: list[Op], spec: TensorSpec) -> Iterator[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]]:
    names = {op.name for op in ops}
    if names & {"tanh", "sigmoid", "exp"}:
        yield "aten.gelu.default", (), (("approximate", "tanh"),)
        yield "aten.silu.default", (), ()
        yield "aten.mish.default", (), ()
    if "erf" in names:
        yield "aten.gelu.default", (), ()
    if names & {"exp", "sum"} == {"exp", "sum"}:
        dims = {d for op in ops if op.name == "sum" and len(op.args) > 1 for d in _ints(op.args[1])}
        for dim in sorted(dims):
            yield "aten.softmax.int", (dim,), ()
    if (
        names & {"rsqrt", "sqrt", "pow", "var", "var_mean"}
        and names & {"mean", "sum", "var", "var_mean"}
        and spec.shape
    ):
        constants = {n for op in ops if op.name in ("add", "clamp", "clamp_min") for n in _numbers(op)}
        for eps in sorted(c for c in constants if 0 < c < 1):
            yield "aten.rms_norm.default", ((spec.shape[-1],), None, eps), ()
            yield "aten.layer_norm.default", ((spec.shape[-1],), None, None, eps), ()


def _regions(graph: Subgraph) -> Iterator[tuple[int, int, list[int]]]:
    """(source, result, members): what leads from one value to another, reads nothing else and is read nowhere else."""
    first = len(graph.inputs)
    for result in range(len(graph.ops) + first - 1, first - 1, -1):
        for source in range(result):
            members, todo = set(), [result]
            while todo:
                index = todo.pop()
                op = graph.op_of(index)
                if op is None:
                    break
                members.add(index)
                todo += [i for i in op.inputs if i != source and i not in members]
            else:
                inner = members - {result}
                closed = all(set(graph.users(i)) <= members and i not in graph.outputs for i in inner)
                if closed and any(source in (graph.op_of(i) or graph.ops[0]).inputs for i in members):
                    yield source, result, sorted(members)


def _cut(graph: Subgraph, source: int, members: list[int]) -> Subgraph:
    number = {source: 0, **{m: 1 + k for k, m in enumerate(members)}}
    ops = [graph.ops[m - len(graph.inputs)] for m in members]
    renamed = tuple(
        Op(op.target, substitute(op.args, number), tuple((k, substitute(v, number)) for k, v in op.kwargs), op.out)
        for op in ops
    )
    return Subgraph((graph.tensor(source),), renamed, (len(members),))


def _agree(region: Subgraph, builtin: Subgraph) -> bool:
    """Whether two sub-graphs of one input compute the same in float64, at several magnitudes, on a few rows."""
    shape = region.inputs[0].shape
    small = (*(min(n, ROWS) for n in shape[:-2]), *shape[-2:])
    if len(shape) > 1 and math.prod(small) > 1 << 20:
        small = (*small[:-2], min(small[-2], ROWS), small[-1])
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 8.0, 0.01):
        x = torch.randn(small, generator=generator, dtype=torch.float64) * scale + scale / 2
        try:
            mine, other = build(region, "float64")([x])[0], build(builtin, "float64")([x])[0]
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
        ):  # it has sizes in its arguments, or there is no such op
            return False
        if mine.shape != other.shape or not bool(((mine - other).abs() <= AGREE * (scale + other.abs())).all()):
            return False
    return True


def _affine(graph: Subgraph) -> Step | None:
    """Weight and bias that follow a norm without them go into the norm."""
    for index, op in _numbered(graph):
        slots = {"rms_norm": 2, "layer_norm": 3}
        if op.name not in slots or len(op.args) <= slots[op.name] or (op.name == "rms_norm" and op.args[2] is not None):
            continue
        users = graph.users(index)
        if len(users) != 1 or index in graph.outputs or not (after := graph.op_of(users[0])):
            continue
        slot = 2 if op.args[2] is None and after.name == "mul" else 3 if op.name == "layer_norm" else 0
        scaled = (
            slot == 3 and after.name == "add" and op.args[2] is not None and op.args[3] is None and not after.kwargs
        )
        if not (slot == 2 or scaled):
            continue
        others = [i for i in after.inputs if i != index]
        spec = graph.value(others[0]) if len(others) == 1 else None
        if not isinstance(spec, TensorSpec) or spec.shape != graph.tensor(index).shape[-1:] or after.out is None:
            continue
        if spec.dtype != graph.tensor(index).dtype or graph.tensor(users[0]).dtype != spec.dtype:
            continue
        args = tuple(Ref(others[0]) if k == slot else a for k, a in enumerate(op.args))
        return f"{op.name} weight" if slot == 2 else f"{op.name} bias", _splice(
            graph, {index, users[0]}, users[0], [Op(op.target, args, op.kwargs, after.out)]
        )
    return None


def _attention(graph: Subgraph) -> Step | None:
    """matmul, scale, mask, softmax, matmul as one call of scaled_dot_product_attention."""
    for index, op in _numbered(graph):
        if op.name not in ("softmax", "_softmax") or op.args[1] not in (-1, len(graph.tensor(index).shape) - 1):
            continue
        members, weights = {index}, index
        while (users := graph.users(weights)) and len(users) == 1 and _is_plain(graph, users[0]):
            weights = users[0]
            members.add(weights)
        last = graph.op_of(users[0]) if len(users) == 1 and not members & set(graph.outputs) else None
        if last is None or last.name not in ("matmul", "bmm") or last.args[0] != Ref(weights):
            continue
        found = _scores(graph, op.inputs[0])
        if found is None:
            continue
        query, key, mask, scale, inner = found
        members |= inner | {users[0]}
        if any(i in graph.outputs or not set(graph.users(i)) <= members for i in members - {users[0]}):
            continue
        specs = [
            graph.value(i) for i in (query, key, *map(int, refs(last.args[1])), *(() if mask is None else (mask,)))
        ]
        if len({s.dtype for s in specs if isinstance(s, TensorSpec)}) != 1 or specs[-1] is None:
            continue
        turn = graph.op_of(key)
        new: list[Op] = []
        rank = len(graph.tensor(key).shape)
        if turn and turn.name == "transpose" and {d % rank for d in _ints(turn.args[1:])} == {rank - 2, rank - 1}:
            straight: Ref = Ref(turn.inputs[0])
        else:
            new.append(Op("aten.transpose.int", (Ref(key), -1, -2), (), _swapped(graph.tensor(key))))
            straight = Ref(-1)
        masked = None if mask is None else Ref(mask)
        call = (Ref(query), straight, last.args[1], masked, 0.0, False)
        new.append(Op("aten.scaled_dot_product_attention.default", call, (("scale", scale),), last.out))
        # Some kernels give another layout than matmul does.
        new.append(Op("aten.contiguous.default", (Ref(-len(new)),), (), last.out))
        return "scaled_dot_product_attention", _splice(graph, members, users[0], new)
    return None


def _scores(graph: Subgraph, index: int) -> tuple[int, int, int | None, float, set[int]] | None:
    """(query, transposed key, mask, scale, members) of the scores that go into a softmax."""
    members: set[int] = set()
    mask, scale = None, 1.0
    for _ in range(6):
        op = graph.op_of(index)
        if op is None:
            return None
        members.add(index)
        numbers = _numbers(op)
        if op.name in ("matmul", "bmm"):
            return int(op.inputs[0]), int(next(refs(op.args[1]))), mask, scale, members
        if op.name in ("mul", "div") and len(op.inputs) == 1 and len(numbers) == 1 and op.args[0] == Ref(op.inputs[0]):
            scale *= numbers[0] if op.name == "mul" else 1 / numbers[0]
        elif op.name == "add" and len(op.inputs) == 2 and mask is None and scale == 1.0 and not op.kwargs:
            inner = [i for i in op.inputs if graph.tensor(i).shape == graph.tensor(index).shape and graph.op_of(i)]
            if not inner:
                return None
            mask = next(i for i in op.inputs if i != inner[0])
            index = inner[0]
            continue
        elif not _is_plain(graph, index):
            return None
        index = op.inputs[0]
    return None


def _gemm_activation(graph: Subgraph) -> Step | None:
    """linear or addmm with a bias, then relu or tanh-GELU: one call into cuBLASLt."""
    for index, op in _numbered(graph):
        gelu = op.name == "gelu" and op.kwarg("approximate", "none") == "tanh"
        before = graph.op_of(op.inputs[0]) if gelu or op.name == "relu" else None
        if before is None or before.name not in ("linear", "addmm") or len(before.args) != 3 or None in before.args:
            continue
        gemm = op.inputs[0]
        if graph.users(gemm) != (index,) or gemm in graph.outputs or before.kwargs:
            continue
        out = graph.tensor(index)
        new: list[Op] = []
        if before.name == "linear":
            x, weight = graph.tensor(before.inputs[0]), graph.tensor(before.inputs[1])
            if not all(isinstance(a, Ref) for a in before.args) or not x.is_contiguous:
                continue
            rows, inner, columns = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
            flat = replace(out, shape=(rows, columns), stride=(columns, 1))
            new = [
                Op(
                    "aten.view.default",
                    (before.args[0], (rows, inner)),
                    (),
                    replace(x, shape=(rows, inner), stride=(inner, 1)),
                ),
                Op("aten.t.default", (before.args[1],), (), _swapped(weight)),
                Op("aten._addmm_activation.default", (before.args[2], Ref(-1), Ref(-2)), (("use_gelu", gelu),), flat),
                Op("aten.view.default", (Ref(-3), out.shape), (), out),
            ]
        else:
            new = [Op("aten._addmm_activation.default", before.args, (("use_gelu", gelu),), out)]
        return "_addmm_activation", _splice(graph, {gemm, index}, index, new)
    return None


def _splice(graph: Subgraph, members: set[int], at: int, new: list[Op]) -> Subgraph:
    """Put `new` in the place of `members`, whose last value `at` it replaces; `Ref(-k)` in it is its own k-th op."""
    number: dict[Any, Any] = {k: k for k in range(len(graph.inputs))}
    ops: list[Op] = []

    def emit(op: Op) -> int:
        kwargs = tuple((k, substitute(v, number)) for k, v in op.kwargs)
        ops.append(Op(op.target, substitute(op.args, number), kwargs, op.out))
        return len(graph.inputs) + len(ops) - 1

    for index, op in _numbered(graph):
        if index == at:
            for k, one in enumerate(new):
                number[-1 - k] = emit(one)
            number[at] = number[-len(new)]
        elif index not in members:
            number[index] = emit(op)
    return _prune(Subgraph(graph.inputs, tuple(ops), tuple(number[o] for o in graph.outputs)))


def _prune(graph: Subgraph) -> Subgraph:
    """Without operators whose value nobody reads any more."""
    dead = {i for i, _ in _numbered(graph) if not graph.users(i) and i not in graph.outputs}
    if not dead:
        return graph
    kept = [(i, op) for i, op in _numbered(graph) if i not in dead]
    number = {k: k for k in range(len(graph.inputs))} | {i: len(graph.inputs) + k for k, (i, _) in enumerate(kept)}
    ops = tuple(
        Op(o.target, substitute(o.args, number), tuple((k, substitute(v, number)) for k, v in o.kwargs), o.out)
        for _, o in kept
    )
    return _prune(Subgraph(graph.inputs, ops, tuple(number[o] for o in graph.outputs)))


def _numbered(graph: Subgraph) -> list[tuple[int, Op]]:
    return list(enumerate(graph.ops, len(graph.inputs)))


def _is_plain(graph: Subgraph, index: int) -> bool:
    """Whether a value is its input, at most in another dtype: a cast, dropout in eval mode, a no-op copy."""
    op = graph.op_of(index)
    return op is not None and (
        op.name in ("to", "_to_copy", "detach", "alias", "contiguous")
        or (op.name == "dropout" and op.args[-1] is False)
    )


def _swapped(spec: TensorSpec) -> TensorSpec:
    *shape, a, b = spec.shape
    *stride, s, t = spec.stride
    return replace(spec, shape=(*shape, b, a), stride=(*stride, t, s))


def _ints(arg: Any) -> list[int]:
    return [a for a in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(a, int)]


def _numbers(op: Op) -> list[float]:
    return [float(a) for a in op.args if isinstance(a, int | float) and not isinstance(a, bool)]
