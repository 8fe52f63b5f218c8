"""Average pooling behind a 1x1 convolution: taken before it, in one kernel with what is in front."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conv_models import captured
from conv_models import chain
from conv_models import planned
from conv_models import trained
from template_cases import trace
from torch import nn
from torch.nn import functional as F

from fusescout import reference
from fusescout.candidates import lower_bound
from fusescout.contenders.framework import Framework
from fusescout.contenders.framework import rewrites
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.patching import patch
from fusescout.plan import MemoryFormat

CPU = Device("cpu", "test", "x86", 1)
OPS = ("batch_norm", "relu", "conv2d", "avg_pool2d")


def transition() -> nn.Module:
    """DenseNet's."""
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 10, 1), nn.AvgPool2d(2, 2)))


X = torch.randn(3, 6, 12, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory_format", ["preserved", "channels_last"])
def test_both_ways_to_pool_first_are_right(memory_format: MemoryFormat, tmp_path: Path) -> None:
    x = X if memory_format == "preserved" else X.to(memory_format=torch.channels_last)
    graph, inputs = chain(captured(transition(), x, memory_format), *OPS)
    assert "avg_pool2d before convolution" in [name for name, _ in rewrites(graph, CPU)]
    (wanted,) = reference.build(graph)(inputs)
    for contender in (Framework(), TileLang(cache_dir=tmp_path)):
        variants = contender.variants(graph, CPU, "quick")
        assert not isinstance(variants, str)
        (got,) = contender.build(graph, variants[0], CPU).run(inputs)
        assert got.stride() == wanted.stride()
        assert torch.allclose(got, wanted, atol=1e-6)  # strict float32 needn't pass the rule


def test_only_pooled_pixels_bound_the_time() -> None:
    graph, _ = chain(captured(transition(), X), *OPS)
    rates = Device("cuda", "H", "sm_90a", 132, 1e18, {"float32": 1e12, "bfloat16": 1e12}, 4.0, 50 << 20)
    assert lower_bound(graph, rates)[0] == pytest.approx(3 * (6 * 5) * 10 * (2 * 6 + 1) / 1e6)  # the bias adds one


def test_it_is_patched_into_a_model_and_shown_as_a_script(tmp_path: Path) -> None:
    model, contender = transition(), TileLang(cache_dir=tmp_path)
    graph, _ = chain(captured(model, X), *OPS)
    script = contender.repro(graph, contender.variants(graph, CPU, "quick")[0], CPU)
    assert "def convolution(" in script
    compile(script, "script", "exec")
    wanted = model(X)
    with patch(model, planned(model, X, contender)) as handle:
        with torch.no_grad():
            assert torch.allclose(model(X), wanted, atol=1e-5)
        assert handle.counters.sites


def behind(pool: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w: pool(F.conv2d(x, w))


def test_other_poolings_stay_where_they_are() -> None:
    others = {
        "padded": lambda y: F.avg_pool2d(y, 3, 2, 1),
        "rounded up": lambda y: F.avg_pool2d(y, 3, 2, 0, True),
        "divided": lambda y: F.avg_pool2d(y, 2, divisor_override=3),
        "maximum": lambda y: F.max_pool2d(y, 2),
    }
    for pool in others.values():
        graph, _ = trace(behind(pool), (X, torch.randn(10, 6, 1, 1)))
        assert not [name for name, _ in rewrites(graph, CPU) if "before" in name]
    graph, _ = trace(lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2), (X, torch.randn(10, 6, 3, 3)))
    assert not [name for name, _ in rewrites(graph, CPU) if "before" in name]
