"""Finds attention: the built-in one, written-out ones, and the copies around them that a kernel need not make.

Heads that queries share are often repeated in memory first, and heads are put side by side again behind: both are
views to a kernel that knows where things lie, and copies to a library.
"""

from __future__ import annotations

from fusescout.flops import cost
from fusescout.flow import Flow
from fusescout.ir import Graph
from fusescout.ir import Node
from fusescout.ir import Ref
from fusescout.ir import TensorSpec
from fusescout.nodekinds import REGROUPS
from fusescout.nodekinds import is_pointwise
from fusescout.regions.rows import row_form

ATTENTION = "scaled_dot_product_attention"
PRODUCTS = frozenset({"bmm", "matmul", "baddbmm"})
COPIES = frozenset({"contiguous", "clone"})
REPEATS = REGROUPS | COPIES | {"expand"}
TURNS = frozenset({"t", "transpose", "permute"})
LAYOUTS = REPEATS | TURNS | {"_to_copy", "to"}
MOST_STEPS = 16


def find_attention(flow: Flow) -> list[set[str]]:
    """Each attention by itself, and with the copies around it if there are any."""
    graph = flow.graph
    regions = []
    for node in graph.nodes:
        if node.dead or node.mutates or not isinstance(node.out, TensorSpec) or node.out.numel == 0:
            continue
        core = _built_in(node) if node.op == ATTENTION else _written_out(graph, node)
        if not core:
            continue
        regions.append(core)
        wide = _with_copies(graph, core)
        if wide != core:
            regions.append(wide)
    return regions


def _built_in(node: Node) -> set[str]:
    """The node, unless it drops weights: a backward pass that computes it again would drop others."""
    dropout = dict(node.kwargs).get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return {node.name} if dropout == 0.0 else set()


def _written_out(graph: Graph, softmax: Node) -> set[str]:
    """GEMM, pointwise on the scores, softmax, (dropout in eval,) GEMM."""
    form = row_form(softmax, graph) if softmax.op in ("softmax", "_softmax") else None
    if form is None or form.dims != (len(form.shape) - 1,):
        return set()
    up, down = _back(graph, softmax.inputs[0], set()), _on(graph, softmax)
    return up | down if up and down else set()


def _back(graph: Graph, name: str, tried: set[str]) -> set[str]:
    """Nodes from scores up to their product: of operands in the result's size the first that leads to one."""
    node = graph.by_name[name]
    if node.op in PRODUCTS:
        return {name}
    tried.add(name)
    walks = is_pointwise(node) or node.op in LAYOUTS
    if not walks or len(tried) > MOST_STEPS or not isinstance(node.out, TensorSpec):
        return set()
    for above in node.inputs:
        spec = graph.by_name[above].out
        if above not in tried and isinstance(spec, TensorSpec) and spec.numel == node.out.numel:
            path = _back(graph, above, tried)
            if path:
                return path | {name}
    return set()


def _on(graph: Graph, node: Node) -> set[str]:
    """Nodes from the weights down to their product with the values, each read by the next one only."""
    path = {node.name}
    while len(users := graph.users[node.name]) == 1 and len(path) < MOST_STEPS:
        node = graph.by_name[users[0]]
        path.add(node.name)
        if node.op in PRODUCTS:
            return path
        if not (is_pointwise(node) or node.op in LAYOUTS):
            break
    return set()


def _with_copies(graph: Graph, core: set[str]) -> set[str]:
    """With heads repeated in front, and with what moves the result's memory behind."""
    escapes = graph.escapes(core)
    whole = core | _behind(graph, escapes[0]) if len(escapes) == 1 else set(core)
    for name in core:
        node = graph.by_name[name]
        if node.op == ATTENTION or node.op in PRODUCTS:
            for arg in node.args[:3]:
                if isinstance(arg, Ref) and str(arg.to) not in core:
                    whole |= _in_front(graph, str(arg.to), whole)
    return whole


def _behind(graph: Graph, name: str) -> set[str]:
    """Views up to the last copy that only one node reads after the other; none without a copy."""
    path: list[str] = []
    copies = 0
    while name not in graph.outputs and len(graph.users[name]) == 1 and len(path) < MOST_STEPS:
        (name,) = graph.users[name]
        node = graph.by_name[name]
        if node.op not in REPEATS | TURNS or node.mutates or node.op == "expand":
            break
        path.append(name)
        copies = len(path) if _copies(graph, node) else copies
    return set(path[:copies])


def _in_front(graph: Graph, name: str, inside: set[str]) -> set[str]:
    """What repeats an operand in memory, down to where it is stored once; none if nothing is copied."""
    path: set[str] = set()
    copied = False
    while name not in graph.outputs and (inside | path).issuperset(graph.users[name]) and len(path) < MOST_STEPS:
        node = graph.by_name[name]
        turned = node.op in TURNS and not copied  # a key's transpose, between its copy and the product
        if not (node.op in REPEATS or turned) or node.mutates or not node.inputs:
            break
        path.add(name)
        copied = copied or _copies(graph, node)
        name = node.inputs[0]
    return path if copied else set()


def _copies(graph: Graph, node: Node) -> bool:
    return cost(node, [graph.by_name[i].out for i in node.inputs]).bytes > 0
