"""Input tensors of a sub-graph for checking and timing, in exactly the strides and alignment it was captured with.

Every tensor gets its own storage. What lies in the storage between and before the tensor's elements is NaN, so a
kernel that reads where it must not gives itself away, and one that writes there changes bytes that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fusescout.causal import Positions
from fusescout.causal import special_positions
from fusescout.convolution import CONVOLUTIONS
from fusescout.flops import op_class
from fusescout.ir import FLOAT8
from fusescout.ir import FLOATS
from fusescout.ir import LOWER
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.scaled import scaled

FLOATING = FLOATS | FLOAT8
QUICK = ("captured", "normal", "special")
"""Cases every variant must pass before it is timed."""
FULL = ("captured", "normal", "like", "shuffled", "small", "large", "nan", "+inf", "-inf", "constant")
"""Cases the best variant of a contender must pass."""
SPECIAL = ("nan", "+inf", "-inf", "special")
TIMING, FRESH = "captured", "shuffled"
SPREAD = 32.0
"""Deviation of 8-bit floats that were not captured: of e4m3, from its smallest numbers to a third of its largest."""


def save(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write the captured inputs of one sub-graph; views are cut out of the storage they share."""
    torch.save([t.detach().to("cpu", copy=True) for t in tensors], path)


def place(value: Tensor, spec: TensorSpec, device: str) -> Tensor:
    """`value` copied into new memory with the strides and alignment of `spec`."""
    lead = 0 if spec.aligned else 1
    span = 0 if spec.numel == 0 else 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    dtype = getattr(torch, spec.dtype)
    storage = torch.zeros(lead + span, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        storage.fill_(float("nan"))
    view = storage.as_strided(spec.shape, spec.stride, lead)
    source = value.to(device=device, dtype=dtype).expand(spec.shape)
    for dim, (n, s) in enumerate(zip(spec.shape, spec.stride, strict=True)):
        if s == 0 and n > 1:  # one element seen many times: write it once
            view, source = view.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if _overlaps(view):
        offsets = torch.zeros((), dtype=torch.int64, device=device)
        for n, s in zip(view.shape, view.stride(), strict=True):
            offsets = offsets[..., None] + torch.arange(n, device=device) * s
        storage[lead + offsets.flatten()] = source.flatten()
    else:
        view.copy_(source)
    return storage.as_strided(spec.shape, spec.stride, lead)


def raw(tensor: Tensor) -> Tensor:
    """Every byte of the tensor's storage, gaps included, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class InputSource:
    """Makes the inputs of any case, the same for the same name and seed.

    Args:
        graph: the sub-graph.
        captured: values seen at run time, in input order; None where there are none.
        device: where the tensors live, such as "cpu" or "cuda".
        seed: base of every random choice.
    """

    def __init__(self, graph: Subgraph, captured: Sequence[Tensor] | None, device: str, seed: int) -> None:
        self.graph, self.captured, self.device, self.seed = graph, captured, device, seed

    def names(self, level: str) -> tuple[str, ...]:
        """Cases of "quick" or "full" that make sense for this sub-graph."""
        floats = any(s.dtype in FLOATING for s in self.graph.inputs)
        names: tuple[str, ...] = QUICK if level == "quick" else FULL
        if self.captured is None:
            names = tuple(n for n in names if n not in ("captured", "like", "shuffled"))
        return names if floats else tuple(n for n in names if n in ("captured", "normal", "like", "shuffled"))

    def make(self, case: str, draw: int = 0) -> list[Tensor]:
        """Inputs of one case. `draw` above 0 gives other values of the same kind and size.

        "captured": as seen · "normal": standard normal · "like": normal with the captured mean and deviation ·
        "shuffled": the captured values at other places · "small", "large": captured scaled by 1e-3 and 1e3 within the
        dtype's range · "nan", "+inf", "-inf": one such value in each floating input · "special": all three ·
        "constant": every row holds one value that needs few bits, so that its sums are exact.

        Parameters of convolutions and batch norms, and constants that are multiplied or added behind a convolution or
        linear, are the captured ones at other places in every case: scaled, infinite or negative ones are no model's,
        and a folded weight need not do with them what the two operators do. A mask that is known to hold a causal order
        holds it in every case.

        The values of causal attention get NaN and infinities at their first position, which every query sees: what a
        hidden one does (0 * NaN) depends on how many positions a library's kernel takes at a time. Its queries and keys
        are scaled up by 8 only: of scores of 1e6 attention picks one by rounding error, and the library's own error is
        29 where values are up to 80 (T5-base in bf16, H200). Where causal attention is written out, with a mask that is
        known, queries and keys get NaN and infinities at late positions: a query that sees nothing but scores of minus
        infinity, as the first ones soon would, gets 0 of the built-in attention and NaN of a softmax.

        8-bit floats reach from their subnormals to near their largest in every case, and NaN only where that is asked
        for. The scales of their products are positive; a single one stays finite, as all results are of it.
        """
        if self.captured is None and case in ("captured", "like", "shuffled"):
            case = "normal"
        order = sum(map(ord, case))
        made = []
        for k, spec in enumerate(self.graph.inputs):
            generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + order * 1009 + k * 31 + draw)
            seen = None if self.captured is None else self.captured[k]
            role = _parameter(self.graph, k)
            if spec.content:
                value = _order(spec, self.device)
            elif role == "scale":
                value = _scale(case, spec, seen, generator)
            elif role and case != "captured":
                value = _value("normal" if seen is None else "shuffled", spec, seen, generator)
            else:
                factor = 8.0 if makes_scores(self.graph, k) else 1e3
                part = (-2, 0, 1) if _is_causal_value(self.graph, k) else special_positions(self.graph, k)
                value = _value(case, spec, seen, generator, factor, part)
            if role == "variance" and seen is None:
                value = value.abs() + 2**-6
            if draw and spec.dtype in FLOATS and role != "scale":
                noise = torch.rand(value.shape, generator=generator, device=self.device)
                value = value * (1 + noise.to(value.dtype) / 64)
            made.append(place(value, spec, self.device))
        return made


def _parameter(graph: Subgraph, index: int) -> str:
    """ "parameter" or "variance" for constants that only what can be folded reads, "scale" for one of a product of
    8-bit floats, else nothing."""
    products = [found for op in graph.ops if (found := scaled(op, graph.value))]
    if any(Ref(index) in (found.scale_a, found.scale_b) for found in products):
        return "scale"
    if not graph.inputs[index].constant:
        return ""
    folded = {*CONVOLUTIONS, "batch_norm"}
    if any(op.name in (*CONVOLUTIONS, "linear") for op in graph.ops):
        folded |= {"add", "sub", "mul", "div"}
    users = [op for value in graph.users(index) if (op := graph.op_of(value))]
    if any(op.name not in folded for op in users) or any(_is_data(op, index) for op in users):
        return ""
    return "variance" if any(op.name == "batch_norm" and op.args[4] == Ref(index) for op in users) else "parameter"


def _is_data(op: Op, index: int) -> bool:
    """Whether an operator with parameters takes this value as what they are for."""
    return op.name in (*CONVOLUTIONS, "batch_norm") and op.args[0] == Ref(index)


def makes_scores(graph: Subgraph, index: int) -> bool:
    """Whether an input is multiplied into scores whose softmax weighs other values, as queries and keys are."""
    before, scores, weights = {index}, set[int](), set[int]()
    for value, op in enumerate(graph.ops, len(graph.inputs)):
        read, kind = {int(i) for i in op.inputs}, op_class(op.target)
        if kind == "attention" and before & {int(i) for i in op.inputs[:2]}:
            return True
        if kind == "gemm" and weights & read:
            return True
        if kind == "gemm" and before & read:
            scores.add(value)
        elif weights & read or (kind == "softmax" and scores & read):
            weights.add(value)
        elif scores & read:
            scores.add(value)
        elif before & read:
            before.add(value)
    return False


def _is_causal_value(graph: Subgraph, index: int) -> bool:
    """Whether causal attention takes this input as its values, at most after views that repeat heads."""
    reach = {index}
    for value, op in enumerate(graph.ops, len(graph.inputs)):
        causal = op.kwarg("is_causal", op.args[5] if len(op.args) > 5 else False)
        if op_class(op.target) == "attention" and causal is True and op.args[2] in {Ref(v) for v in reach}:
            return len(graph.inputs[index].shape) > 2
        if reach & set(op.inputs) and op_class(op.target) in ("view", "copy"):
            reach.add(value)
    return False


def _order(spec: TensorSpec, device: str) -> Tensor:
    """The causal order that a mask is known to hold."""
    below = torch.ones(spec.shape[-2:], dtype=torch.bool, device=device).tril()
    return below if spec.content == LOWER else ~below


def _value(
    case: str,
    spec: TensorSpec,
    seen: Tensor | None,
    generator: torch.Generator,
    factor: float = 1e3,
    positions: Positions | None = None,
) -> Tensor:
    """Values on the generator's device in the spec's dtype; the shape may have size 1 where the stride is 0.

    `factor` is that of "large". NaN and infinities are put at some `positions` only: a dimension, the first, how many.
    """
    shape = [1 if s == 0 else n for n, s in zip(spec.shape, spec.stride, strict=True)]
    distinct = None if seen is None else _distinct(seen, spec)
    dtype = getattr(torch, spec.dtype)
    if spec.dtype in FLOAT8:
        return _eight_bits(case, spec, seen, generator)
    if spec.dtype not in FLOATS:
        return _discrete(case, shape, dtype, distinct, generator)
    normal = torch.randn(shape, generator=generator, device=generator.device)
    if case in ("normal", *SPECIAL):
        value = normal.to(dtype)
        for special in {"special": ("nan", "+inf", "-inf"), "normal": ()}.get(case, (case,)):
            if value.numel() > 0:
                narrow = positions is not None and value.shape[positions[0]] > 1
                part = value.narrow(*positions) if positions is not None and narrow else value
                at = torch.randint(part.numel(), (1,), generator=generator, device=generator.device)
                part[tuple(torch.unravel_index(at, part.shape))] = float(special)
        return value
    if case == "constant":
        rows = torch.randint(-16, 17, (*shape[:-1], 1) if shape else (), generator=generator, device=generator.device)
        rows = rows / 8
        return rows.expand(shape).to(dtype)
    base = normal if distinct is None else distinct
    if case == "like":
        finite = base[base.isfinite()].double() if base.numel() else base.double()
        mean, deviation = (finite.mean(), finite.std(correction=0)) if finite.numel() else (0.0, 1.0)
        return (normal.double() * deviation + mean).to(dtype)
    if case == "shuffled":
        return _moved(base, generator)
    if case in ("small", "large"):
        return _scaled(base, 1e-3 if case == "small" else factor, dtype)
    return base.to(dtype)


def _eight_bits(case: str, spec: TensorSpec, seen: Tensor | None, generator: torch.Generator) -> Tensor:
    """Values of 8 bits from float32 ones; what is beyond the largest one, infinity too, becomes that, as quantised."""
    dtype, wide = getattr(torch, spec.dtype), replace(spec, dtype="float32")
    base = _value("normal", wide, None, generator) * SPREAD if seen is None else seen.detach().float()
    limit = torch.finfo(dtype).max
    largest = float(base[base.isfinite()].abs().amax()) if bool(base.isfinite().any()) else 0.0
    made = _value(case, wide, base, generator, factor=limit / 2 / largest if largest else 1.0)
    if case in ("normal", *SPECIAL):
        made = made * SPREAD
    return made.clamp(-limit, limit).to(dtype)


def _scale(case: str, spec: TensorSpec, seen: Tensor | None, generator: torch.Generator) -> Tensor:
    """Scales of a product of 8-bit floats: captured ones, or such that what they scale is about 1."""
    drawn = _value(case if case in SPECIAL and spec.numel > 1 else "normal", spec, None, generator).abs()
    if seen is None:
        return drawn.exp2() / SPREAD
    known = _distinct(seen, spec)
    return torch.where(drawn.isfinite(), known if case == "captured" else _moved(known, generator), drawn)


def _discrete(
    case: str, shape: list[int], dtype: torch.dtype, distinct: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Integers and booleans: only values that were seen; others in their range may be invalid, as classes < 0 are."""
    if distinct is not None and case in ("captured", "small", "large", "constant", "special"):
        return distinct
    if distinct is not None and case != "normal":
        return _moved(distinct, generator)
    if distinct is None or distinct.numel() == 0:
        return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)
    chosen = torch.randint(distinct.numel(), shape, generator=generator, device=generator.device)
    return distinct.flatten()[chosen].to(dtype)


def _moved(values: Tensor, generator: torch.Generator) -> Tensor:
    """The same values, turned round by a random distance: a permutation of 25 million would take seconds."""
    if values.numel() < 2:
        return values
    distance = torch.randint(1, values.numel(), (1,), generator=generator, device=generator.device)
    return values.flatten().roll(int(distance)).reshape(values.shape)


def _distinct(seen: Tensor, spec: TensorSpec) -> Tensor:
    """The captured values with every stride-0 dimension cut to one."""
    value = seen.detach()
    for dim, (n, s) in enumerate(zip(spec.shape, spec.stride, strict=True)):
        if s == 0 and n > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _scaled(base: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    finite = base[base.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest > 0:
        factor = min(factor, torch.finfo(dtype).max / 2 / largest)
    return (base.double() * factor).to(dtype)


def _overlaps(tensor: Tensor) -> bool:
    reach = 0
    for s, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False
