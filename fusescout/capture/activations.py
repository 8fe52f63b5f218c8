"""Real values of captured nodes, for verification on what the model really computes."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import fx

from fusescout.capture.encode import writes
from fusescout.capture.protect import copy_tensor
from fusescout.capture.protect import random_devices

if TYPE_CHECKING:
    from fusescout.capture.capture import CapturedGraph


def record(captured: CapturedGraph, names: Collection[str]) -> dict[str, Tensor]:
    """Values of the named nodes for the captured inputs, as copies with their strides and address alignment.

    Raises:
        KeyError: a name that isn't a single tensor of this graph.
    """
    _, found = run_untouched(captured.module, captured.inputs, names)
    missing = sorted(set(names) - set(found))
    if missing:
        raise KeyError(f"no tensor named {', '.join(missing)} in graph {captured.index}")
    return found


def run_untouched(
    module: fx.GraphModule, inputs: Sequence[Any], names: Collection[str] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """Run an ATen module once without gradients: its output, and copies of the named values.

    Inputs that it writes (batch-norm statistics, caches) and the random state are put back.
    """
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    runner = _Recorder(module, frozenset(names), {_storage(t) for t in tensors})
    with torch.no_grad(), torch.random.fork_rng(devices=random_devices(tensors)):
        try:
            return runner.run(*inputs), runner.found
        finally:
            for tensor, old in reversed(runner.undo):
                tensor.copy_(old)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: frozenset[str], storages: set[int]) -> None:
        super().__init__(module)
        self.names = names
        self.storages = storages
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
