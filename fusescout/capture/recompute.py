"""Activation checkpointing that is right without a compiler.

Dynamo's operator for it leaves the random state to Inductor: run as it is, dropout inside a checkpointed region draws
anew in the backward pass, and gradients are silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

POLICY = "_checkpoint_context_fn"
"""Where torch keeps a region's selective-checkpointing policy, in its module's `meta`."""


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
    if body.meta.get(POLICY) is not None:
        options["context_fn"] = body.meta[POLICY]
    # Dynamo made buffers arguments; the region may write them, which autograd forbids for arguments it saves.
    moving = [k for k, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    fixed = {k: a for k, a in enumerate(args) if k not in moving}

    def run(*given: Any) -> Any:
        values = fixed | dict(zip(moving, given, strict=True))
        return body(*(values[k] for k in range(len(values))), **inner)

    return checkpoint(run, *(args[k] for k in moving), **options)


class _Meta(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        return None


def trace_region(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call` the operator under a tracer; torch's rule for it takes it that the region has a policy."""
    body, meta = args[0], args[0].meta
    try:
        body.meta = _Meta(meta)
        return call(tag_activation_checkpoint, args, kwargs)
    finally:
        body.meta = meta


def drop_empty_policies(gm: fx.GraphModule) -> fx.GraphModule:
    """Take back the empty policy that `trace_region` made torch write on traced regions."""
    for body in gm.modules():
        if isinstance(body, fx.GraphModule) and body.meta.get(POLICY, body) is None:
            del body.meta[POLICY]
    return gm
