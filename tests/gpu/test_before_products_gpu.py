"""What is taken before a product on a GPU: sums, average pooling, and the planes of a very large weight."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from conv_models import captured
from conv_models import chain
from conv_models import trained
from sum_cases import CASES
from sum_cases import traced
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout.contenders.framework import Framework
from fusescout.contenders.tilelang import TileLang
from fusescout.probe import describe_device
from fusescout.verify import Verifier

DEVICE = describe_device("cuda")


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch):
    """cuDNN may take TF32 for one of two convolutions that are to be held against each other, and not for the other."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def reasons(contender, graph, inputs, level="full"):
    variants = contender.variants(graph, DEVICE, "quick")
    assert not isinstance(variants, str), variants
    built = contender.build(graph, variants[0], DEVICE)
    return Verifier(graph, inputs, "cuda").check(built.run, level).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_sum_taken_before_the_product(name, dtype):
    graph, inputs = traced(name, dtype, "cuda")
    assert reasons(Framework(), graph, inputs) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_for_rows_adds_up_columns(dtype, tmp_path):
    graph, inputs = traced("columns of a wide input", dtype, "cuda")
    assert reasons(TileLang(cache_dir=tmp_path), graph, inputs) == ""


@pytest.mark.parametrize("memory_format", ["preserved", "channels_last"])
def test_pooling_before_a_convolution_in_tf32(memory_format, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 96, 1), nn.AvgPool2d(2, 2)))
    layout = torch.contiguous_format if memory_format == "preserved" else torch.channels_last
    x = torch.randn(8, 64, 56, 56, device="cuda").to(memory_format=layout)
    graph, inputs = chain(captured(model.to("cuda"), x, memory_format), "batch_norm", "relu", "conv2d", "avg_pool2d")
    for contender in (Framework(), TileLang(cache_dir=tmp_path)):
        assert reasons(contender, graph, inputs) == ""


@pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0) or torch.cuda.mem_get_info()[0] < 80 << 30, reason="needs an H200"
)
def test_planes_of_more_elements_than_32_bits_count(tmp_path):
    given = torch.randn(128, 32768, device="cuda"), torch.randn(32768, 32768, device="cuda") / 181
    graph, inputs = trace(lambda x, w: F.silu(F.linear(x, w)), given)
    parameters = tuple(replace(s, constant=t is given[1]) for s, t in zip(graph.inputs, inputs, strict=True))
    assert reasons(TileLang(cache_dir=tmp_path), replace(graph, inputs=parameters), inputs, "quick") == ""
