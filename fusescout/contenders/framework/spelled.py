"""Regions with one tensor in and one out that spell a built-in: found by asking them, not by their operators' names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fusescout.contenders.framework.surgery import Step
from fusescout.contenders.framework.surgery import cut
from fusescout.contenders.framework.surgery import ints
from fusescout.contenders.framework.surgery import numbers
from fusescout.contenders.framework.surgery import splice
from fusescout.flops import op_class
from fusescout.ir import FLOATS
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.reference import build

ROWS, ROW = 4, 16
AGREE = 1e-7
LARGEST_REGION = 16


def spelled_out(graph: Subgraph) -> Step | None:
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
            rewritten = splice(graph, set(members), result, [op])
            alone = Op(target, (Ref(0), *args), kwargs, out)
            if _agree(cut(graph, source, members), Subgraph((spec,), (alone,), (1,))):
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
        dims = {d for op in ops if op.name == "sum" and len(op.args) > 1 for d in ints(op.args[1])}
        for dim in sorted(dims):
            yield "aten.softmax.int", (dim,), ()
    if (
        names & {"rsqrt", "sqrt", "pow", "var", "var_mean"}
        and names & {"mean", "sum", "var", "var_mean"}
        and spec.shape
    ):
        constants = {n for op in ops if op.name in ("add", "clamp", "clamp_min") for n in numbers(op)}
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


def _agree(region: Subgraph, builtin: Subgraph) -> bool:
    """Whether two sub-graphs of one input compute the same in float64, at several magnitudes, on a few rows."""
    shape = region.inputs[0].shape
    small = (*(min(n, ROWS) for n in shape[:-2]), *shape[-2:])
    if all(op_class(op.target) == "pointwise" for op in (*region.ops, *builtin.ops)):
        small = tuple(min(n, ROW) for n in small)  # the 0.25 million of a video would take 0.1 s for each comparison
    elif len(shape) > 1 and math.prod(small) > 1 << 20:
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
