"""Finds the fusable regions of one captured graph, from its structure alone.

A region is a convex set of nodes of one family. The finder looks at operators, shapes and data flow, never at times,
so the same graph gives the same regions when a plan is applied later. Regions may overlap; pricing, racing and the
disjoint selection come after (`candidates.py`, `decide.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusescout.aliasing import Aliases
from fusescout.convolution import CONVOLUTIONS
from fusescout.flow import Flow
from fusescout.flow import grow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import TensorSpec
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import REORDERS
from fusescout.nodekinds import is_pointwise
from fusescout.nodekinds import shape_of
from fusescout.regions.attention import find_attention
from fusescout.regions.convolutions import and_convolutions
from fusescout.regions.copies import and_copies
from fusescout.regions.copies import find_copies
from fusescout.regions.losses import find_losses
from fusescout.regions.pieces import find_pieces
from fusescout.regions.rows import find_rows
from fusescout.regions.shared import find_shared
from fusescout.regions.sums import find_sums
from fusescout.scaled import SCALED
from fusescout.scaled import scaled

MAX_INPUTS = 12
PREPARING = ("conv_epilogue", "gemm_shared_input")
"""Families whose parameters go into prepared constants, so that a kernel doesn't take each of them."""
GEMMS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm"}) | SCALED
CUTS = frozenset({"getitem", "chunk", "split", "split_with_sizes", "slice"})


@dataclass(frozen=True, slots=True)
class Region:
    """A convex set of nodes that one kernel could compute, in graph order."""

    graph: int
    family: str
    nodes: tuple[str, ...]


def find_regions(graph: Graph) -> tuple[Region, ...]:
    """All fusable regions of a captured graph, largest families first; regions may overlap."""
    flow, aliases = Flow(graph), Aliases(graph)
    found: dict[tuple[str, frozenset[str]], Region] = {}

    def add(family: str, names: set[str]) -> None:
        names = _with_literals(flow, names if family == "attention" else _trim(graph, names))
        if not _is_family(graph, family, names) or not flow.convex(names):
            return
        ordered = tuple(n.name for n in graph.nodes if n.name in names)
        if not _is_cuttable(graph, family, ordered) or not graph.escapes(ordered):
            return
        if not aliases.separable(set(ordered)):
            return
        found.setdefault((family, frozenset(ordered)), Region(graph.index, family, ordered))

    for names in find_attention(flow):
        add("attention", names)
    for names in find_losses(flow):
        add("linear_cross_entropy", names)
    gated = _gated(flow)
    for names in gated:
        add("gated_mlp", names)
    for names in find_shared(flow, gated):
        add("gemm_shared_input", names)
    for node in graph.nodes:
        if _is_product(graph, node):
            for names in _epilogues(flow, node):
                add("gemm_epilogue", names | _turned_weight(graph, node))
        if node.op in CONVOLUTIONS and node.is_op and isinstance(node.out, TensorSpec):
            for names in _behind_convolution(flow, node):
                add("conv_epilogue", names)
    for family, names in find_sums(flow):
        add(family, names)
    rows, points = find_rows(flow), [*_pointwise(flow), *find_pieces(flow)]
    for family, regions in (("rowwise", rows), ("pointwise", points)):
        for region in regions:
            for names in (region, and_copies(graph, region)):
                add(family, names)
                add("conv_epilogue", and_convolutions(graph, names))
    for names in find_copies(graph):
        add("pointwise", names)
        add("conv_epilogue", and_convolutions(graph, names))
    return tuple(found.values())


def _is_product(graph: Graph, node: Node) -> bool:
    """A matrix product that can be an anchor; one with scales only if these come out of the sum."""
    if node.op not in GEMMS or not node.is_op or not isinstance(node.out, TensorSpec):
        return False
    return node.op not in SCALED or scaled(node, lambda name: graph.by_name[str(name)].out) is not None


def _turned_weight(graph: Graph, node: Node) -> set[str]:
    """The transposed view that scaled products are always given their weight as, so that a region reads the weight."""
    weight = node.inputs[1] if node.op in SCALED else ""
    return {weight} if weight and graph.by_name[weight].op == "t" and graph.users[weight] == (node.name,) else set()


def _is_family(graph: Graph, family: str, names: set[str]) -> bool:
    """Something is left to fuse after trimming, or a GEMM alone may be worth another kernel."""
    nodes = [graph.by_name[n] for n in names]
    if family == "gemm_epilogue":
        gemms = [n for n in nodes if n.op in GEMMS]
        return bool(gemms) and (
            any(is_pointwise(n) for n in nodes)
            or _is_misaligned(graph, gemms[0])
            or _is_float32_product(graph, gemms[0])
        )
    if family == "conv_epilogue":
        return len(nodes) > 1 and any(n.op in CONVOLUTIONS for n in nodes)
    return bool(nodes)


def _is_misaligned(graph: Graph, gemm: Node) -> bool:
    """Rows of a 16-bit result or factor that are no multiple of 16 bytes, such as an odd vocabulary's logits.

    cuBLAS has only an old kernel for them: 8192x50257x768 in bf16 takes 6.6 ms on an H200, where 0.93 ms are possible.
    """
    out = gemm.out
    if not isinstance(out, TensorSpec) or out.dtype not in ("bfloat16", "float16"):
        return False
    factors = [s for i in gemm.inputs if isinstance(s := graph.by_name[i].out, TensorSpec) and len(s.shape) > 1]
    steps = [s for f in factors for n, s in zip(f.shape, f.stride, strict=True) if n != 1 and s > 1]
    return any(n * 2 % 16 != 0 for n in (out.shape[-1], *steps))


def _is_float32_product(graph: Graph, gemm: Node) -> bool:
    """A float32 GEMM with a single matrix as weight.

    cuBLAS leaves the tensor cores idle, unless TF32 is allowed: 4096^3 takes 2.8 ms on an H200, and 1.1 as a sum of
    bf16 products. Where there are no such tensor cores, `candidates.rank` leaves it to the library.
    """
    specs = [s for name in (gemm.name, *gemm.inputs) if isinstance(s := graph.by_name[name].out, TensorSpec)]
    single = gemm.op in ("linear", "addmm", "mm") or (gemm.op == "matmul" and len(specs[-1].shape) == 2)
    return single and all(s.dtype == "float32" for s in specs)


def _trim(graph: Graph, names: set[str], layouts: frozenset[str] = REGROUPS) -> set[str]:
    """Drop layout-only nodes at the rim: they cost nothing and must not be what a region returns."""
    names = set(names)
    while True:
        loose = {
            n
            for n in names
            if graph.by_name[n].op in layouts
            and (not any(u in names for u in graph.users[n]) or not any(i in names for i in graph.by_name[n].inputs))
        }
        if not loose:
            return names
        names -= loose


def _with_literals(flow: Flow, names: set[str]) -> set[str]:
    """With the single numbers that only this region reads: its kernel spells them out."""
    graph = flow.graph
    read = {i for n in names for i in graph.by_name[n].inputs} - names - set(graph.outputs)
    own = {i for i in read if graph.by_name[i].op == "full" and shape_of(graph.by_name[i]) == ()}
    whole = names | {i for i in own if names.issuperset(graph.users[i])}
    return whole if flow.convex(whole) else names


def _single_output(graph: Graph, names: set[str]) -> set[str]:
    """Drop last nodes until one value leaves the region.

    Llama's `add, to float32, pow` behind a linear would write three tensors where the next norm needs only the first.
    """
    names = _trim(graph, names)
    while len(graph.escapes(names)) > 1:
        last = [n.name for n in graph.nodes if n.name in names and not any(u in names for u in graph.users[n.name])]
        names = _trim(graph, names - {last[-1]})
    return names


def _is_cuttable(graph: Graph, family: str, names: tuple[str, ...]) -> bool:
    """What it reads and gives are single tensors, inputs not too many; parameters that are prepared don't count."""
    inside = set(names)
    outer = {i for n in names for i in graph.by_name[n].inputs if i not in inside}
    given = [i for i in outer if family not in PREPARING or not graph.by_name[i].is_parameter]
    ends = (*outer, *graph.escapes(names))
    return len(given) <= MAX_INPUTS and all(isinstance(graph.by_name[i].out, TensorSpec) for i in ends)


def _epilogues(flow: Flow, anchor: Node) -> list[set[str]]:
    """The GEMM with everything pointwise behind it; the same with one result; and without operands as large as that.

    A value may be transposed on its way, as a token mixer's before it is added to the residual.
    A GEMM alone is one of these where nothing else can be in it, or besides where its result is misaligned.
    """
    graph = flow.graph
    shape = shape_of(anchor)
    assert shape is not None
    numel = anchor.out.numel if isinstance(anchor.out, TensorSpec) else 0

    def regroups(node: Node) -> bool:
        out = shape_of(node)
        return node.op in REGROUPS and out is not None and bool(out) and out[-1] == shape[-1]

    def same_size(node: Node) -> bool:
        out = shape_of(node)
        return (
            out is not None
            and bool(out)
            and out[-1] == shape[-1]
            and isinstance(node.out, TensorSpec)
            and node.out.numel == numel
        )

    widest = grow(flow, {anchor.name}, lambda n: (is_pointwise(n) and same_size(n)) or regroups(n), backward=False)
    smaller = [_lean(flow, anchor, widest), {anchor.name}]
    return [
        *_reordered(flow, widest, numel), widest, _single_output(graph, widest),
        *(s for s in smaller if len(s) > 1 or _is_misaligned(graph, anchor))
    ]  # fmt: skip


def _reordered(flow: Flow, widest: set[str], numel: int) -> list[set[str]]:
    """`widest` with what follows in another order of dimensions, where it has one result."""
    graph = flow.graph

    def follows(node: Node) -> bool:
        out = node.out
        return isinstance(out, TensorSpec) and out.numel == numel and (node.op in REORDERS or is_pointwise(node))

    def same_order(node: Node) -> bool:
        ranks = {len(shape) for i in node.inputs if i in whole and (shape := shape_of(graph.by_name[i])) is not None}
        return node.op in REORDERS or ranks == {len(shape_of(node) or ())}

    if not any(graph.by_name[u].op in REORDERS for n in widest for u in graph.users[n]):
        return []
    whole = grow(flow, widest, follows, backward=False)
    whole = _single_output(graph, {n for n in whole if n in widest or same_order(graph.by_name[n])})
    whole = _trim(graph, whole, REGROUPS | REORDERS)
    return [whole] if whole - widest and len(graph.escapes(whole)) == 1 else []


def _lean(flow: Flow, anchor: Node, widest: set[str]) -> set[str]:
    """As much of `widest` as needs no further operand as large as the anchor's result."""
    graph = flow.graph
    numel = anchor.out.numel if isinstance(anchor.out, TensorSpec) else 0

    def brings_nothing_large(node: Node) -> bool:
        specs = [graph.by_name[i].out for i in node.inputs if i not in widest]
        return all(isinstance(s, TensorSpec) and s.numel < numel for s in specs)

    return grow(flow, {anchor.name}, lambda n: n.name in widest and brings_nothing_large(n), backward=False)


def _behind_convolution(flow: Flow, anchor: Node) -> list[set[str]]:
    """A convolution with everything pointwise of its shape behind it, as `_epilogues`.

    Where a second convolution alone makes the residual (the shortcut of a residual block that changes its width), the
    two with all that follows are a region too: their shifts can be added up before.
    """
    graph, shape = flow.graph, shape_of(anchor)

    def fits(node: Node) -> bool:
        return is_pointwise(node) and shape_of(node) == shape

    widest = grow(flow, {anchor.name}, fits, backward=False)
    single = _single_output(graph, widest)

    def is_twin(node: Node) -> bool:
        return node.op in CONVOLUTIONS and shape_of(node) == shape and not flow.depends(node.name, anchor.name)

    both = grow(flow, single, lambda n: fits(n) or is_twin(n), backward=True)
    twins = [both] if sum(graph.by_name[n].op in CONVOLUTIONS for n in both) == 2 else []
    return [*(_single_output(graph, t) for t in twins), widest, single, _lean(flow, anchor, widest)]


def _gated(flow: Flow) -> list[set[str]]:
    """`act(x Wg^T) * (x Wu^T)`: a product of two branches that each come from one GEMM on the same input.

    Or from the two halves of one GEMM's result, where the weights are packed into one.
    """
    graph = flow.graph
    regions = []
    for node in graph.nodes:
        if node.op != "mul" or len(node.inputs) != 2:
            continue
        branches = [_branch_to_gemm(graph, name) for name in node.inputs]
        if any(b is None for b in branches):
            continue
        (first, left), (second, right) = branches[0] or (None, set()), branches[1] or (None, set())
        if first is None or second is None or first.args[0] != second.args[0]:
            continue
        names = {node.name, *left, *right}
        packed = any(graph.by_name[n].op in CUTS for n in names)
        if packed is (first is second) and (not packed or names.issuperset(graph.users[first.name])):
            regions.append(names)
    return regions


def _branch_to_gemm(graph: Graph, name: str) -> tuple[Node, set[str]] | None:
    """Walk up single-input pointwise nodes that nobody else reads, to a linear, or to a part of its result."""
    path: set[str] = set()
    cut = False
    while True:
        node = graph.by_name[name]
        cut = cut or node.op in CUTS
        if len(graph.users[name]) != 1 and not cut:
            return None
        path.add(name)
        if node.op == "linear":
            return node, path
        if not (node.op in CUTS if cut else is_pointwise(node)) or len(node.inputs) != 1:
            return None
        name = node.inputs[0]


def _pointwise(flow: Flow) -> list[set[str]]:
    graph = flow.graph
    taken: set[str] = set()
    regions = []
    for node in graph.nodes:
        if node.name in taken or not node.is_op or not is_pointwise(node):
            continue
        region = grow(flow, {node.name}, _untaken(taken, shape_of(node)), backward=True)
        taken |= region
        regions.append(region)
    return regions


def _untaken(taken: set[str], shape: tuple[int, ...] | None) -> Callable[[Node], bool]:
    return lambda n: n.name not in taken and is_pointwise(n) and shape_of(n) == shape
