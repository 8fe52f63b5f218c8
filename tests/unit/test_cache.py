"""The race cache: what makes a key, and what a damaged or unwritable folder does."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fusescout.session
from fusescout.cache import Cache
from fusescout.cache import Key
from fusescout.cache import sources_digest
from fusescout.errors import CacheUnwritable

KEY = Key.of(subgraph="abc", device="cpu", effort="quick", settings={"tf32": False})


def test_round_trip_and_drop(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get(KEY) is None
    cache.put(KEY, {"winner": "tilelang", "x": [1, 2.5]})
    assert Cache(tmp_path).get(KEY) == {"winner": "tilelang", "x": [1, 2.5]}
    assert [p.name for p in cache.folder.iterdir()] == [f"{KEY.digest}.json"]
    cache.drop(KEY)
    assert cache.get(KEY) is None


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=8)), min_size=1, max_size=4))
def test_every_field_is_in_the_key_and_order_is_not(fields: dict[str, object]) -> None:
    key = Key.of(**fields)
    assert Key.of(**dict(reversed(fields.items()))).digest == key.digest
    for name in fields:
        assert Key.of(**{**fields, name: "something else entirely"}).digest != key.digest


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"value": {}}', b"\xff\xfe", b'{"format":1,"digest":"x","value":{}}']
)
def test_a_damaged_entry_is_ignored_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, {"a": 1})
    (cache.folder / f"{KEY.digest}.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.get(KEY) is None
    assert "damaged" in caplog.text
    cache.put(KEY, {"a": 2})
    assert cache.get(KEY) == {"a": 2}


def test_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, {"a": 1})

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fusescout.session.os, "replace", full)
    for action in (cache.probe, lambda: cache.put(KEY, {"a": 2})):
        with pytest.raises(CacheUnwritable, match="No space left") as caught:
            action()
        assert caught.value.exit_code == 3
    monkeypatch.undo()
    assert cache.get(KEY) == {"a": 1}
    assert len(list(cache.folder.iterdir())) == 1


def test_a_path_that_cannot_be_a_folder_is_found_by_the_probe(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheUnwritable):
        Cache(tmp_path / "file").probe()
    Cache(tmp_path / "new" / "folder").probe()
    assert os.listdir(tmp_path / "new" / "folder" / "races") == []


def test_an_entry_says_what_it_is_for(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, {"a": 1})
    raw = json.loads((cache.folder / f"{KEY.digest}.json").read_text())
    assert raw["key"]["subgraph"] == "abc"


def test_source_digest_sees_edits_and_names(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    before = sources_digest([file])
    file.write_text("x = 2")
    assert sources_digest([file]) != before
