"""Float32 norms on a GPU, at sizes where eager errs little near the mean: an H200 refused ours for it once."""

import pytest
import torch
from template_cases import Case
from template_cases import randn
from torch.nn import functional as F

from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.verify import Verifier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = [
    Case("images", "rowwise", lambda x: F.instance_norm(x) / 2, lambda: (randn(32, 128, 126, 126),)),
    Case("groups", "rowwise", lambda x, w, b: F.group_norm(x, 16, w, b) * 2,
         lambda: (randn(32, 64, 126, 126) * 0.2 + 0.3, randn(64), randn(64, seed=1))),
    Case("rows", "rowwise", lambda x, w, b: F.layer_norm(x, (3000,), w, b),
         lambda: (randn(8192, 3000) + 1, randn(3000), randn(3000, seed=1))),
    Case("narrow rows", "rowwise", lambda x, w: F.layer_norm(x, (768,), w), lambda: (randn(32768, 768), randn(768))),
    Case("channels", "rowwise", lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
         lambda: (randn(32, 64, 64, 64),)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_configuration_is_as_exact_as_eager(case, tmp_path):
    graph, inputs = case.traced(dtype=torch.float32)
    inputs = [t.cuda() for t in inputs]
    device = describe_device("cuda")
    made = TileLang(cache_dir=tmp_path)
    verifier = Verifier(graph, inputs, "cuda")
    variants = [v for v in made.variants(graph, device, "default") if v["template"] == "rowwise"]
    assert variants
    found = {str(v): verifier.check(made.build(graph, v, device).run, "full").reason for v in variants[:8]}
    assert set(found.values()) == {""}, found
