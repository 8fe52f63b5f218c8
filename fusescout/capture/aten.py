"""Retrace one Dynamo graph to ATen, before autograd and decomposition, on fake tensors.

`linear`, `layer_norm`, `gelu`, `scaled_dot_product_attention` stay whole, gradients flow through the result, and
every node keeps its module and source line. Nothing is computed: no buffer moves, no random number is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch import fx
from torch._guards import TracingContext
from torch._guards import tracing
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast
from torch.amp.autocast_mode import _exit_autocast
from torch.amp.autocast_mode import autocast
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from fusescout.capture.autocast import ExplicitAutocast
from fusescout.capture.autocast import ambient
from fusescout.capture.autocast import state
from fusescout.capture.autocast import uses_autocast
from fusescout.capture.functional import make_functional
from fusescout.capture.literals import fold_literals
from fusescout.capture.mask_contents import note_contents
from fusescout.capture.mask_layout import lay_out_masks
from fusescout.capture.masks import restore
from fusescout.capture.masks import specialise_masks
from fusescout.capture.recompute import drop_empty_policies
from fusescout.capture.recompute import trace_region
from fusescout.capture.visible import Visible
from fusescout.errors import NotCapturable

GIVES_BACK = frozenset(
    {"to", "type_as", "contiguous", "dropout", "feature_dropout", "alpha_dropout", "resolve_conj", "resolve_neg"}
)
"""Operators that return their argument itself where there is nothing to do."""

CONSTANT_MASKS = "constant_masks"
"""Key of a captured module's `meta`: attention masks that were left out as constant, or made dense."""

SPELLED_OUT = {torch.ops.aten.einsum.default: torch.ops.aten.einsum.default.decompose}
"""An einsum is what torch itself makes of it: permutations and one batched product after the other, or sums."""

ACTS_ON_AUTOGRAD = frozenset({"register_hook", "retain_grad", "requires_grad_", "backward"})
"""Tensor methods that change no value: a retraced graph would silently lack them."""


def to_aten(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph in ATen operators, runnable on real inputs in the same order, with gradients.

    Call it under the grad mode and autocast state in which the graph will run (a Dynamo back end already is).
    Autocast becomes explicit casts; `no_grad` regions, in-place operators, views, dropout, batch-norm statistics and
    activation checkpointing stay in the graph. What an operator gives back unchanged (a cast to its own dtype, dropout
    in eval mode) is left out.

    Activation checkpointing is a higher-order operator here, which only Inductor and AOTAutograd run with the random
    state replayed: pass the module through `recompute.run_eagerly` before running it without them.

    Args:
        gm: what Dynamo gave its back end.
        example_inputs: its inputs, real or fake; shapes, strides, dtypes and grad needs are used, and of masks that
            the model keeps the values (`mask_contents.py`).

    Returns:
        A module with `meta["val"]` on every node: a fake tensor with the true `requires_grad`, a tuple of them, or
        None. Its placeholders keep Dynamo's names and `meta["tensor_dict"]`.

    Raises:
        NotCapturable: retracing would change what is computed; the reason says how.
    """
    _refuse_unsupported(gm, example_inputs)
    try:
        result = _retrace(_Plain(gm), example_inputs)
        if uses_autocast(result):
            result = _retrace(ExplicitAutocast(result), example_inputs)
        _specialise(result, example_inputs)
        _drop_identities(result)
        fold_literals(result)
        make_functional(result)
    except NotCapturable:
        raise
    except Exception as error:  # isolation boundary: torch's tracers may fail in any way on a user's graph
        cause = str(error).strip().partition("\n")[0]
        raise NotCapturable(f"retracing to ATen failed with {type(error).__name__}: {cause}") from error
    _refuse_lost(gm, result)
    for new, old in zip(_placeholders(result), _placeholders(gm), strict=True):
        new.meta |= {k: v for k, v in old.meta.items() if k in ("tensor_dict", "nn_module_stack")}
        new._rename(old.name)
        new.target = new.name
    result.recompile()
    note_contents(result, example_inputs)
    return result


def _specialise(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Annotate the graph with constant attention masks gone and the others dense, if nobody can tell from outside.

    Without its mask attention may give other strides (math and fused kernels differ), and so may what follows. That
    shows in the strides of the graph's outputs, in views that no longer fit, and in who shares memory with whom.
    """
    names = {n.name for n in gm.graph.nodes}
    before = Visible.of(gm)
    changed = specialise_masks(gm)
    for node, arguments in lay_out_masks(gm).items():
        changed.setdefault(node, arguments)
    try:
        _annotate(gm, example_inputs)
        kept = Visible.of(gm, names) == before
    except RuntimeError:
        if not changed:
            raise
        kept = False
    if changed and not kept:
        restore(changed)
    if changed:
        gm.graph.eliminate_dead_code(lambda node: node.is_impure() or node.op == "placeholder")
        gm.recompile()
    if kept and changed:
        gm.meta[CONSTANT_MASKS] = len(changed)
    elif not kept:
        _annotate(gm, example_inputs)


class _Plain(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; autocast is entered for real, so that the traced dtypes are true."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _enter_autocast:
            scope = autocast(*args, **kwargs)
            scope.__enter__()  # type: ignore[no-untyped-call]
            return scope
        if target is _exit_autocast:
            return args[0].__exit__(None, None, None)
        if target is tag_activation_checkpoint:
            return trace_region(super().call_function, args, kwargs)
        return super().call_function(target, args, kwargs)


def _retrace(runner: fx.Interpreter, example_inputs: Sequence[Any]) -> fx.GraphModule:
    with _faking(example_inputs) as (mode, inputs), mode, traceback.preserve_node_meta():
        tracer = make_fx(
            lambda *args: runner.run(*args), SPELLED_OUT, pre_dispatch=True, _error_on_data_dependent_ops=False
        )
        return drop_empty_policies(tracer(*inputs))


def _annotate(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Set `meta["val"]` with the true `requires_grad`, which the tracer's own snapshot drops."""

    class Annotator(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            out = super().run_node(n)
            n.meta["val"] = tree_map_only(Tensor, _snapshot, out) if _is_value(out) else None
            n.meta["identity"] = isinstance(out, Tensor) and any(out is self.env.get(a) for a in n.all_input_nodes[:1])
            return out

    _refuse_escaped(gm)
    with _faking(example_inputs) as (mode, inputs), mode:
        Annotator(gm).run(*inputs)


def _drop_identities(gm: fx.GraphModule) -> None:
    """Remove operators that gave back their very argument: the same tensor object then has one name."""
    for node in list(gm.graph.nodes):
        if node.meta.pop("identity", False) and isinstance(node.target, OpOverload) and _packet(node) in GIVES_BACK:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _packet(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _snapshot(tensor: Tensor) -> Tensor:
    copy = tensor.detach()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _is_value(out: Any) -> bool:
    return isinstance(out, (Tensor, tuple, list, int, float, bool))


@contextmanager
def _faking(example_inputs: Sequence[Any]) -> Iterator[tuple[FakeTensorMode, list[Any]]]:
    """A fresh fake world with the inputs in it; grad mode and autocast are put back after."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    grad = torch.is_grad_enabled()
    with (
        state(ambient()),
        unset_fake_temporarily(),
        tracing(TracingContext(mode)),
        torch.set_grad_enabled(grad),
        saved_tensors_hooks(_itself, _itself),  # a checkpoint around the call must not count what is saved here
    ):
        yield mode, [_fake(mode, value) for value in example_inputs]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    with mode:  # a fake of another world: only its description can be taken over
        size, stride = [int(n) for n in value.shape], [int(n) for n in value.stride()]
        twin = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        twin.requires_grad_(value.requires_grad)
        return twin if value.is_leaf else twin.clone()


def _refuse_unsupported(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    for node, value in zip(_placeholders(gm), example_inputs, strict=True):
        seen = node.meta.get("example_value")
        sizes = (*seen.shape, *seen.stride()) if isinstance(seen, Tensor) else (seen,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in (*sizes, value)):
            raise NotCapturable(f"input {node.name} has a dynamic size; captured graphs have fixed shapes")
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            raise NotCapturable(f"input {node.name} is a {type(value).__name__}, not a plain tensor")
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise NotCapturable(f"input {node.name} has layout {value.layout}")
        if not isinstance(value, (Tensor, int, float, bool, type(None))):
            raise NotCapturable(f"input {node.name} is a {type(value).__name__}, not a tensor or number")
    for node in _all_nodes(gm):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        home = getattr(node.target, "__module__", None) or ""
        if home.startswith(("torch._functorch", "torch._C._functorch")):
            raise NotCapturable("the model uses torch.func transforms (vmap, grad, jvp)")
        if (node.op == "call_method" and name in ACTS_ON_AUTOGRAD) or (node.op == "call_function" and "_hook" in name):
            raise NotCapturable(f"{name} inside the model acts on autograd")


def _refuse_escaped(gm: fx.GraphModule) -> None:
    """A fake tensor among the constants is a value whose making the tracer didn't see."""
    for node in _all_nodes(gm):
        if node.op != "get_attr":
            continue
        value = attrgetter(str(node.target))(node.graph.owning_module)
        if isinstance(value, FakeTensor) or (isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)):
            raise NotCapturable(f"the tracer lost track of how {node.name} is computed")


def _refuse_lost(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """A higher-order operator that was traced through has lost its meaning (such as a custom backward)."""
    if not torch.is_grad_enabled():
        return
    lost = _higher_order(before) - _higher_order(after)
    if lost:
        raise NotCapturable(f"{', '.join(sorted(lost))} would be traced through, which changes gradients")


def _higher_order(gm: fx.GraphModule) -> Counter[str]:
    operators = (n.target for n in _all_nodes(gm) if isinstance(n.target, HigherOrderOperator))
    return Counter(str(operator) for operator in operators)


def _all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]
