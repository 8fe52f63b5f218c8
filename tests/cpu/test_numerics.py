"""Which numerical settings a run computes under, and that they are put back."""

import subprocess
import sys

import pytest
import torch

from fusescout import analysis
from fusescout import numerics
from fusescout.config import Config


@pytest.mark.parametrize(("allowed", "seen"), [(True, "high"), (False, "highest")])
def test_a_run_may_use_tf32_exactly_if_it_is_allowed(allowed, seen, monkeypatch):
    found = []
    monkeypatch.setattr(analysis, "_run", lambda *_: found.append(numerics.current()["float32_matmul_precision"]))
    monkeypatch.setattr(analysis, "compositions", lambda *_: ())
    assert torch.get_float32_matmul_precision() == "highest"
    analysis.run(None, Config(allow_tf32=allowed), lambda *_: None)
    assert found == [seen]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_user_who_allows_tf32_keeps_it():
    torch.set_float32_matmul_precision("medium")
    try:
        with numerics.tf32(False):
            assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError), numerics.tf32(True):
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_user_of_the_newer_settings_can_be_followed(tmp_path):
    """torch refuses to read the older flags then; in a process of its own, for it may go on refusing."""
    script = tmp_path / "newer.py"
    script.write_text(
        """
import json, torch
from fusescout import numerics
plain = numerics.current()
torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = "tf32"
mixed = json.loads(json.dumps(numerics.current()))
numerics.has_tf32 = lambda device: True
kinds = numerics.tf32_kinds("cuda")
torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = "tf32", "none"
other = numerics.tf32_kinds("cuda")
numerics.apply(mixed)
assert numerics.current() == mixed != plain
assert kinds == numerics.tf32_kinds("cuda") == {"gemm", "attention"}
assert other == {"conv"}
assert numerics.matmul_precision() == "tf32"
numerics.apply(json.loads(json.dumps(plain)) | {"fp32_precision": {"cudnn.conv": "ieee", "cuda.matmul": "none"}})
with numerics.tf32(True):
    assert "gemm" in numerics.tf32_kinds("cuda")
assert numerics.tf32_kinds("cuda") == frozenset()
print("followed")
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "followed\n", done.stderr
