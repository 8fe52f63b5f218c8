"""Prepared constants: what a contender makes of parameters and buffers alone, once, instead of in every call.

A contender that wants folded, merged or re-laid-out weights rewrites its sub-graph so that ordinary operators compute
them. `split` parts that sub-graph: `prepare` holds the operators that read constants only, `steady` the rest, with the
prepared values as further inputs. `Parts.run` joins the two for a race; a patched model prepares outside of its graph
(`hoisting.py`), so that a compiler or a CUDA graph sees nothing but inputs at fixed addresses.

A prepared value is made again when a source is another tensor, lives elsewhere, or was written to, as torch counts it
(`Tensor._version`): an optimizer step, `load_state_dict` and `copy_` count; a write through `.data` does not, after it
`Patched.refresh` is to be called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

from fusescout.flops import op_class
from fusescout.ir import Op
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.ir import substitute

Runner = Callable[[Sequence[Any]], tuple[Any, ...]]
Marks = tuple[int | tuple[int, int, int], ...]
KEPT, KEPT_BYTES = 40, 2 << 30
"""Sets of sources that `Parts` keeps values of: a race times a chain on up to 32 copies of its inputs, if these are
small. Of large ones it keeps what fits, and always the last."""


@dataclass(frozen=True, slots=True)
class Split:
    """A sub-graph in two parts.

    Attributes:
        prepare: from some constant inputs to the prepared values.
        sources: which inputs of the whole sub-graph `prepare` takes, in order.
        steady: from the inputs that are left and the prepared values to the outputs of the whole.
        kept: which inputs of the whole sub-graph `steady` takes, in order, before the prepared values.
        views: from the one value that `steady` gives to the outputs of the whole, or None where it gives these itself.
    """

    prepare: Subgraph
    sources: tuple[int, ...]
    steady: Subgraph
    kept: tuple[int, ...]
    views: Subgraph | None = None


def split(graph: Subgraph) -> Split | None:
    """Part off what depends on constants alone; None if there is nothing of that kind, or gradients are wanted."""
    if any(isinstance(op.out, TensorSpec) and op.out.requires_grad for op in graph.ops):
        return None
    first = len(graph.inputs)
    constant = {k for k, spec in enumerate(graph.inputs) if spec.constant}
    views: set[int] = set(constant)
    for value, op in enumerate(graph.ops, first):
        if op.inputs and all(i in constant for i in op.inputs) and isinstance(op.out, TensorSpec):
            constant.add(value)
            if op_class(op.target) == "view" and set(op.inputs) <= views:
                views.add(value)  # no work: it stays where it is read
    steady = [v for v in range(first, first + len(graph.ops)) if v not in constant]
    read = {i for v in steady for i in graph.ops[v - first].inputs} | set(graph.outputs)
    prepared = sorted(v for v in read if v in constant and v not in views)
    if not prepared:
        return None
    sources, made = _cut(graph, prepared)
    rest = sorted(set(steady) | {v for v in _above(graph, read & views) if v >= first})
    kept = sorted({i for v in rest for i in graph.ops[v - first].inputs if i < first} | {o for o in read if o < first})
    inputs = tuple(graph.inputs[k] for k in kept) + tuple(replace(graph.tensor(v), constant=True) for v in prepared)
    number = {v: k for k, v in enumerate((*kept, *prepared, *rest))}
    ops = tuple(_renamed(graph.ops[v - first], number) for v in rest)
    return Split(made, sources, Subgraph(inputs, ops, tuple(number[o] for o in graph.outputs)), tuple(kept))


def views_apart(parts: Split) -> Split:
    """The same with the results' views parted off, where all results are views of one value.

    An operator must not give results that share memory; in a graph, a compiler sees views for what they are.
    """
    graph, first = parts.steady, len(parts.steady.inputs)
    seen: set[int] = set()
    roots = set()
    for value in graph.outputs:
        while (op := graph.op_of(value)) and op_class(op.target) == "view":
            seen.add(value)
            value = op.inputs[0]
        roots.add(value)
    rest = [v for v in range(first, first + len(graph.ops)) if v not in seen]
    if len(graph.outputs) < 2 or len(roots) != 1 or any(i in seen for v in rest for i in graph.ops[v - first].inputs):
        return parts
    (root,) = roots
    number = {v: k for k, v in enumerate((*range(first), *rest))}
    steady = Subgraph(graph.inputs, tuple(_renamed(graph.ops[v - first], number) for v in rest), (number[root],))
    number = {v: k for k, v in enumerate((root, *sorted(seen)))}
    ops = tuple(_renamed(graph.ops[v - first], number) for v in sorted(seen))
    views = Subgraph((graph.tensor(root),), ops, tuple(number[o] for o in graph.outputs))
    return replace(parts, steady=steady, views=views)


def _cut(graph: Subgraph, results: Sequence[int]) -> tuple[tuple[int, ...], Subgraph]:
    """What makes `results`: the inputs of the whole it reads, and the operators."""
    first = len(graph.inputs)
    members = sorted(_above(graph, set(results)))
    sources = tuple(v for v in members if v < first)
    number = {v: k for k, v in enumerate(members)}
    ops = tuple(_renamed(graph.ops[v - first], number) for v in members if v >= first)
    inputs = tuple(graph.inputs[v] for v in sources)
    return sources, Subgraph(inputs, ops, tuple(number[v] for v in results))


def _above(graph: Subgraph, values: set[int]) -> set[int]:
    """The values and all they depend on."""
    found, todo = set(values), list(values)
    while todo:
        op = graph.op_of(todo.pop())
        for i in op.inputs if op else ():
            if i not in found:
                found.add(i)
                todo.append(i)
    return found


def _renamed(op: Op, number: dict[int, int]) -> Op:
    return Op(op.target, substitute(op.args, number), tuple((k, substitute(v, number)) for k, v in op.kwargs), op.out)


def marks(sources: Sequence[Any]) -> Marks | None:
    """What tells whether tensors still hold what they held; None where torch doesn't count writes to one of them.

    Valid only while somebody holds the tensors themselves: an address is given out again.
    """
    from fusescout.freshness import steps

    if any(t.is_inference() for t in sources):
        return None
    return (steps(), *((id(t), t.data_ptr(), t._version) for t in sources))


@dataclass(frozen=True)
class Parts:
    """A contender that prepares: both parts ready to run.

    `prepare` takes the sources, `steady` the kept inputs and then the prepared values, `views` what `steady` gives.
    """

    split: Split
    prepare: Runner
    steady: Runner
    views: Runner | None = None
    _known: OrderedDict[Marks, tuple[tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=OrderedDict)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The whole sub-graph; prepares only for sources it hasn't seen lately."""
        sources = tuple(inputs[k] for k in self.split.sources)
        made = self.steady([*(inputs[k] for k in self.split.kept), *self._prepared(sources)])
        return self.views(made) if self.views else made

    def _prepared(self, sources: tuple[Any, ...]) -> tuple[Any, ...]:
        key = marks(sources)
        if key is not None and (known := self._known.get(key)):
            return known[1]
        values = self.prepare(sources)
        if key is not None and not _capturing(sources):
            self._known[key] = (sources, values)
            while len(self._known) > 1 and (len(self._known) > KEPT or self._bytes() > KEPT_BYTES):
                self._known.popitem(last=False)
        return values

    def _bytes(self) -> int:
        return sum(t.numel() * t.element_size() for kept in self._known.values() for part in kept for t in part)


def _capturing(tensors: Sequence[Any]) -> bool:
    """Whether new memory belongs to a CUDA graph that is being captured: it must not outlive that graph."""
    import torch

    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
