"""FuseScout finds the operator chains of a PyTorch model that are worth fusing, and proves it.

outcome = fusescout.analyze(model, (x,))
handle = fusescout.patch(model, outcome.plan)
handle.undo()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fusescout.api import analyze as analyze
    from fusescout.patching import patch as patch
    from fusescout.patching import patched as patched
    from fusescout.plan import Plan as Plan
    from fusescout.session import Session as Session
    from fusescout.training import profile as profile

__all__ = ["Plan", "Session", "__version__", "analyze", "patch", "patched", "profile"]

_HOMES = {
    "Plan": "fusescout.plan",
    "Session": "fusescout.session",
    "analyze": "fusescout.api",
    "patch": "fusescout.patching",
    "patched": "fusescout.patching",
    "profile": "fusescout.training",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: `import fusescout` must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in ("Plan", "Session"):
        from fusescout.environment import require_torch

        require_torch()
    return getattr(importlib.import_module(_HOMES[name]), name)
