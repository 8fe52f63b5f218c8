"""What ends a Python call, each with a sentence that says what to do: no eager model, no torch, no room on a disk."""

from __future__ import annotations

import errno
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import nn

import fusescout
from fusescout import endtoend
from fusescout import rivals
from fusescout.config import Config
from fusescout.errors import AlreadyCompiled
from fusescout.errors import DiskFull
from fusescout.errors import MissingPackage
from fusescout.errors import UsageProblem
from fusescout.modelcheck import ModelJudge
from fusescout.plan import Plan
from fusescout.workload import build

X = torch.ones(2, 3)


def compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.compile(backend="eager")
    return model


def a_part() -> nn.Module:
    return nn.Sequential(nn.Flatten(), compiled())


@pytest.mark.parametrize(
    ("model", "args", "error", "said"),
    [
        (5, (X,), UsageProblem, "int is no torch.nn.Module"),
        (nn.Linear(3, 3), X, UsageProblem, "args must be a tuple"),
        (compiled(), (X,), AlreadyCompiled, "The model is compiled"),
        (torch.compile(nn.Linear(3, 3)), (X,), AlreadyCompiled, "The model is compiled"),
        (a_part(), (X,), AlreadyCompiled, "Its module 1 is compiled"),
    ],
)
def test_what_is_no_eager_model_is_refused(model: Any, args: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fusescout.analyze(model, args)


def empty_plan() -> Plan:
    return Plan(target="t", mode="inference", device_kind="cpu", device_name="", torch=torch.__version__)


def test_a_patched_model_is_refused_until_the_patch_is_undone() -> None:
    from fusescout.probe import describe_device

    model = nn.Linear(3, 3)
    handle = fusescout.patch(model, empty_plan().model_copy(update={"device_name": describe_device("cpu").name}))
    with pytest.raises(AlreadyCompiled, match="undo"):
        fusescout.analyze(model, (X,))
    handle.undo()
    assert build(model, (X,)).model is model


def test_an_unknown_composition_is_refused() -> None:
    with pytest.raises(UsageProblem, match="eager, inductor, cudagraph"):
        fusescout.patch(nn.Linear(3, 3), empty_plan(), composition="zzz")  # type: ignore[arg-type]


def test_without_torch_the_calls_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a))
    for call in ("analyze", "patch", "patched", "profile"):
        with pytest.raises(MissingPackage, match="torch"):
            getattr(fusescout, call)
    assert fusescout.Plan is Plan


@pytest.mark.parametrize(
    "step",
    [lambda bench: rivals.build(bench.workload, Config(), bench.on_event), lambda bench: bench._try(empty_plan())],
)
def test_a_full_disk_ends_the_comparison(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rival nor the patched model is at fault then."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/inductor/k.so")

    for module in (endtoend, rivals):
        monkeypatch.setattr(module, "warm", full)
    workload = build(nn.Linear(3, 3), (X,))
    bench = endtoend._Bench(workload, Config(), ModelJudge(workload), lambda *_: None)
    with pytest.raises(DiskFull, match="No space left"):
        step(bench)
