"""Applies a plan to a live model, and takes it back.

It works on the instance, as `nn.Module.compile` does: Dynamo captures each graph with its guards (shapes, dtypes,
strides, train/eval, grad mode), the planned chains are replaced, the rest runs as the plan's composition says. The
class, the parameters, `state_dict` keys, hooks and `deepcopy` stay as they were. A call that no guard fits is captured
anew; chains of it that the plan doesn't know run as the framework runs them and are counted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from typing import get_args

import torch
from torch import fx
from torch import nn
from torch._dynamo.convert_frame import compile_lock

from fusescout.capture.aten import CONSTANT_MASKS
from fusescout.capture.aten import to_aten
from fusescout.capture.encode import encode_graph
from fusescout.capture.recompute import run_eagerly
from fusescout.compose import compose
from fusescout.config import DISABLE
from fusescout.config import disabled
from fusescout.config import load
from fusescout.contenders import contender_named
from fusescout.contenders.base import Contender
from fusescout.counters import Counters
from fusescout.device import Device
from fusescout.errors import CompositionUnavailable
from fusescout.errors import ContenderFailed
from fusescout.errors import NotCapturable
from fusescout.errors import PlanMismatch
from fusescout.errors import UsageProblem
from fusescout.errors import in_a_line
from fusescout.flops import op_class
from fusescout.hoisting import Hoisted
from fusescout.hoisting import Kept
from fusescout.hoisting import hoist
from fusescout.ir import Graph
from fusescout.ir import Subgraph
from fusescout.layout import WAYS
from fusescout.livecall import live_call
from fusescout.newshapes import NewShapes
from fusescout.newshapes import Policy
from fusescout.newshapes import Replaceable
from fusescout.once import Once
from fusescout.once import compute_once
from fusescout.operators import define
from fusescout.plan import GRAPHED
from fusescout.plan import LAYOUTS
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.restride import copy_of
from fusescout.rewrite import Prepared
from fusescout.rewrite import rewrite
from fusescout.watched import Watched
from fusescout.watched import left_for_contents
from fusescout.watched import rests_on_contents

Trace = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]
NOT_PLANNED = "no chain of it is in the plan"
OTHER_MASKS = "an attention mask holds something else than the plan rests on, so the framework heeds it"


class Backend:
    """A Dynamo back end that carries out a plan."""

    def __init__(
        self,
        plan: Plan,
        device: Device | None = None,
        cache_dir: Path | None = None,
        policy: Policy = "fallback",
    ) -> None:
        if plan.composition in GRAPHED and plan.device_kind != "cuda":
            why = f"CUDA graphs need a GPU, and the plan is for {plan.device_kind}"
            raise CompositionUnavailable(plan.composition, why)
        self.plan = plan
        self.cache_dir = cache_dir or load().cache_dir
        self.device = device or describe_device(plan.device_kind)
        self.counters = Counters()
        self.new_shapes = NewShapes(policy, plan, self.device, self.counters, self.cache_dir)
        self.hoisted: list[Hoisted] = []
        self.watched: list[Watched] = []
        self._kept: dict[str, Kept] = {}
        self._operators: dict[str, Any] = {}
        self._lock = threading.RLock()

    def __call__(self, module: fx.GraphModule, inputs: list[Any], trace: Trace = to_aten) -> Callable[..., Any]:
        """Carry out the plan in one graph; `trace` brings it to ATen, and may have done so before."""
        with self._lock:
            self.counters.captures += 1
            number = self.counters.captures - 1
            if disabled():
                self.counters.fallbacks[f"graph {number}"] = f"{DISABLE} is set"
                return run_eagerly(module)
            try:
                aten = trace(module, inputs)
                watched = Watched(aten)
                once = compute_once(aten) if self.plan.computed_once else Once()
                relaid = self._relaid(number, aten)
                graph = encode_graph(aten, number)
            except NotCapturable as error:
                self.counters.fallbacks[f"graph {number}"] = error.reason
                return self._compose(number, module, module, inputs)
            masks = aten.meta.get(CONSTANT_MASKS, 0) if self.plan.constant_masks else 0
            self.counters.masks += masks
            changed = relaid or masks > 0 or bool(once)
            self._keep(once)
            inputs = once.extended(inputs)
            unknown = self.new_shapes.counterparts(graph)
            if not unknown:
                return once.bind(self._carried_out(number, module, aten, graph, inputs, changed, watched))
            original, gradients = fx.GraphModule(aten, copy.deepcopy(aten.graph)), torch.is_grad_enabled()
            run = Replaceable(self._carried_out(number, module, aten, graph, inputs, changed, watched))

            def again() -> None:
                examples = [node.meta["val"] for node in original.graph.find_nodes(op="placeholder")]
                try:
                    with compile_lock, self._lock, torch.set_grad_enabled(gradients):  # in Dynamo's order
                        encoded = encode_graph(original, number)
                        run.current = self._carried_out(number, module, original, encoded, examples, changed, watched)
                except Exception as error:  # isolation boundary: it may run in a call, which goes on as before
                    self.new_shapes.failed(error)

            def replace() -> None:
                if self.plan.composition != "eager" or any(e.contender == "inductor" for e in self.new_shapes.entries):
                    run.due = again
                else:
                    again()

            self.new_shapes.submit(unknown, replace)
            return once.bind(run)

    def _keep(self, once: Once) -> None:
        self.counters.computed_once += once.operators
        self.hoisted += once.hoisted
        for lot in once.hoisted:
            lot.share(self._kept)

    def _carried_out(
        self,
        number: int,
        module: fx.GraphModule,
        aten: fx.GraphModule,
        graph: Graph,
        inputs: list[Any],
        changed: bool,
        watched: Watched,
    ) -> Callable[..., Any]:
        """The graph with all it has of the plan replaced; `changed` says that it differs from Dynamo's already."""
        entries = (*self.plan.entries, *self.new_shapes.entries)
        done = rewrite(aten, graph, entries, lambda e, _: self._operator(e))
        made = {replacement.entry for replacement in done}
        watching = [entry for entry in entries if rests_on_contents(entry)]
        missing = [entry for entry in watching if entry.id not in made]
        self.counters.fallbacks |= dict.fromkeys(left_for_contents(graph, missing), OTHER_MASKS)
        for replacement in done:
            self.counters.replaced[replacement.entry] = self.counters.replaced.get(replacement.entry, 0) + 1
        if not done and not changed and not entries and self.plan.composition != "eager":
            return self._compose(number, module, module, inputs)  # as planned: the model is left to it
        if not done and not changed:
            self.counters.fallbacks.setdefault(f"graph {number}", NOT_PLANNED)
            return self._counted(self._compose(number, module, module, inputs))
        if self.counters.fallbacks.get(f"graph {number}") == NOT_PLANNED:  # it was, before its shapes were learned
            del self.counters.fallbacks[f"graph {number}"]
        hoisted = hoist(aten)
        if hoisted is None:
            run = self._compose(number, module, aten, inputs)
        else:
            self.hoisted.append(hoisted)
            run = hoisted.bind(self._compose(number, module, aten, [*inputs, *hoisted.examples(inputs)]))
        if watched.may_change and made.intersection(entry.id for entry in watching):
            self.watched.append(watched)
            return watched.bind(run, self._with_other_masks(number, module))
        return run

    def _with_other_masks(self, number: int, module: fx.GraphModule) -> Callable[..., Any]:
        """The graph as the framework runs it, counted; it is given kept values after its own inputs."""
        plain, own = copy_of(module), len(module.graph.find_nodes(op="placeholder"))

        def call(*inputs: Any) -> Any:
            self.counters.fallbacks[f"masks of graph {number}"] = OTHER_MASKS
            self.counters.framework_calls += 1
            return plain(*inputs[:own])

        run_eagerly(plain)
        return call

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        counters = self.counters

        def call(*inputs: Any) -> Any:
            counters.framework_calls += 1
            return run(*inputs)

        return call

    def _relaid(self, number: int, aten: fx.GraphModule) -> bool:
        """Bring the graph into the plan's memory layout; whether that changed anything."""
        if self.plan.memory_format == "preserved":
            return False
        reason = WAYS[self.plan.memory_format].rewrite(aten)
        if reason:
            self.counters.fallbacks[f"memory format of graph {number}"] = reason
            return False
        self.counters.relaid += 1
        self.counters.layout = LAYOUTS[self.plan.memory_format]
        return True

    def _compose(
        self, number: int, module: fx.GraphModule, rewritten: fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        if self.plan.composition != "eager" and _is_recurrent(rewritten):
            self.counters.fallbacks[f"graph {number}"] = (
                f"{self.plan.composition} would unroll a recurrent layer step by step; the graph runs eagerly"
            )
            return run_eagerly(rewritten)
        try:
            return compose(module, rewritten, inputs, self.plan.composition)
        except Exception as error:  # isolation boundary: the compiler may fail on any graph; the model must still run
            if self.plan.composition == "eager":
                raise
            refused = error.reason if isinstance(error, NotCapturable) else ""
            why = f"can't run it: {refused}" if refused else f"failed with {in_a_line(error)}"
            self.counters.fallbacks[f"graph {number}"] = f"{self.plan.composition} {why}; the graph runs eagerly"
            return run_eagerly(rewritten)

    def _contender(self, name: str) -> Contender:
        return contender_named(name, self.plan.templates, cache_dir=self.cache_dir)

    def _operator(self, entry: Entry) -> Any:
        """The entry's kernel, built once as an operator or a `Prepared`; None, counted, where that fails."""
        if entry.id in self._operators:
            return self._operators[entry.id]
        subgraph = Subgraph.from_json(entry.subgraph)
        try:
            built = self._contender(entry.contender).build(subgraph, entry.variant, self.device)
        except ContenderFailed as error:
            self.counters.fallbacks[entry.id] = str(error)
            self._operators[entry.id] = None
            return None
        name, kind = operator_name(entry), self.plan.device_kind
        if built.parts is None:
            made = define(name, subgraph, built.run, kind, built.call)
        else:
            split = built.parts.split
            made = Prepared(
                split,
                define(f"{name}_prepare", split.prepare, built.parts.prepare, kind),
                define(f"{name}_steady", split.steady, built.parts.steady, kind),
            )
        return self._operators.setdefault(entry.id, made)


def operator_name(entry: Entry) -> str:
    variant = hashlib.sha256(json.dumps(entry.variant, sort_keys=True).encode()).hexdigest()
    return f"{entry.family}_{entry.key[:12]}_{entry.contender}_{variant[:8]}"


def _is_recurrent(module: fx.GraphModule) -> bool:
    names = (getattr(n.target, "__name__", "").split(".")[0] for n in module.graph.nodes if n.op == "call_function")
    return any(op_class(f"aten.{name}.default") == "rnn" for name in names)


class Patched:
    """A patched model's handle. `undo()` takes the patch back; as a context manager it does so at the end."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.model = model
        self.counters = backend.counters
        self._backend = backend
        self._undone = False
        self._before = vars(model).get("_compiled_call_impl")
        self._ours = model._compiled_call_impl = live_call(model, backend, backend.counters, self.refresh)
        self._ours.patch = self  # type: ignore[attr-defined]

    @property
    def plan(self) -> Plan:
        """The plan, with what was taken up at new shapes since: saved, it spares the next process that work."""
        plan = self._backend.plan
        return plan.model_copy(update={"entries": [*plan.entries, *self._backend.new_shapes.entries]})

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do for new shapes; False if that takes longer than the timeout."""
        return self._backend.new_shapes.wait(timeout_s)

    def refresh(self) -> None:
        """Make anew what was prepared of parameters; needed only after a write through `.data`, which torch hides."""
        for hoisted in self._backend.hoisted:
            hoisted.forget()
        for watched in self._backend.watched:
            watched.forget()

    def undo(self) -> None:
        """Give the model back the call it had, in any order with other patches. Calling it twice does nothing more."""
        self._undone = True
        self._backend.new_shapes.stop()
        if getattr(self.model, "_compiled_call_impl", None) is self._ours:
            before = self._before
            while isinstance(earlier := getattr(before, "patch", None), Patched) and earlier._undone:
                before = earlier._before
            self.model._compiled_call_impl = before
            if before is None:
                del self.model._compiled_call_impl  # the class has it as None

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    composition: Composition | None = None,
    policy: Policy = "fallback",
) -> Patched:
    """Replace a model's planned chains by their fused kernels, on this instance only.

    Args:
        model: the live model, on the device the plan was made for.
        plan: a `Plan`, or the path of a plan file or run folder.
        composition: run the rest this way instead of the plan's.
        policy: what becomes of planned chains at shapes that the plan doesn't have. "fallback" runs them as the
            framework does. The others do so only until a background thread, with a child process, is done, and stop at
            `undo()`; where the rest is compiled, a later call compiles it anew. "nearest" takes the kernel of the
            nearest planned shape, built anew and verified but not timed; "adaptive" races the chain as an analysis does
            (with quick effort) and takes the winner.

    Raises:
        PlanUnreadable: the file is no plan.
        PlanMismatch: it was measured on another device.
        UsageProblem: there is no such composition.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(Path(plan))
    if composition is not None:
        if composition not in (known := get_args(Composition)):
            raise UsageProblem(
                f"There is no composition {composition!r}.",
                f"There are {', '.join(known)}.",
                "Leave it out: the plan has one.",
            )
        plan = plan.composed(composition)
    where = next((t.device.type for t in model.parameters()), None) or next(
        (t.device.type for t in model.buffers()), None
    )
    if where is not None and where != plan.device_kind:
        raise PlanMismatch("device", plan.device_kind, where)
    device = describe_device(plan.device_kind)
    if device.name != plan.device_name:
        raise PlanMismatch("device", plan.device_name, device.name)
    return Patched(model, Backend(plan, device, policy=policy))


@contextmanager
def patched(model: nn.Module, plan: Plan | str | Path) -> Iterator[Patched]:
    """`with fusescout.patched(model, plan): …` patches inside the block only."""
    handle = patch(model, plan)
    try:
        yield handle
    finally:
        handle.undo()
