"""What every test starts from: an own folder, no settings of the machine's user, and global state that is kept."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_configure() -> None:
    """How long an example takes says more about the machine's other users than about the code.

    Beside other workers of pytest-xdist, OpenMP's threads sleep where they wait: spinning they take turns with them.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck
        from hypothesis import settings

        settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("unhurried")


@pytest.fixture(autouse=True, scope="session")
def _no_structured_trace() -> Iterator[None]:
    """pytest's log capture switches on torch's structured trace, which makes Dynamo five times slower."""
    log = logging.getLogger("torch.__trace")
    before, log.disabled = log.disabled, True
    yield
    log.disabled = before


@pytest.fixture(autouse=True)
def _global_state_is_kept() -> Iterator[None]:
    """A test that leaves a switch of torch or of Python turned fails itself, not whichever test comes next."""
    before = _global_state()
    yield
    after = _global_state()
    # A module that was first imported by this test brings its switches with it; they can't have been turned before.
    assert {name: after[name] for name in before if after[name] != before[name]} == {}, f"before: {before}"


@pytest.fixture(autouse=True)
def _own_surroundings(
    _global_state_is_kept: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own working folder and cache, and none of the user's FUSESCOUT_ settings."""
    for name in [n for n in os.environ if n.startswith("FUSESCOUT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.setenv("FUSESCOUT_CACHE_DIR", str(folder / "cache"))
    monkeypatch.chdir(folder)


def _global_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cwd": Path.cwd(), "argv": list(sys.argv), "main": sys.modules["__main__"]}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "compile"):
        state |= {
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
            "matmul precision": torch.get_float32_matmul_precision(),
            "threads": torch.get_num_threads(),
        }
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        state["dynamo's config"] = dynamo.get_hash()
    return state
