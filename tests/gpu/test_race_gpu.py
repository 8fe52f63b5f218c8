"""Races on a CUDA device: event and graph timing, planted bugs, sticky errors, and eager against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusescout import inputs
from fusescout.config import Config
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.measure import interleave
from fusescout.mutants import ACCEPTED
from fusescout.mutants import self_test
from fusescout.probe import measure_device
from fusescout.tune import race
from fusescout.workerpool import Spare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape, device="meta").stride())


def linear_gelu(rows: int, inner: int, columns: int, approximate: str = "tanh") -> Subgraph:
    x, w, b, out = spec(rows, inner), spec(columns, inner), spec(columns), spec(rows, columns)
    gelu = Op("aten.gelu.default", (Ref(3),), (("approximate", approximate),), out)
    return Subgraph((x, w, b), (Op("aten.linear.default", (Ref(0), Ref(1), Ref(2)), (), out), gelu), (4,))


def add_norm(rows: int, columns: int) -> Subgraph:
    x, w = spec(rows, columns), spec(columns)
    add = Op("aten.add.Tensor", (Ref(0), Ref(1)), (), x)
    norm = Op("aten.layer_norm.default", (Ref(4), (columns,), Ref(2), Ref(3), 1e-5), (), x)
    return Subgraph((x, x, w, w), (add, norm), (4, 5))


@pytest.mark.parametrize("graph", [linear_gelu(256, 768, 512), add_norm(64, 768)], ids=["linear", "norm"])
def test_planted_bugs_are_rejected_on_the_gpu(graph: Subgraph) -> None:
    found = self_test(graph, None, "cuda")
    assert not [name for name, result in found.items() if result == ACCEPTED], found
    for name in ("zeros", "missing tile", "last row unwritten", "NaN swallowed", "previous output", "ignores input 2"):
        assert found[name].startswith("rejected"), (name, found[name])


def test_races_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = measure_device("cuda")
    config = Config(effort="quick", cache_dir=tmp_path / "cache")
    with Spare() as spare:
        for graph, policy in ((linear_gelu(8192, 768, 3072), "events"), (add_norm(1024, 768), "graph")):
            path = tmp_path / "inputs.pt"
            inputs.save(
                path,
                [torch.randn(s.shape, dtype=torch.bfloat16) * (0.05 if k else 1) for k, s in enumerate(graph.inputs)],
            )
            result = race(graph, path, device, config, spare=spare)
            with capsys.disabled():
                print()
                for c in result.contenders:
                    time = f"{c.time.mid:.2f} [{c.time.low:.2f}, {c.time.high:.2f}] us" if c.time else c.status
                    more = f"compiled in {c.compile_s:.1f} s, {c.bound_share:.2f} of the bound"
                    print(f"{c.name:>10} {time}, {more}, {c.variant}")
                    print(f"           {c.tried} tried, {c.error}, {c.reason}")
                print("noise", result.noise, result.policy)
            by_name = {c.name: c for c in result.contenders}
            assert by_name["eager"].status == "ok" and by_name["inductor"].status == "ok", result.contenders
            assert policy in result.policy
            assert result.noise is not None and 0.97 < result.noise.mid < 1.03
            assert by_name["eager"].bound_share <= 1.1
            assert by_name["framework"].status in ("ok", "unsupported"), by_name["framework"].reason


def test_cuda_times_scale_with_the_work() -> None:
    small, large = torch.randn(4096, 4096, device="cuda"), torch.randn(8192, 8192, device="cuda")
    timings = interleave([lambda _: small + 1, lambda _: large + 1], [], "cuda", rounds=10)
    a, b = (sorted(s)[5] for s in timings.samples)
    assert 3 < b / a < 5


def test_what_cannot_be_captured_falls_back_to_events_for_all() -> None:
    x = torch.randn(64, 64, device="cuda")
    timings = interleave([lambda i: (i[0] + 1).sum().item(), lambda i: i[0] + 1], [x], "cuda", rounds=6)
    assert "events" in timings.policy
    assert [len(samples) for samples in timings.samples] == [6, 6]
    torch.cuda.manual_seed(0)
    first = torch.rand(8, device="cuda")  # the capture that failed left the generator in one
    assert not torch.equal(torch.rand(8, device="cuda"), first)
    torch.cuda.manual_seed(0)
    assert torch.equal(torch.rand(8, device="cuda"), first)
