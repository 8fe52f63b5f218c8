"""Prices the regions of the captured graphs and ranks them by what fusing them could give the whole model.

A price is an upper bound: the time of the chain as the framework runs it, less the time no kernel could go below
(FLOPs over the measured matmul rate, bytes that must cross memory over the measured bandwidth). Equal chains are one
candidate with a count. What is no candidate keeps its reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

from fusescout.device import Device
from fusescout.flops import cost
from fusescout.flops import op_class
from fusescout.ir import Graph
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.regions import GEMMS
from fusescout.regions import Region
from fusescout.regions import find_regions
from fusescout.scaled import SCALED
from fusescout.session import Rejection
from fusescout.session import Site
from fusescout.sums import is_summed

MIN_SHARE = 0.005
"""A chain whose largest possible gain is below this share of the step isn't raced: it is less than the noise floor."""
ONE_OP_SLACK = 1.5
"""A single operator is a candidate only if it takes this many times its physical bound: else one kernel is right."""
TF32_SLOWDOWN = 2
"""TF32, which cuDNN takes for float32 convolutions unless that is forbidden, has half of bfloat16's rate."""
SPLIT_PRODUCTS = 6
"""bfloat16 products that make one as exact as float32 arithmetic: of three addends a factor the six larger ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Equal chains of one family, priced. Times are µs of all sites in one step."""

    id: str
    family: str
    subgraph: Subgraph
    sites: tuple[Site, ...]
    inputs: tuple[str, ...]
    """Node names of the first site's inputs, in sub-graph order."""
    time_us: float
    bound_us: float
    gain_us: float
    share: float
    launches_removed: int
    flops: float
    bytes: float

    @property
    def key(self) -> str:
        return self.subgraph.key


@dataclass(frozen=True, slots=True)
class Ranking:
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    left: tuple[str, ...] = ()
    """Keys of the chains that were rejected for the size of their gain."""


def rank(
    graphs: Sequence[Graph],
    node_time_us: Callable[[int, str], float],
    step_us: float,
    device: Device,
    refusal: Callable[[str, Subgraph], str | None],
    top: int,
    weight: Callable[[str], float] = lambda key: 1.0,
) -> Ranking:
    """Find, price and rank the chains of all graphs.

    Args:
        graphs: captured graphs.
        node_time_us: time of one node in one step as the framework runs it, forward only, in µs.
        step_us: busy time of one step in µs; shares are of this.
        device: measured ceilings.
        refusal: why no contender can beat the framework on a chain of a family, or None if at least one can try.
        top: how many candidates to keep.
        weight: what the gain of the chain with this key counts for, against the bar and among the others (`recall`).
    """
    groups: dict[tuple[str, str], list[tuple[Region, Graph]]] = defaultdict(list)
    cut: dict[tuple[str, str], tuple[Subgraph, tuple[str, ...]]] = {}
    covered: set[tuple[int, str]] = set()
    for graph in graphs:
        for region in find_regions(graph):
            subgraph, inputs = graph.subgraph(region.nodes)
            group = (region.family, subgraph.key)
            if group not in cut and _is_the_librarys(region.family, subgraph, device, refusal):
                continue
            covered |= {(graph.index, name) for name in region.nodes}
            groups[group].append((region, graph))
            cut.setdefault(group, (subgraph, inputs))

    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    left: list[str] = []
    for (family, key), members in groups.items():
        subgraph, inputs = cut[family, key]
        members = _disjoint(members)
        candidate = _price(family, subgraph, inputs, members, node_time_us, step_us, device)
        code, reason = _verdict(candidate, step_us, refusal, weight(key))
        if code == "below-threshold":
            left.append(key)
        if code:
            rejections.append(_reject(candidate, code, reason))
        else:
            candidates.append(candidate)
    candidates.sort(key=lambda c: (-c.gain_us * weight(c.key), c.key))
    more = "One candidate" if top == 1 else f"{top} candidates"
    late = f"{more} could give more; raise --top to race it too."
    rejections += [_reject(candidate, "below-threshold", late) for candidate in candidates[top:]]
    left += [candidate.key for candidate in candidates[top:]]
    best = sorted(candidates[:top], key=lambda c: (-c.gain_us, c.key))
    rejections += _uncovered(graphs, covered, node_time_us, step_us)
    rejections.sort(key=lambda r: -r.time_us)
    return Ranking(tuple(best), tuple(rejections), tuple(left))


def _is_the_librarys(
    family: str, subgraph: Subgraph, device: Device, refusal: Callable[[str, Subgraph], str | None]
) -> bool:
    """Built-in attention, or a float32 product alone, on a device that has no other way to compute it."""
    if family == "attention" and any(op_class(op.target) == "attention" for op in subgraph.ops):
        return device.kind != "cuda" or refusal(family, subgraph) is not None
    alone = [op for op in subgraph.ops if op_class(op.target) != "view"]
    if len(alone) != 1 or alone[0].name not in GEMMS or subgraph.output_specs[0].dtype != "float32":
        return False
    return device.kind != "cuda" or refusal(family, subgraph) is not None


def _disjoint(members: list[tuple[Region, Graph]]) -> list[tuple[Region, Graph]]:
    used: set[tuple[int, str]] = set()
    kept = []
    for region, graph in members:
        names = {(graph.index, n) for n in region.nodes}
        if not names & used:
            used |= names
            kept.append((region, graph))
    return kept


def lower_bound(subgraph: Subgraph, device: Device, seen_us: float = math.inf) -> tuple[float, float, float]:
    """(µs no kernel can go below, FLOPs, bytes that must cross memory) of one execution.

    A float32 product on CUDA is bound by the faster of two rates: that of the library's, and a sixth of bfloat16's,
    since three bfloat16 numbers hold a float32 and six of their nine products are as exact as float32 arithmetic
    (`SPLIT_PRODUCTS`; on an H200 the second is the faster one, more than twice).

    Args:
        seen_us: what it took the framework. If that is less than the FLOPs allow, they are not what it computes
            (cuDNN takes TF32 for float32, Winograd halves the products), and only the bytes bound it.
    """
    flops = sum(cost(op, [subgraph.value(i) for i in op.inputs])[0] for op in subgraph.ops)
    summed = is_summed(subgraph)  # then no parameter is read but in sums of it, made once
    read = [s for s in subgraph.inputs if not (summed and s.constant)]
    nbytes = float(sum(s.nbytes for s in (*read, *subgraph.output_specs)))
    heavy = [op for op in subgraph.ops if op.name in GEMMS or op_class(op.target) in ("conv", "attention")]
    compute_s = 0.0
    if heavy and not summed:
        dtype = next((op.out.dtype for op in heavy if isinstance(op.out, TensorSpec)), "float32")
        if heavy[0].name in SCALED:
            dtype = subgraph.tensor(heavy[0].inputs[0]).dtype
        rates = device.flops_per_s
        rate = rates.get(dtype) or max(rates.values(), default=0.0)
        if dtype == "float32" and device.kind == "cuda":
            convolves = all(op_class(op.target) == "conv" for op in heavy)
            rate = max(rate, rates.get("bfloat16", 0.0) / (TF32_SLOWDOWN if convolves else SPLIT_PRODUCTS))
        gemm_flops = sum(cost(op, [subgraph.value(i) for i in op.inputs])[0] for op in heavy)
        compute_s = gemm_flops / rate if rate else 0.0
        if compute_s * 1e6 > seen_us:
            compute_s = 0.0
    memory_s = nbytes / device.copy_bytes_per_s if device.copy_bytes_per_s else 0.0
    return max(compute_s, memory_s) * 1e6, flops, nbytes


def _price(
    family: str,
    subgraph: Subgraph,
    inputs: tuple[str, ...],
    members: list[tuple[Region, Graph]],
    node_time_us: Callable[[int, str], float],
    step_us: float,
    device: Device,
) -> Candidate:
    time_us = sum(node_time_us(g.index, n) for r, g in members for n in r.nodes)
    bound_us, flops, nbytes = lower_bound(subgraph, device, time_us / len(members))
    busy_ops = sum(1 for op in subgraph.ops if op_class(op.target) != "view")
    sites = tuple(
        Site(
            graph=g.index,
            nodes=list(r.nodes),
            module=next((m for m in (g.by_name[n].module for n in r.nodes) if m), ""),
            source=next((s for s in (g.by_name[n].source for n in r.nodes) if s), ""),
        )
        for r, g in members
    )
    count = len(sites)
    return Candidate(
        id=f"{family}-{subgraph.key[:8]}",
        family=family,
        subgraph=subgraph,
        sites=sites,
        inputs=inputs,
        time_us=time_us,
        bound_us=bound_us * count,
        gain_us=max(0.0, time_us - bound_us * count),
        share=time_us / step_us if step_us else 0.0,
        launches_removed=max(0, busy_ops - 1) * count,
        flops=flops * count,
        bytes=nbytes * count,
    )


def _verdict(
    candidate: Candidate, step_us: float, refusal: Callable[[str, Subgraph], str | None], weight: float
) -> tuple[str, str]:
    """A rejection code and sentence, or two empty strings."""
    if candidate.launches_removed == 0 and candidate.time_us < ONE_OP_SLACK * candidate.bound_us:
        over_bound = candidate.time_us / max(candidate.bound_us, 1e-9)
        return "one-op", f"It is one kernel already and takes {over_bound:.2f} times its physical bound."
    if candidate.gain_us * weight < MIN_SHARE * step_us:
        share = candidate.gain_us / step_us if step_us else 0.0
        needed = f"{MIN_SHARE / weight:.1%} is needed to be worth a race"
        needed += ", since an earlier analysis left it" if weight < 1.0 else ""
        return "below-threshold", f"At its physical bound it would give {share:.2%} of the step; {needed}."
    reason = refusal(candidate.family, candidate.subgraph)
    return ("unsupported", reason) if reason else ("", "")


def _reject(candidate: Candidate, code: str, reason: str) -> Rejection:
    return Rejection(
        chain=list(candidate.subgraph.chain),
        where=candidate.sites[0].module,
        count=len(candidate.sites),
        time_us=candidate.time_us,
        code=code,
        reason=reason,
    )


def _uncovered(
    graphs: Sequence[Graph],
    covered: set[tuple[int, str]],
    node_time_us: Callable[[int, str], float],
    step_us: float,
) -> list[Rejection]:
    """Operators that cost at least 1 % of the step and lie in no region, grouped by operator and shape."""
    rows: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    for graph in graphs:
        for node in graph.nodes:
            if node.is_op and (graph.index, node.name) not in covered and op_class(node.target) != "view":
                group = ("dead" if node.dead else node.target, node.target, str(node.out))
                rows[group].append((node.module, node_time_us(graph.index, node.name)))
    found = []
    for (status, target, _), members in rows.items():
        time_us = sum(t for _, t in members)
        if time_us < 0.01 * step_us:
            continue
        kind = "dead" if status == "dead" else op_class(target)
        code, reason = {
            "gemm": (
                "gemm-bound",
                "Its time is the matrix product itself, and nothing pointwise follows that could ride along.",
            ),
            "attention": ("one-op", "Attention is one fused kernel already."),
            "rnn": ("one-op", "A recurrent layer is one call of the library, which fuses its steps."),
            "dead": (
                "unsupported",
                "Nobody reads its result: there is nothing to fuse, and a patched model leaves it out.",
            ),
            "conv": ("one-op", "A convolution that nothing pointwise follows is the library's one kernel already."),
        }.get(kind, ("unsupported", f"No template family covers {target} here."))
        found.append(
            Rejection(
                chain=[target.split(".")[1] if "." in target else target],
                where=members[0][0],
                count=len(members),
                time_us=time_us,
                code=code,
                reason=reason,
            )
        )
    return found
