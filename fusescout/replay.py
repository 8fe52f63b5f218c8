"""Runs a graph by eager operators, captured in a CUDA graph: the same kernels, replayed without their launches.

Inductor has no part in it. AOTAutograd makes the graph free of writes and of views that leave it, with the operators
that eager would end in (no decompositions), and torch's CUDA graph trees capture it: inputs that change are copied in,
parameters and prepared constants are read where they are, outputs live as those of `mode="reduce-overhead"` do.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._guards import TracingContext
from torch._guards import detect_fake_mode
from torch._guards import tracing

from fusescout.errors import NotCapturable

Capture = Callable[[fx.GraphModule, list[Any], Sequence[int]], Callable[..., Any]]


def replayed(module: fx.GraphModule, inputs: Sequence[Any], capture: Capture | None = None) -> Callable[..., Any]:
    """A callable for a graph that records no gradients.

    Args:
        module: the graph; on its inputs must lie what tells parameters (`compose`).
        inputs: example inputs.
        capture: makes a callable of the flat graph, example inputs and the places of those whose address stays. It
            takes the inputs in a list, which it empties. By default a CUDA graph.

    Raises:
        NotCapturable: gradients are recorded, or the graph can't be captured in a CUDA graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses import FakeTensorMode

    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext.try_get() or TracingContext(mode)

    def captured(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        static = context.fw_metadata.static_input_indices if context.fw_metadata else ()
        return (capture or cuda_graph)(graph, given, static)

    with tracing(context):
        made: Any = aot_autograd(
            fw_compiler=_refused, inference_compiler=captured, keep_inference_input_mutations=True
        )(module, list(inputs))
    return made  # type: ignore[no-any-return]


def cuda_graph(graph: fx.GraphModule, inputs: list[Any], static: Sequence[int]) -> Callable[..., Any]:
    """Capture a graph in torch's CUDA graph trees, at its first calls.

    Raises:
        NotCapturable: it can't be.
    """
    from torch._dynamo.backends.cudagraphs import find_input_mutations
    from torch._dynamo.backends.cudagraphs import get_stack_traces
    from torch._inductor.cudagraph_trees import cudagraphify_impl
    from torch._inductor.cudagraph_utils import get_placeholder_info

    written = find_input_mutations(graph.graph)
    if reason := obstacle(graph, written - set(static)):
        raise NotCapturable(reason)
    device = next(iter(_devices(graph)))
    constants = (getattr(graph, str(n.target), None) for n in graph.graph.find_nodes(op="get_attr"))
    made: Any = cudagraphify_impl(
        boxed(graph),
        inputs,
        list(static),
        device_index=device.index,
        is_backward=False,
        is_inference=True,
        stack_traces=get_stack_traces(graph),
        constants=tuple(t for t in constants if isinstance(t, Tensor)),
        placeholders=get_placeholder_info(graph.graph),
        mutated_input_idxs=tuple(sorted(written)),
    )
    made._boxed_call = True
    return made  # type: ignore[no-any-return]


def obstacle(graph: fx.GraphModule, written: set[int]) -> str:
    """Why a graph can't be replayed; empty if it can. `written` are places of inputs that it writes, but of static."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    if written:
        return "it writes its inputs"
    devices = _devices(graph)
    if kinds := {d.type for d in devices} - {"cuda"}:
        return f"some of it is on another device ({', '.join(sorted(kinds))})"
    if len(devices) != 1:
        return "it runs on several GPUs" if devices else "it has no tensors"
    node = get_first_incompatible_cudagraph_node(graph)
    return f"{node.target} can't be captured" if node is not None else ""


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Call a graph with its inputs in a list, which is emptied: nothing else holds them then."""

    def run(inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return graph.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _devices(graph: fx.GraphModule) -> set[torch.device]:
    """Where its values are; what attention gives beside its result, random state on no device, isn't looked at."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return {t.device for t in values if isinstance(t, Tensor) and t.device.type != "meta"}


def _refused(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    raise NotCapturable("it records gradients")
