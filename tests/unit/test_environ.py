"""Environment variables for a while: nested, and overlapping as in threads."""

from __future__ import annotations

import os

import pytest

from fusescout import environ

NAME, OTHER = "SCOUTED_A", "SCOUTED_B"


@pytest.mark.parametrize("before", [None, "old"])
def test_what_was_there_comes_back_whatever_is_raised(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OTHER, raising=False)
    if before is None:
        monkeypatch.delenv(NAME, raising=False)
    else:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(KeyError), environ.changed(**{NAME: "new", OTHER: "x"}):
        assert (os.environ[NAME], os.environ[OTHER]) == ("new", "x")
        with environ.changed(**{NAME: "newer"}):
            assert os.environ[NAME] == "newer"
        assert os.environ[NAME] == "new"
        raise KeyError
    assert (os.environ.get(NAME), os.environ.get(OTHER)) == (before, None)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_last_of_overlapping_uses_puts_back(first_ends_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "old")
    one, two = environ.changed(**{NAME: "1"}), environ.changed(**{NAME: "2"})
    one.__enter__()
    two.__enter__()
    ending = [(one, "2"), (two, "old")] if first_ends_first else [(two, "1"), (one, "old")]
    for use, left in ending:
        use.__exit__(None, None, None)
        assert os.environ[NAME] == left
