"""torch's CUDA graph trees after one way to run a model failed in them.

All CUDA graphs that `torch.compile` makes on a device share one manager and one memory pool. What raises in its first
run, or while it is captured, leaves both half way: a node that never ran to its end counts as the last one run (on that
torch 2.11 fails in the next call of any CUDA graph of the process, with an assertion), the allocator refuses the next
capture since this one never ended, and the capture's stream stays the current one.

On an H200 with torch 2.11 all goes on after a failure in a run. After one in a capture, what was captured before goes
on, but later captures are refused ("already recording to mempool_id") for a reason not found: those ways are lost.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch


def mend(device: str) -> None:
    """Let the CUDA graphs of other ways go on after a failure on `device`; nothing to do where no graph was made."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not device.startswith("cuda"):
        return
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    manager = trees.get_manager(index, create_if_none_exists=False)
    if manager is not None:
        drop_unfinished(manager, trees)
        _end_capture(manager, index)


def drop_unfinished(manager: Any, trees: Any) -> None:
    """Go back to the last node of the manager's path that ran to its end; attributes that a torch lacks are let be."""
    before: Any = getattr(manager, "current_node", None)
    node = before
    while _is_unfinished(node):
        node = node.parent
    if node is before:
        return
    manager.current_node = node
    state = getattr(trees, "ExecutionState", None)
    if node is None or state is None:  # without a node torch sets the state itself
        return
    # What a replayed graph left was written into the allocator's books for the run that failed, as after a recording.
    manager.path_state = state.WARMUP if isinstance(node, trees.CUDAWarmupNode) else state.RECORDING


def _is_unfinished(node: Any) -> bool:
    """Whether it lacks the outputs it should have: the comparison that torch asserts."""
    made, expected = getattr(node, "tensor_weakrefs", None), getattr(node, "stack_traces", None)
    return made is not None and expected is not None and len(made) != len(expected)


def _end_capture(manager: Any, index: int) -> None:
    """What `CUDAGraph::capture_end` and `torch.cuda.graph` leave undone where CUDA calls the capture invalid."""
    pool = getattr(manager, "cuda_graphs_thread_pool", None)
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if pool is not None and end is not None and release is not None:
        with suppress(RuntimeError):  # none is under way
            end(index, pool)
            release(index, pool)
    stream = getattr(manager, "stream", None)
    if stream is not None and torch.cuda.current_stream(index) == stream:
        default = torch.cuda.default_stream(index)
        default.wait_stream(stream)
        torch.cuda.set_stream(default)
