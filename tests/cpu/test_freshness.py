"""What is kept of parameters and buffers is made anew when they changed, also where torch doesn't count it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from conv_models import Net
from conv_models import image
from conv_models import planned
from conv_models import trained
from torch import nn

from fusescout.contenders.framework import Framework
from fusescout.freshness import Marks
from fusescout.livecall import MOST_CAPTURES
from fusescout.livecall import _ours
from fusescout.patching import patch


def test_marks_hold_until_something_is_written() -> None:
    a, b = torch.zeros(4), torch.zeros(3)
    marks = Marks([a, b])
    assert marks.hold([a, b])
    assert not marks.hold([a, torch.zeros(3)])
    b.add_(1)
    assert not marks.hold([a, b])
    marks = Marks([a])
    marks.forget()
    assert not marks.hold([a])


def test_new_data_at_a_used_address_is_seen() -> None:
    memory = bytearray(64)  # an allocator gives an address out again when it likes; this one does so every time
    parameter = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
    marks, before = Marks([parameter]), parameter.data_ptr()
    assert marks.hold([parameter])
    parameter.data = torch.empty(0)
    assert marks.gone
    parameter.data = torch.frombuffer(memory, dtype=torch.float32)
    assert parameter.data_ptr() == before
    assert not marks.hold([parameter])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_of_a_fused_optimizer_is_seen(optimizer: Any) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    marks = Marks([parameter])
    optimizer([parameter], lr=0.1, fused=True).step()
    assert not marks.hold([parameter])


def test_statistics_that_moved_in_training_mode_are_seen() -> None:
    torch._dynamo.reset()
    model, x = trained(Net()), image()
    handle = patch(model, planned(model, x, Framework()))

    def agrees() -> bool:
        twin = copy.deepcopy(model)
        twin._compiled_call_impl = None
        with torch.no_grad():
            return torch.allclose(model(x), twin(x), rtol=1e-4, atol=1e-4)

    assert agrees()
    with torch.no_grad():
        before = model(x)
        model.train()
        for block in (model.first, model.second):
            block.bn1(3 * torch.randn(2, block.bn1.num_features, 4, 4) + 1)  # not through the patched call
        model.eval()
        assert not torch.allclose(model(x), before)
    assert agrees()
    handle.undo()


def test_settings_are_ours_while_calls_are_in_flight_and_the_users_after() -> None:
    config = torch._dynamo.config

    def seen() -> tuple[int, bool]:
        return config.recompile_limit, config.error_on_nested_fx_trace

    before, others = seen(), []

    def other() -> None:
        mine = seen()
        with _ours:
            others.append(seen())
        others.append(seen() == mine)

    with _ours:
        with _ours:
            _ours.change("skip_nnmodule_hook_guards", False)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert seen() == (MOST_CAPTURES, False), "the outer call is still in flight"
    assert others == [(MOST_CAPTURES, False), True]
    assert seen() == before
    assert config.skip_nnmodule_hook_guards
