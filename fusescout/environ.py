"""Environment variables for a while: some libraries are told things in no other way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changing = threading.Lock()
_values: dict[str, list[tuple[object, str | None]]] = {}
"""By variable: who set it to what, the newest last. The first one is what was there before any of them."""


@contextmanager
def changed(**variables: str) -> Iterator[None]:
    """Set variables, and put back what was there.

    Uses may lie in one another and overlap in threads: the newest that is left counts, and the last puts back.
    """
    mine = object()
    with _changing:
        for name, value in variables.items():
            _values.setdefault(name, [(None, os.environ.get(name))]).append((mine, value))
            os.environ[name] = value
    try:
        yield
    finally:
        with _changing:
            for name, value in variables.items():
                _values[name].remove((mine, value))
                _put(name, _values[name][-1][1])
                if len(_values[name]) == 1:
                    del _values[name]


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
