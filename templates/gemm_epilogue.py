"""GEMM with any pointwise epilogue: linear, addmm, matmul, bmm, …, then bias, activation, residual, scale, casts, …"""

from fusescout.templates import gemm_problem
from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import unsupported
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_problem import Refused
from fusescout.templates.gemm_source import Writer
from fusescout.templates.source import build

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Kernel

NAME = "gemm_epilogue"
FAMILY = "gemm_epilogue"
GEMMS = 1

CPU_FLOATS = ("float32", *HALF)
BULK_BYTES = 16
"""The copy engine needs addresses and row pitches in multiples of this."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    return refusal(graph, device, GEMMS)


def configs(graph: Subgraph, device: Device) -> list:
    return space(gemm_problem.read(graph, GEMMS), device)


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    return write(graph, config, device, GEMMS, NAME)


def refusal(graph: Subgraph, device: Device, gemms: int) -> str | None:
    try:
        problem = gemm_problem.read(graph, gemms)
    except Refused as reason:
        return f"{reason}."
    for value in problem.epilogue:
        why = unsupported(graph.op_of(value), graph)
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
    if dtypes == {"float32"}:
        return "TileLang's fp32 GEMM is TF32, which is not fp32."
    if not dtypes <= set(HALF):
        return f"No tensor-core GEMM for {dtypes.pop()} here."
    for operand in operands:
        if any(s * 2 % BULK_BYTES for s in (operand.pitch, *operand.batch)) or not operand.aligned:
            return "An operand's rows don't start at multiples of 16 bytes, so the copy engine can't load it."
    return None


def write(graph: Subgraph, config: dict, device: Device, gemms: int, name: str) -> Kernel:
    problem = gemm_problem.read(graph, gemms)
    dialect = dialect_for(device.kind, tuple(o.dtype for o in problem.outputs))
    writer = Writer(problem, config, dialect)
    source = writer.source(name)
    return Kernel(build(source, name), writer.params(), source, writer.pass_configs())
