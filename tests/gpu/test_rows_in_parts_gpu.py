"""Rows that several blocks share, on a GPU: every way of their rest, held to the tool's own rule."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from fusescout.templates.pointwise_cuda import cuda_configs
from fusescout.templates.rows_in_parts import lengths
from fusescout.templates.rows_in_parts import share
from parted_rows import CASES
from parted_rows import traced

from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.verify import Verifier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def ways(shared, device):
    """The first and the last one of the pointwise rest."""
    found = cuda_configs(shared.rest[1], device) if shared.rest else [{}]
    return found[:: max(1, len(found) - 1)]


FLOAT32 = [name for name in CASES if name != "whole groups in memory"]
"""In that one float32's last roundings, the same as whole rows have, are between 0.9 and 1.2 of what is allowed."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, torch.bfloat16) for n in CASES), *((n, torch.float32) for n in FLOAT32)], ids=str
)
def test_every_way_passes_the_full_check(name, dtype, tmp_path):
    graph, inputs = traced(name, dtype, "cuda")
    device, contender = describe_device("cuda"), TileLang(cache_dir=tmp_path)
    found, _ = lengths(graph)
    variants = [
        {"template": "rowwise", "part": length, **{f"last_{k}": v for k, v in way.items()}}
        for length in sorted({found[0], found[len(found) // 2], found[-1]})
        for way in ways(share(graph, length), device)
    ]
    with ThreadPoolExecutor(16) as pool:
        built = list(pool.map(partial(contender.build, graph, device=device), variants))
    verifier = Verifier(graph, inputs, "cuda")
    checked = (
        (variant, verifier.check(made.run, "full").reason) for variant, made in zip(variants, built, strict=True)
    )
    assert not {str(variant): reason for variant, reason in checked if reason}
