"""Values that are kept between calls, on a CUDA device: as inputs of a CUDA graph too, at addresses that stay."""

import copy

import pytest
import torch
from torch import nn

from fusescout.patching import patch
from fusescout.plan import Plan
from fusescout.probe import describe_device

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = nn.Embedding(64, 128), nn.Linear(128, 128)
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(64) / 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        table = torch.cat((angles, angles), -1).cos()
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.linear((x + self.positions(torch.arange(x.shape[1], device=x.device))) * table)
        return y, table


@pytest.mark.parametrize("composition", ["eager", "inductor", "cudagraph"])
def test_kept_values_follow_their_sources(composition: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to(DEVICE).eval()
    x = torch.randn(4, 32, 128, device=DEVICE)
    plan = Plan(
        target="model", mode="inference", device_kind=DEVICE, device_name=describe_device(DEVICE).name,
        torch=torch.__version__, computed_once=True, composition=composition,
    )  # fmt: skip
    with torch.no_grad(), patch(model, plan) as handle:
        for change in (1.0, 1.5, 0.5):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(change)
            twin = copy.deepcopy(model)
            twin._compiled_call_impl = None
            expected = twin(x)
            for _ in range(4):  # warm-up, capture, replays
                got = [t.clone() for t in model(x)]
                torch.testing.assert_close(got, list(expected), rtol=2e-2, atol=2e-2)
        held = [v.data_ptr() for lot in handle._backend.hoisted for v in lot.held()]
        assert len(held) == 4
        assert len(set(held)) == 4
        assert handle.counters.computed_once
        assert not handle.counters.fallbacks
