"""Which numerical settings a run computes under, and that they are put back."""

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
