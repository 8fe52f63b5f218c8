"""Whether an error says that the host or a device had no room; without importing torch."""

from __future__ import annotations

NAMES = frozenset({"OutOfMemoryError", "MemoryError"})
TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "t allocate memory",
    "_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""What torch, cuBLAS, cuDNN and C++ say in a plain RuntimeError, or in an AcceleratorError, which is one."""


def out_of_memory(error: BaseException) -> bool:
    """By the class or the text of an error, or of the one it was raised from."""
    text, kinds = str(error), {kind.__name__ for kind in type(error).__mro__}
    if NAMES & kinds or (isinstance(error, RuntimeError) and any(t in text for t in TEXTS)):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)
