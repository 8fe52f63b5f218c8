"""New batches of a patched model on a GPU: the background thread builds, verifies and swaps in, also in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fusescout.capture import capture
from fusescout.contenders.tilelang import TileLang
from fusescout.newshapes import Policy
from fusescout.patching import Backend
from fusescout.patching import Patched
from fusescout.plan import Composition
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.workload import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(
    ("composition", "policy"),
    [("eager", "adaptive"), ("eager", "nearest"), ("inductor", "nearest"), ("cudagraph", "nearest")],
)
def test_new_batches_are_learned_while_the_model_runs(composition: Composition, policy: Policy, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(approximate="tanh"), nn.Linear(1024, 256)).cuda().bfloat16()
    device, model = describe_device("cuda"), model.eval()
    x = {size: torch.randn(size, 128, 256, device="cuda", dtype=torch.bfloat16) for size in (8, 1, 17, 64)}
    (captured,) = capture(build(model, (x[8],))).graphs
    region = next(r for r in find_regions(captured.graph) if r.family == "gemm_epilogue" and len(r.nodes) > 1)
    chain, _ = captured.graph.subgraph(region.nodes)
    entry = Entry(
        id="planned", family=region.family, chain=list(chain.chain), subgraph=chain.to_json(), contender="tilelang",
        variant=dict(TileLang().variants(chain, device, "quick")[0]), sites=1,
    )  # fmt: skip
    plan = Plan(
        target="t", mode="inference", device_kind="cuda", device_name=device.name, torch=torch.__version__,
        composition=composition, entries=[entry],
    )  # fmt: skip
    with torch.no_grad():
        expected = {size: model(value).float() for size, value in x.items()}
        handle = Patched(model, Backend(plan, device, tmp_path, policy))
        for _ in range(2):
            for _ in range(3):  # a CUDA graph is captured in a second call and replayed from the third
                for size, value in x.items():
                    torch.testing.assert_close(model(value).float(), expected[size], rtol=0.02, atol=0.02)
            assert handle.wait(400)
        handle.undo()
    assert handle.counters.captures == len(x)
    if policy == "nearest":
        assert len(handle.counters.adopted) == 3, handle.counters.fallbacks
    assert len(handle.counters.adopted) + len(handle.counters.fallbacks) >= 3
