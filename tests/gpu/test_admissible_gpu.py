"""TF32 on a GPU: of few channels cuDNN convolves in true float32 in one memory format and not in the other."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import nn

from fusescout.admissible import CutToTF32
from fusescout.admissible import cut
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.modelcheck import ModelJudge
from fusescout.verify import Verifier
from fusescout.workload import Workload

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.is_tf32_supported()), reason="needs a CUDA GPU with TF32"
)
Allow = Callable[[bool], None]


@pytest.fixture
def allow() -> Iterator[Allow]:
    before = torch.backends.cudnn.allow_tf32

    def set_to(allowed: bool) -> None:
        torch.backends.cudnn.allow_tf32 = allowed

    yield set_to
    set_to(before)


def spec(*shape: int, **more: bool) -> TensorSpec:
    return TensorSpec(shape, "float32", torch.empty(shape).stride(), **more)


def chain() -> Subgraph:
    out = spec(16, 32, 62, 62)
    conv = Op("aten.conv2d.default", (Ref(0), Ref(1), Ref(2)), (), out)
    ops = (conv, Op("aten.relu.default", (Ref(3),), (), out), Op("aten.hardswish.default", (Ref(4),), (), out))
    return Subgraph((spec(16, 8, 64, 64), spec(32, 8, 3, 3, constant=True), spec(32, constant=True)), ops, (5,))


def channels_last(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The chain channels-last, in TF32 whatever the user says."""
    x, w, b = inputs
    with torch.backends.cudnn.flags(allow_tf32=True):
        y = F.conv2d(x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last))
    return (F.hardswish((y + b.view(-1, 1, 1)).relu()).contiguous(),)


def in_tf32(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same with its operands cut, should cuDNN have chosen true float32 here as well."""
    return channels_last([cut(inputs[0]), cut(inputs[1]), inputs[2]])


def test_a_chain_may_be_in_tf32_where_the_user_allows_it(allow: Allow) -> None:
    torch.manual_seed(0)
    captured = [torch.randn(16, 8, 64, 64), torch.randn(32, 8, 3, 3) / 8, torch.randn(32) / 8]
    captured = [t.cuda() for t in captured]
    allow(True)
    assert Verifier(chain(), captured, "cuda").check(channels_last, "full").reason == ""
    allow(False)
    outcome = Verifier(chain(), captured, "cuda").check(in_tf32, "full")
    assert "an error of" in outcome.reason, "TF32 is refused where the user doesn't allow it"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(self.conv(x).relu())


class Cut(nn.Module):
    """The model with its operands in TF32."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        conv = self.model.conv
        return F.hardswish((F.conv2d(cut(x), cut(conv.weight)) + conv.bias.view(-1, 1, 1)).relu())


@pytest.mark.parametrize("allowed", [True, False])
def test_so_may_a_whole_model(allowed: bool, allow: Allow) -> None:
    torch.manual_seed(0)
    allow(allowed)
    model = Net().cuda().eval()
    workload = Workload(model, (torch.randn(16, 8, 64, 64, device="cuda"),), device="cuda:0")
    verdict = ModelJudge(workload).check(Cut(model))
    assert isinstance(verdict, str) != allowed, verdict


def test_the_backward_pass_is_run_in_tf32_too(allow: Allow) -> None:
    """Autograd runs it in a thread of its own, which has to be inside of the mode as well."""
    conv = nn.Conv2d(8, 32, 3, bias=False).cuda()
    with CutToTF32(frozenset({"conv"}), "cuda:0") as mode:
        conv(torch.randn(2, 8, 16, 16, device="cuda")).square().sum().backward()
    assert mode.cut == 5
