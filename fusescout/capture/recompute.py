"""Activation checkpointing that is right without a compiler.

Dynamo's operator for it leaves the random state to Inductor: run as it is, dropout inside a checkpointed region draws
anew in the backward pass, and gradients are silently wrong.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint


def run_eagerly(gm: fx.GraphModule) -> fx.GraphModule:
    """Make checkpointed regions of a Dynamo or ATen graph run as `torch.utils.checkpoint` runs them; changes `gm`.

    For modules that are executed directly; AOTAutograd and Inductor need the operator that Dynamo put there.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found = [n for n in module.graph.nodes if n.target is tag_activation_checkpoint]
            for node in found:
                node.target = recomputed
            if found:
                module.recompile()
    return gm


def recomputed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run `body` keeping only its inputs; the backward pass runs it again with the same random state."""
    options, inner = TagActivationCheckpoint.divide_kwargs(kwargs)  # type: ignore[no-untyped-call]
    options["use_reentrant"] = False
    if body.meta.get("_checkpoint_context_fn") is not None:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **inner, **options)
