"""Chains that are a plan's at other sizes."""

from __future__ import annotations

from graphs import Builder
from graphs import spec

from fusescout.ir import Subgraph
from fusescout.plan import Entry
from fusescout.shapes import counterparts
from fusescout.shapes import distance
from fusescout.shapes import form


def chain(*shape: int, op: str = "relu", dtype: str = "float32") -> Subgraph:
    b = Builder()
    x = b.input(spec(*shape, dtype=dtype))
    y = b.op("view", spec(*shape, dtype=dtype), x, tuple(shape))
    z = b.op(op, spec(*shape, dtype=dtype), y)
    return b.graph(z).subgraph([y, z])[0]


def entry(subgraph: Subgraph) -> Entry:
    return Entry(
        id=f"pointwise-{subgraph.key[:8]}", family="pointwise", chain=list(subgraph.chain),
        subgraph=subgraph.to_json(), contender="tilelang", variant={}, sites=1,
    )  # fmt: skip


def test_a_form_forgets_sizes_and_nothing_else() -> None:
    assert form(chain(8, 16)) == form(chain(64, 16))
    assert (
        len({form(c) for c in (chain(8, 16), chain(8, 16, op="tanh"), chain(8, 16, dtype="bfloat16"), chain(8))}) == 4
    )
    assert distance(chain(8, 16), chain(8, 16)) == 0
    assert distance(chain(8, 16), chain(9, 16)) < distance(chain(8, 16), chain(64, 16))


def proposed(planned: list[Subgraph], graph: list[Subgraph]) -> list[tuple[int, int]]:
    """(place in the plan, place in the graph) of each proposal."""
    entries = [entry(s) for s in planned]
    found = counterparts(entries, [("pointwise", s) for s in graph])
    return [(entries.index(e), [s.key for s in graph].index(s.key)) for e, s in found]


def test_a_new_batch_has_the_nearest_entrys_counterpart() -> None:
    assert proposed([chain(8, 16), chain(64, 16)], [chain(32, 16)]) == [(1, 0)]
    assert proposed([chain(8, 16), chain(64, 16)], [chain(9, 16)]) == [(0, 0)]


def test_a_planned_shape_has_none_though_a_chain_of_the_form_was_kept() -> None:
    assert proposed([chain(8, 16)], [chain(8, 16), chain(8, 512)]) == []
    assert proposed([chain(8, 16), chain(64, 16)], [chain(64, 16), chain(64, 512)]) == []


def test_an_entry_stands_for_the_chain_that_took_its_place_only() -> None:
    assert proposed([chain(8, 16)], [chain(32, 512), chain(32, 16)]) == [(0, 1)]
    assert proposed([chain(8, 16), chain(8, 512)], [chain(32, 512), chain(32, 16)]) == [(0, 1), (1, 0)]


def test_other_families_and_operators_have_none() -> None:
    assert proposed([chain(8, 16)], [chain(32, 16, op="tanh")]) == []
    assert counterparts([entry(chain(8, 16))], [("rowwise", chain(32, 16))]) == ()
