"""Patches a model at every region there is, and compares with the model as it was.

Plans here name the "eager" contender: rewriting, operators, guards and gradients are the real ones and no compiler is
needed. Its results are copied into new tensors, as every kernel's are, so that no result shares memory by luck.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from fusescout.capture import capture
from fusescout.contenders.base import Built
from fusescout.contenders.eager import Eager
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.nest import tensors
from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.workload import build

Inputs = Callable[[], tuple[torch.Tensor, ...]]


def random(*shape: int) -> torch.Tensor:
    """Normal numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _example() -> tuple[torch.Tensor, ...]:
    return (random(4, 8, 16),)


class Base(nn.Module):
    """Two linear layers and a norm of 16 features; `setup` adds what a model needs besides."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.lin2, self.n = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.setup()

    def setup(self) -> None:
        pass


class Models:
    """The models of one test file: `@model(inputs, modes)` adds a class, `cases` lists (name, mode)."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[type[nn.Module], Inputs, tuple[str, ...]]] = {}

    def __call__(
        self, inputs: Inputs = _example, modes: tuple[str, ...] = ("inference", "training")
    ) -> Callable[[Any], Any]:
        def register(kind: Any) -> Any:
            self.known[kind.__name__] = kind, inputs, modes
            return kind

        return register

    def cases(self) -> list[tuple[str, str]]:
        return [(name, mode) for name, (_, _, modes) in self.known.items() for mode in modes]

    def check(self, name: str, mode: str, low_precision: bool = False) -> None:
        """Replace every region of a model; in training its inputs have gradients where they can."""
        torch.manual_seed(0)
        kind, make, _ = self.known[name]
        inputs = tuple(
            t.requires_grad_()
            if mode == "training" and not t._is_view() and (t.is_floating_point() or t.is_complex())
            else t
            for t in make()
        )
        check(kind(), *inputs, mode=mode, sites=1, low_precision=low_precision)


class Fresh(Eager):
    """Eager's numbers in new memory of the captured strides."""

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        built = super().build(graph, variant, device)

        def run(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            results = built.run(inputs)
            return tuple(
                torch.empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype)).copy_(r)
                for s, r in zip(graph.output_specs, results, strict=True)
            )

        return Built(run, built.compile_s)


def fresh_outputs() -> Any:
    return mock.patch("fusescout.patching.contender_named", lambda *_, **__: Fresh())


@dataclass
class Step:
    """What one call made: outputs, gradients of inputs and parameters, buffers after it."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    raw: Any


def plan_of(model: nn.Module, *args: Any, mode: str = "inference", families: Sequence[str] = (), **kwargs: Any) -> Plan:
    """A plan of all regions of all graphs of one call."""
    training = [(m, m.training) for m in model.modules()]
    found = capture(build(model, args, kwargs, mode=mode))
    for module, flag in training:
        module.training = flag
    entries: dict[tuple[str, str], Entry] = {}
    for captured in found.graphs:
        for region in find_regions(captured.graph):
            if families and region.family not in families:
                continue
            subgraph, _ = captured.graph.subgraph(region.nodes)
            entries[region.family, subgraph.key] = Entry(
                id=f"{region.family}-{subgraph.key[:8]}", family=region.family, chain=list(subgraph.chain),
                subgraph=subgraph.to_json(), contender="eager", variant={}, sites=1,
            )  # fmt: skip
    return Plan(
        target="model", mode=mode, device_kind="cpu", device_name=describe_device("cpu").name,
        torch=torch.__version__, entries=list(entries.values()),
    )  # fmt: skip


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, seed: int = 0) -> Step:
    """One call on copies of the arguments; in training with a backward pass that tells all elements apart."""
    args, kwargs = copy.deepcopy((args, kwargs))
    given = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
    torch.manual_seed(seed)
    with torch.set_grad_enabled(mode == "training"):
        raw = model(*args, **kwargs)
        outputs = list(tensors(raw))
    gradients: list[torch.Tensor | None] = []
    if mode == "training":
        generator = torch.Generator().manual_seed(9)
        moving = [t for t in outputs if t.requires_grad]
        weights = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in moving]
        wanted = [t for t in (*given, *model.parameters()) if t.requires_grad]
        gradients = list(torch.autograd.grad(moving, wanted, weights, allow_unused=True)) if wanted else []
    return Step(
        [t.detach().clone() for t in (*outputs, *given)],
        [g if g is None else g.detach().clone() for g in gradients],
        [b.clone() for b in model.buffers()],
        raw,
    )


def same(expected: Step, got: Step, *, exact: bool = True, low_precision: bool = False) -> None:
    """Equal bit for bit (NaN equals NaN), in dtype, shape and, for outputs, strides; or close.

    Gradients of several uses are added in another order, so they are close only: to the size of the whole gradient
    where they meet in bfloat16 (`low_precision`).
    """
    assert len(expected.outputs) == len(got.outputs)
    assert type(expected.raw) is type(got.raw)
    for name in ("outputs", "gradients", "buffers"):
        for k, (a, b) in enumerate(zip(getattr(expected, name), getattr(got, name), strict=True)):
            if a is None or b is None:
                assert a is b, f"{name} {k}: one has a value"
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} {k}"
            tolerance: dict[str, float] = {}
            if name != "gradients":
                tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
            elif low_precision:
                tolerance = {"rtol": 0.02, "atol": 0.02 * float(a.abs().max())}
            torch.testing.assert_close(b, a, equal_nan=True, msg=lambda m, n=name, k=k: f"{n} {k}: {m}", **tolerance)
    for a, b in zip(tensors(expected.raw), tensors(got.raw), strict=True):
        assert a.requires_grad == b.requires_grad
        assert _strides(a) == _strides(b)


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def restore(model: nn.Module, buffers: Sequence[torch.Tensor]) -> None:
    for buffer, old in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(old)


def check(
    model: nn.Module,
    *args: Any,
    mode: str = "inference",
    composition: Composition = "eager",
    sites: int | None = None,
    low_precision: bool = False,
    families: Sequence[str] = (),
    then: Callable[[Patched], None] | None = None,
    **kwargs: Any,
) -> Patched:
    """Patch every region, compare one call (twice) with the unpatched model's, undo; the model is left untouched.

    Args:
        sites: how many sites at least must have been replaced, so that a test can't pass by doing nothing.
        low_precision: gradients of this model meet in bfloat16.
    """
    torch._dynamo.reset()
    model.train(mode == "training")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = [b.clone() for b in model.buffers()]
    identity = [id(t) for t in (*model.parameters(), *model.buffers())]
    attributes = {n: set(vars(m)) | {"_compiled_call_impl"} for n, m in model.named_modules()}
    plan = plan_of(model, *args, mode=mode, families=families, **kwargs)
    assert all(torch.equal(v, before[k]) or v.isnan().any() for k, v in model.state_dict().items()), "capture wrote"
    expected = step(model, args, kwargs, mode)
    restore(model, buffers)
    with fresh_outputs():
        handle = patch(model, plan, composition=composition)
        for _ in range(2):
            same(expected, step(model, args, kwargs, mode), exact=composition == "eager", low_precision=low_precision)
            restore(model, buffers)
        if then is not None:
            then(handle)
        handle.undo()
    assert identity == [id(t) for t in (*model.parameters(), *model.buffers())]
    for name, module in model.named_modules():
        assert set(vars(module)) | {"_compiled_call_impl"} == attributes[name]
    if sites is not None:
        assert handle.counters.sites >= sites, handle.counters.fallbacks
    return handle
