"""Too little memory is told as that: neither a bug of FuseScout's nor a fault of the model's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusescout import errors
from fusescout.target import load


def test_a_model_without_room_is_told_so_and_is_no_fault_of_its_code(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("import torch\ndef get_model(): return torch.nn.Linear(1 << 40, 1 << 20), torch.ones(2)\n")
    with pytest.raises(errors.OutOfMemory, match=r"t allocate memory.*End what else uses that memory") as caught:
        load(str(path))
    assert caught.value.exit_code == 3
