"""Every kind of kernel at twenty shapes, odd ones among them, held to the tool's own rule on a Hopper GPU.

`shape_tables.py` has the kernels. One of five goes through all cases, the others through the few that come first.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from shape_table import Make
from shape_tables import SHAPES

from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.verify import Verifier

DEVICE = describe_device("cuda")
FULL = {shape.name for shape in SHAPES[::5]}


def chosen(shape, contender):
    """The sub-graph, which input is which, and the variant that is meant."""
    graph, places = shape.traced("cuda")
    return graph, places, shape.chosen(contender.variants(graph, DEVICE, "max"))


@pytest.fixture(scope="module")
def contender(tmp_path_factory, request):
    """With everything compiled, in threads, unless other workers compile other kernels: nvcc takes most of the time."""
    made = TileLang(cache_dir=tmp_path_factory.mktemp("kernels"))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for test in request.session.items:
                if test.path.name == os.path.basename(__file__):
                    with suppress(Exception):  # what fails is left for its test to report
                        graph, _, variant = chosen(test.callspec.params["shape"], made)
                        pool.submit(made.build, graph, variant, DEVICE)
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_computes_what_eager_computes(shape, contender):
    graph, places, variant = chosen(shape, contender)
    given = shape.inputs(Make("cuda", shape.dtype))
    run = contender.build(graph, variant, DEVICE).run
    outcome = Verifier(graph, [given[k] for k in places], "cuda").check(run, "full" if shape.name in FULL else "quick")
    assert not outcome.reason, f"{variant}: {outcome.reason}"
    assert outcome.stats.deterministic, f"{variant}: two runs differ"
