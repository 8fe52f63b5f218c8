"""Too little memory is told as that: neither a bug of FuseScout's nor a fault of the model's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusescout import errors
from fusescout.room import out_of_memory
from fusescout.target import load


def test_a_model_without_room_is_told_so_and_is_no_fault_of_its_code(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("import torch\ndef get_model(): return torch.nn.Linear(1 << 40, 1 << 20), torch.ones(2)\n")
    with pytest.raises(errors.OutOfMemory, match=r"t allocate memory.*End what else uses that memory") as caught:
        load(str(path))
    assert caught.value.exit_code == 3


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


def raised_from(cause: BaseException) -> BaseException:
    error = RuntimeError("The layer failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.01 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (raised_from(OutOfMemoryError()), True),
        (AssertionError("slot out of memory range"), False),
        (SystemExit("out of memory"), False),
        (RuntimeError("Shape mismatch: layer 'out of memory bank' has 3 rows"), False),
        (raised_from(ValueError("x")), False),
    ],
)
def test_only_what_says_so_counts(error: BaseException, said: bool) -> None:
    assert out_of_memory(error) == said


def test_an_error_without_a_text_ends_in_one_stop() -> None:
    assert "MemoryError. End what" in str(errors.OutOfMemory("There was no room.", MemoryError()))
