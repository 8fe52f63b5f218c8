"""Two GEMMs on one input with a pointwise end, such as silu(x Wg^T) * (x Wu^T): both products stay on the chip.

The weights may be packed: one GEMM whose result is cut in two.
"""

from fusescout.templates import gemm_problem
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_epilogue import refusal
from fusescout.templates.gemm_epilogue import write

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Kernel

NAME = "gated_mlp"
FAMILY = "gated_mlp"
GEMMS = 2


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    return refusal(graph, device, GEMMS, every=True)


def configs(graph: Subgraph, device: Device) -> list:
    return space(gemm_problem.read(graph, GEMMS, turned=True), device)


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    return write(graph, config, device, GEMMS, NAME)
