"""Results of races kept between runs: one JSON file per key, readable with any text tool.

The key covers all that decides a race: the contenders' source, the sub-graph, the device, the tool chain and the
settings. A stored result is only a proposal: `tune.race` rebuilds and re-verifies its winner on this device first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from fusescout.errors import CacheUnwritable
from fusescout.session import write_atomic

FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """What a stored race depends on, as plain fields. `digest` names its file."""

    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, **fields: Any) -> Key:
        return cls(tuple(sorted(fields.items())))

    @property
    def digest(self) -> str:
        text = json.dumps([FORMAT, self.fields], sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Cache:
    """A folder of results.

    Attributes:
        root: the folder; by default the user's cache folder.
    """

    root: Path | None = None

    @cached_property
    def folder(self) -> Path:
        return (self.root or Path(user_cache_dir("fusescout"))) / "races"

    def probe(self) -> None:
        """Write and remove a small file, so that a full or read-only disk is found before hours of tuning.

        Raises:
            CacheUnwritable: the folder can't be made or written.
        """
        file = self.folder / f".probe.{os.getpid()}"
        try:
            write_atomic(file, b"x" * 4096)
            file.unlink()
        except OSError as error:
            raise CacheUnwritable(str(self.folder), error.strerror or str(error)) from error

    def get(self, key: Key) -> dict[str, Any] | None:
        """The stored value, or None. A damaged file counts as absent and is warned about."""
        file = self._file(key)
        try:
            raw = json.loads(file.read_bytes())
            value = raw["value"]
            if raw["format"] != FORMAT or raw["digest"] != key.digest or not isinstance(value, dict):
                raise ValueError("it belongs to another key or version")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("Ignoring the damaged cache entry %s (%s); it will be measured again.", file, error)
            return None
        return value

    def put(self, key: Key, value: Mapping[str, Any]) -> None:
        """Store `value` atomically.

        Raises:
            CacheUnwritable: the disk is full or the folder can't be written; nothing half-written is left.
        """
        entry = {"format": FORMAT, "digest": key.digest, "key": dict(key.fields), "value": dict(value)}
        try:
            write_atomic(self._file(key), json.dumps(entry, indent=1, sort_keys=True, default=str).encode())
        except OSError as error:
            raise CacheUnwritable(str(self.folder), error.strerror or str(error)) from error

    def drop(self, key: Key) -> None:
        """Forget one entry, for instance since its winner no longer verifies."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: Key) -> Path:
        return self.folder / f"{key.digest}.json"


def sources_digest(files: list[Path]) -> str:
    """sha256 over the bytes of source files, in name order: any edit makes a new key."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
