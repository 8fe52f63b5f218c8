"""GEMM with any pointwise epilogue: linear, addmm, matmul, bmm, …, then bias, activation, residual, scale, casts, …"""

from fusescout.templates import gemm_problem
from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import unsupported
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_plain import Plain
from fusescout.templates.gemm_problem import Refused
from fusescout.templates.gemm_small import copied
from fusescout.templates.gemm_small import dotted
from fusescout.templates.gemm_source import Writer
from fusescout.templates.gemm_split import Split
from fusescout.templates.gemm_vector import Vector
from fusescout.templates.source import build

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Kernel

NAME = "gemm_epilogue"
FAMILY = "gemm_epilogue"
GEMMS = 1

CPU_FLOATS = ("float32", *HALF)
WRITERS = {"plain": Plain, "vector": Vector, "split": Split}
"""Schedules with a writer of their own."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    return refusal(graph, device, GEMMS, every=True)


def configs(graph: Subgraph, device: Device) -> list:
    return space(gemm_problem.read(graph, GEMMS, turned=True), device)


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    return write(graph, config, device, GEMMS, NAME)


def refusal(graph: Subgraph, device: Device, gemms: int, every: bool = False) -> str | None:
    """Why no schedule covers `graph`, or None.

    With `every`, also those that not all templates have: dot products of a few rows, and inputs that are turned.
    """
    try:
        problem = gemm_problem.read(graph, gemms, turned=every)
    except Refused as reason:
        return f"{reason}."
    for value in problem.epilogue:
        why = unsupported(problem.graph.op_of(value), problem.graph)
        if why:
            return f"{why}."
    operands = (problem.x, *problem.weights)
    dtypes = {o.dtype for o in operands}
    if len(dtypes) > 1:
        return f"The matrix product mixes {' and '.join(sorted(dtypes))}."
    if min(problem.M, problem.N, problem.K) == 0:
        return "The matrix product is empty."
    if any(o.dtype not in CPU_FLOATS for o in problem.outputs):
        return "A result is not a floating-point tensor of at most 32 bits."
    if device.kind == "cpu":
        return None if dtypes <= set(CPU_FLOATS) else f"TileLang's C target has no {dtypes.pop()} here."
    if not dtypes <= set(CPU_FLOATS):
        return f"No GEMM for {dtypes.pop()} here."
    if copied(problem) or (every and dotted(problem)):
        return None
    if dtypes == {"float32"}:
        return "TileLang's fp32 GEMM is TF32, which is not fp32."
    return "An operand's rows don't start at multiples of 16 bytes, so the copy engine can't load it."


def write(graph: Subgraph, config: dict, device: Device, gemms: int, name: str) -> Kernel:
    problem = gemm_problem.read(graph, gemms, turned=True)
    dialect = dialect_for(device.kind, tuple(o.dtype for o in problem.outputs))
    writer = WRITERS.get(config["schedule"], Writer)(problem, config, dialect)
    source = writer.source(name)
    return Kernel(build(source, name), writer.params(), source, writer.pass_configs())
