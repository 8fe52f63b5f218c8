"""Runs what a plan does not replace: as it is or through Inductor, each with CUDA graphs or without."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusescout.capture.recompute import run_eagerly
from fusescout.operators import direct
from fusescout.plan import Composition
from fusescout.replay import replayed


def compose(
    captured: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Any], composition: Composition
) -> Callable[..., Any]:
    """A callable for the rewritten graph.

    Args:
        captured: the graph as Dynamo gave it; knows which inputs are parameters.
        rewritten: the ATen graph with the fused operators in it.
        inputs: example inputs, as Dynamo gave them.
        composition: how to run it.
    """
    if composition == "eager":
        return run_eagerly(_without_dispatcher(rewritten)).forward  # a call of the module costs 5 µs more
    _keep_origin(captured, rewritten)
    if composition == "replay":
        return replayed(rewritten, inputs)
    from torch._inductor.compile_fx import compile_fx

    _tell_inductor(rewritten)
    options = {"triton.cudagraphs": True} if composition == "cudagraph" else {}
    compiled: Any = compile_fx(rewritten, list(inputs), config_patches=options)
    return compiled  # type: ignore[no-any-return]


def _without_dispatcher(rewritten: fx.GraphModule) -> fx.GraphModule:
    """Call our operators' functions where no gradient can be asked: torch's dispatcher costs as much as a launch."""
    straight = [(n, call) for n in rewritten.graph.nodes if n.op == "call_function" and (call := direct(n.target))]
    for node, call in straight:
        node.target = call
    if straight:
        rewritten.recompile()
    return rewritten


def _tell_inductor(rewritten: fx.GraphModule) -> None:
    """Make our operators known as calls, as Inductor would itself when it meets them.

    In torch 2.11 it writes out all that their inputs are computed from first, for a log that nobody reads: a chain of
    shared pointwise values is doubled with every use. A DiT's way with CUDA graphs took 38.9 s to build, 2.2 without.
    """
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for target in {n.target for n in rewritten.graph.nodes if getattr(n.target, "namespace", "") == "fusescout"}:
        assert isinstance(target, torch._ops.OpOverload)
        if target not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            lowering.make_fallback(target, layout_constraint=constraint, warn=False)  # type: ignore[no-untyped-call]


def _keep_origin(captured: fx.GraphModule, rewritten: fx.GraphModule) -> None:
    """Carry over what tells AOTAutograd which inputs are parameters: without it a CUDA graph copies all weights."""
    sources = getattr(captured, "_param_name_to_source", None)
    if "dynamo_compile_id" not in captured.meta or sources is None or _has_constants(rewritten):
        return
    rewritten.meta.update(captured.meta)
    rewritten._param_name_to_source = sources
    before = captured.graph.find_nodes(op="placeholder")
    after = rewritten.graph.find_nodes(op="placeholder")
    for new in after[len(before) :]:
        new._dynamo_source = None  # a prepared constant, marked as static
    for old, new in zip(before, after, strict=False):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = old.meta["tensor_dict"]


def _has_constants(module: fx.GraphModule) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
