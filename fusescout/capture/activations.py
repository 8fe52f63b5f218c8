"""Real values of captured nodes, for verification on what the model really computes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.capture import CapturedGraph
from fusescout.capture.encode import writes
from fusescout.capture.protect import copy_tensor


def record(captured: CapturedGraph, names: Collection[str]) -> dict[str, Tensor]:
    """Values of the named nodes for the captured inputs, as copies with their strides and address alignment.

    Runs the captured module once without gradients. Inputs that it writes (batch-norm statistics) and the random
    state are put back.

    Raises:
        KeyError: a name that isn't a single tensor of this graph.
    """
    devices = [t.device.index or 0 for t in captured.inputs if isinstance(t, Tensor) and t.device.type == "cuda"]
    runner = _Recorder(captured.module, frozenset(names), captured.inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=sorted(set(devices))):
        try:
            runner.run(*captured.inputs)
        finally:
            for tensor, old in reversed(runner.undo):
                tensor.copy_(old)
    missing = sorted(set(names) - set(runner.found))
    if missing:
        raise KeyError(f"no tensor named {', '.join(missing)} in graph {captured.index}")
    return runner.found


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: frozenset[str], inputs: tuple[Any, ...]) -> None:
        super().__init__(module)
        self.names = names
        self.storages = {_storage(t) for t in inputs if isinstance(t, Tensor)}
        self.found: dict[str, Tensor] = {}
        self.undo: list[tuple[Tensor, Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        if writes(n):
            touched = (self.env.get(a) for a in n.all_input_nodes)
            self.undo += [(t, t.clone()) for t in touched if isinstance(t, Tensor) and _storage(t) in self.storages]
        out = super().run_node(n)
        if n.name in self.names and isinstance(out, Tensor):
            self.found[n.name] = copy_tensor(out.detach())
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
