"""The folder of one analysis: written beside its final place and moved there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusescout.errors import OutputExists
from fusescout.errors import Unwritable

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DEFAULT_PARENT = "fusescout-runs"
FIX = "Make room there, or name another folder with --output."


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`staging` is where to write now, `final` is where it will be."""

    staging: Path
    final: Path


def place_for(output: Path | None, target: str, force: bool) -> Path:
    """The final folder of a run: the one asked for, or a fresh `fusescout-runs/<target>[-N]`.

    Raises:
        OutputExists: it isn't empty and --force wasn't given, or it holds no earlier run that could be replaced.
    """
    if output is None:
        name = re.sub(r"\.py(?=$|:)", "", target).rsplit("/", 1)[-1]
        stem = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "run"
        numbered = (f"{stem}-{n}" if n > 1 else stem for n in itertools.count(1))
        return next(place for place in (Path(DEFAULT_PARENT, n) for n in numbered) if not place.exists())
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not output.is_dir() or not (output / "session.json").exists():
            raise OutputExists(
                str(output), "It holds no FuseScout run, so --force won't replace it; use another --output."
            )
        if not force:
            raise OutputExists(str(output), "Use --force to replace that run, or another --output.")
    return output


@contextlib.contextmanager
def run_folder(final: Path) -> Iterator[RunFolder]:
    """A staging folder that becomes `final` when the block ends well, and vanishes when it doesn't.

    Raises:
        Unwritable: the disk is full or the folder can't be made; also for an OSError of the block's that names it.
    """
    made: list[Path] = []
    staging = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        for parent in reversed([p for p in staging.parents if not p.exists()]):
            parent.mkdir()
            made.append(parent)
        staging.mkdir()
        yield RunFolder(staging, final)
        _replace(staging, final)
    except OSError as error:
        _discard(staging, made)
        if error.errno in DISK_FULL or _is_in(error.filename, final.parent):
            raise Unwritable("run folder", str(final), error.strerror or str(error), FIX) from error
        raise
    except BaseException:
        _discard(staging, made)
        raise


def _is_in(name: object, folder: Path) -> bool:
    return isinstance(name, str | bytes) and Path(os.fsdecode(name)).absolute().is_relative_to(folder.absolute())


def _replace(staging: Path, final: Path) -> None:
    if not final.exists():
        staging.rename(final)
        return
    aside = staging.with_suffix(".old")
    final.rename(aside)
    try:
        staging.rename(final)
    except OSError:
        aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _discard(staging: Path, made: list[Path]) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    for parent in reversed(made):
        with contextlib.suppress(OSError):
            parent.rmdir()
