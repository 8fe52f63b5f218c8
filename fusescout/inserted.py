"""Times the copies that a layout brings in: the profile is of the model as its author wrote it, which lacks them.

PyTorch copies between orders with one side in pieces: 67 MB of bfloat16 took 150 us to channels-last memory on an H200,
where the bytes need 33. Without a time such a copy would never be a candidate.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor
from torch import fx

from fusescout.capture import Capture
from fusescout.capture.encode import target_name
from fusescout.hoisting import MARK
from fusescout.measure import MIN_ROUNDS
from fusescout.measure import interleave
from fusescout.tails import stand_in

BUDGET_S = 0.2


def copy_times(before: Capture, after: Capture, device: str) -> dict[tuple[int, str], float]:
    """Time each copy that the graphs of `after` have and those of `before` lack, on memory like its own.

    Args:
        before: the graphs as captured.
        after: the same graphs, laid out anew.
        device: where they run.

    Returns:
        µs of one step, by number of the graph and name of the node. Copies of constants, made once, are left out.
    """
    found: dict[tuple[int, str], float] = {}
    each_us: dict[tuple[object, ...], float] = {}
    for old, new in zip(before.graphs, after.graphs, strict=True):
        known = {node.name for node in old.module.graph.nodes}
        for node in new.module.graph.nodes:
            if node.name in known or target_name(node) != "aten.clone.default" or node.meta.get(MARK):
                continue
            source: Tensor = node.all_input_nodes[0].meta["val"]
            key = (tuple(source.shape), source.stride(), source.dtype, source.device, node.kwargs.get("memory_format"))
            if key not in each_us:
                each_us[key] = _time_us(node, source, device)
            found[new.index, node.name] = each_us[key] * new.calls
    return found


def _time_us(node: fx.Node, source: Tensor, device: str) -> float:
    def copy(inputs: object) -> None:
        with torch.no_grad():
            node.target(inputs[0], **node.kwargs)  # type: ignore[operator, index]

    timings = interleave([copy], [stand_in(source)], device, rounds=MIN_ROUNDS, budget_s=BUDGET_S, graphs=False)
    return median(timings.samples[0])
