"""GEMM with any pointwise epilogue: linear, addmm, matmul, bmm, …, then bias, activation, residual, scale, casts, …"""

from fusescout.templates import gemm_problem
from fusescout.templates.dialect import E4M3
from fusescout.templates.dialect import NARROW
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import unsupported
from fusescout.templates.gemm_ahead import ahead
from fusescout.templates.gemm_ahead import holding
from fusescout.templates.gemm_configs import single_steps
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_even import can_be_even
from fusescout.templates.gemm_even import copying
from fusescout.templates.gemm_even import evened
from fusescout.templates.gemm_even import prepared_weight
from fusescout.templates.gemm_even import with_prepared
from fusescout.templates.gemm_plain import Plain
from fusescout.templates.gemm_problem import Refused
from fusescout.templates.gemm_promoted import narrow_refusal
from fusescout.templates.gemm_promoted import promoting
from fusescout.templates.gemm_small import copied
from fusescout.templates.gemm_small import dotted
from fusescout.templates.gemm_small import loadable
from fusescout.templates.gemm_source import Writer
from fusescout.templates.gemm_split import Split
from fusescout.templates.gemm_vector import Vector
from fusescout.templates.source import build

from fusescout import constants
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Kernel

NAME = "gemm_epilogue"
FAMILY = "gemm_epilogue"
GEMMS = 1

FLOATS = ("float32", *NARROW)
WRITERS = {"plain": Plain, "vector": Vector, "split": Split}
"""Schedules with a writer of their own."""
COPIED = 2
"""Configs that copy a weight in each call, for callers that can't prepare one."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    return refusal(graph, device, GEMMS, every=True, copies=True)


def configs(graph: Subgraph, device: Device) -> list:
    """The schedules that fit; operands that the copy engine can't load are prepared, or copied in each call."""
    problem = gemm_problem.read(graph, GEMMS, turned=True)
    if device.kind == "cpu" or copied(problem) or dotted(problem):
        return [ahead(problem, c) for c in space(problem, device)]
    even = evened(problem)
    tiles = [ahead(even, c) for c in space(even, device) if not _loads_itself(c, problem)]
    alone = [c for c in tiles if not _clustered(c)]
    first = single_steps(problem, device)
    if prepared_weight(graph, problem) is None:
        return first + alone
    ready = [{**c, "weight": "prepared"} for c in (tiles if loadable(problem.x) else alone)]
    return first + ready + alone[:COPIED]


def prepared(graph: Subgraph, config: dict) -> constants.Split | None:
    """A weight with rows that the copy engine can load; None where a config doesn't want one."""
    if config.get("weight") != "prepared":
        return None
    return prepared_weight(graph, gemm_problem.read(graph, GEMMS, turned=True))


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    """The kernel of a config; with a prepared weight of the steady part."""
    return write(graph, config, device, GEMMS, NAME)


def _loads_itself(config: dict, problem: gemm_problem.Problem) -> bool:
    """Whether threads load the operands: TileLang asks the copy engine only in a loop, and one step is none."""
    return config["schedule"] in ("plain", "vector") or (config["schedule"] == "auto" and config["BK"] >= problem.K)


def _clustered(config: dict) -> bool:
    """TileLang 0.1.15 launches all kernels of a source as clusters if one is, which the copies' grids refuse."""
    return config.get("cluster", 1) > 1 or (config.get("splits", 1) > 1 and config["join"] == "cluster")


def refusal(graph: Subgraph, device: Device, gemms: int, every: bool = False, copies: bool = False) -> str | None:
    """Why no schedule covers `graph`, or None.

    With `every`, also those that not all templates have: dot products of a few rows, and inputs that are turned. With
    `copies`, also operands that the copy engine can't load as they lie.
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
    if any(o.dtype not in FLOATS for o in problem.outputs):
        return "A result is not a floating-point tensor of at most 32 bits."
    if device.kind == "cpu":
        return None if dtypes <= set(FLOATS) else f"TileLang's C target has no {dtypes.pop()} here."
    if not dtypes <= set(FLOATS):
        return f"No GEMM for {dtypes.pop()} here."
    if dtypes == {E4M3}:
        return narrow_refusal(problem, device)
    if copied(problem) or (every and dotted(problem)) or (copies and can_be_even(problem)):
        return None
    if dtypes == {"float32"}:
        return "TileLang's fp32 GEMM is TF32, which is not fp32."
    return "An operand's rows don't start at multiples of 16 bytes, so the copy engine can't load it."


def write(graph: Subgraph, config: dict, device: Device, gemms: int, name: str) -> Kernel:
    problem = gemm_problem.read(graph, gemms, turned=True)
    if config.get("weight") == "prepared":
        problem = with_prepared(graph, problem)
    dialect = dialect_for(device.kind, tuple(o.dtype for o in problem.outputs))
    writes = WRITERS.get(config["schedule"], Writer)
    if "residual" in config:
        writes = holding(writes)
    if not _loads_itself(config, problem) and not copied(problem):
        writes = copying(writes)
    if problem.promoted and device.kind == "cuda":
        writes = promoting(writes)
    writer = writes(problem, config, dialect)
    source = writer.source(name)
    return Kernel(build(source, name), writer.params(), source, writer.pass_configs())
