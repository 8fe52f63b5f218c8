"""A plan that replaces one chain by a TileLang kernel."""

from typing import Any

import torch

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.plan import Entry
from fusescout.plan import Plan


def plan_of_kernel(graph: Subgraph, family: str, variant: dict[str, Any], device: Device) -> Plan:
    """For inference on a device; its one entry is called "product" and is meant for one site."""
    entry = Entry(
        id="product", family=family, chain=list(graph.chain), subgraph=graph.to_json(), contender="tilelang",
        variant=variant, sites=1,
    )  # fmt: skip
    return Plan(
        target="model", mode="inference", device_kind=device.kind, device_name=device.name, torch=torch.__version__,
        entries=[entry],
    )  # fmt: skip
