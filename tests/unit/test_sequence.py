"""Kernel sequences: the typical call, sums that are exact, and owners that one run lends to another."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fusescout.profiling.sequence import Call
from fusescout.profiling.sequence import Item
from fusescout.profiling.sequence import align
from fusescout.profiling.sequence import kernel_times
from fusescout.profiling.sequence import node_times
from fusescout.profiling.sequence import typical

owners = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.sampled_from("abc")))
items = st.lists(
    st.builds(Item, st.sampled_from(["k1", "k2", "k3"]), st.floats(0, 1e6), owners, st.booleans()), max_size=40
)


@given(items, st.lists(st.floats(0.5, 2.0), min_size=1, max_size=6))
def test_sums_are_exact_in_any_order(kinds: list[Item], noise: list[float]) -> None:
    calls = [Call(tuple(Item(i.name, i.us * f, i.owner, i.is_backward) for i in kinds), 0.0, 0) for f in noise]
    chosen, warning = typical(calls)
    assert not warning
    unlinked = sum(i.us for i in reversed(chosen) if i.owner is None)
    nodes = sum(n.time_us + n.backward_us for n in node_times(chosen))
    assert nodes + unlinked == sum(k.time_us for k in kernel_times(chosen)) == math.fsum(i.us for i in chosen)
    assert sum(n.kernels + n.backward_kernels for n in node_times(chosen)) == sum(1 for i in chosen if i.owner)


def test_odd_calls_are_left_out_with_a_warning() -> None:
    full = Call((Item("a", 1.0), Item("b", 2.0)), 3.0, 2)
    items, warning = typical([Call((Item("b", 9.0),), 9.0, 1), full, full])
    assert [i.us for i in items] == [1.0, 2.0]
    assert "1 of 3 profiled calls" in warning


def test_light_kernels_get_owners_and_keep_their_own_times() -> None:
    structural = [
        Item("gemm", 10.0, (0, "linear")),
        Item("gelu", 5.0, (0, "gelu")),
        Item("gemm", 11.0, (0, "linear_1")),
    ]
    light = [Item("cast", 0.5), Item("gemm", 9.0), Item("gelu", 4.0), Item("gemm", 9.5), Item("loss", 1.0)]
    found = align(structural, light)
    assert found is not None
    assert [(i.us, i.owner and i.owner[1]) for i in found] == [
        (0.5, None), (9.0, "linear"), (4.0, "gelu"), (9.5, "linear_1"), (1.0, None),
    ]  # fmt: skip


def test_another_variant_of_one_kernel_still_aligns() -> None:
    structural = [Item("a", 1.0, (0, "x")), Item("gemm_128", 2.0, (0, "y")), Item("b", 3.0, (0, "z"))]
    found = align(structural, [Item("a", 1.0), Item("gemm_256", 2.5), Item("b", 3.0)])
    assert found is not None
    assert found[1] == Item("gemm_256", 2.5, (0, "y"))


def test_torch_kernels_of_other_names_are_other_operators() -> None:
    add, loss = "void at::native::vectorized<AddFunctor>", "void at::native::reduce<MeanOps>"
    structural = [Item("gemm", 100.0, (0, "x")), Item(add, 2.0, (0, "y")), Item("gemm", 100.0, (0, "z"))]
    found = align(structural, [Item("gemm", 100.0), Item(loss, 2.0), Item("gemm", 100.0)])
    assert found is not None
    assert [i.owner for i in found] == [(0, "x"), None, (0, "z")]


def test_different_kernels_do_not_align() -> None:
    structural = [Item("a", 10.0, (0, "x")), Item("at::native::b", 10.0, (0, "y"))]
    assert align(structural, [Item("a", 10.0), Item("at::native::c", 10.0)]) is None
    assert align([Item("a", 10.0, (0, "x"))], []) is None


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_aligning_with_itself_is_the_identity(names: list[str]) -> None:
    structural = [Item(n, 1.0, (0, str(k))) for k, n in enumerate(names)]
    assert align(structural, [Item(n, 1.0) for n in names]) == tuple(structural)
