"""The table of kernels that a GPU checks: they are there, twenty shapes of each kind. Nothing is compiled."""

from collections import defaultdict

from shape_tables import SHAPES

from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device

HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)


def test_each_kind_has_twenty_shapes():
    kinds = defaultdict(set)
    for shape in SHAPES:
        for kind in shape.covers:
            kinds[kind].add(shape.name)
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert {shape.template for shape in SHAPES} == set(TileLang().registry.templates)
    assert not {kind: len(names) for kind, names in kinds.items() if len(names) < 20}


def test_kernels_of_the_table_are_there():
    """One of seven; the GPU's test fails for any that isn't."""
    contender, missing = TileLang(), []
    for shape in SHAPES[::7]:
        graph, _ = shape.traced()
        try:
            shape.chosen(contender.variants(graph, HOPPER, "max"))
        except LookupError as reason:
            missing.append(str(reason))
    assert not missing
