"""Finds templates: entry points of the group `fusescout.templates`, then `.py` files in extra folders.

The built-in templates load the same way as anyone's. A template that can't be loaded is a warning, never a crash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from fusescout.template import Template

GROUP = "fusescout.templates"
NEEDED = ("NAME", "FAMILY", "supports", "configs", "kernel")


@dataclass(frozen=True)
class Registry:
    """Templates by name in the order they are tried, and what went wrong while they were loaded."""

    templates: dict[str, Template]
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()

    def source(self, name: str) -> str:
        """Source text of a template's module; part of every cache key."""
        file = getattr(self.templates[name], "__file__", None)
        return Path(file).read_text() if file else ""


def load(folders: Sequence[Path] = ()) -> Registry:
    """All templates that can be loaded.

    Args:
        folders: more folders of template files; files whose name starts with "_" are left out. A template there
            replaces an installed one of the same name; of two installed ones the first by entry-point name stays.
    """
    templates: dict[str, Template] = {}
    origins: dict[str, str] = {}
    warnings: list[str] = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        try:
            module = point.load()
        except Exception as error:  # isolation boundary: someone else's package
            warnings.append(f"The template {point.name} ({point.value}) can't be loaded: {_first_line(error)}")
            continue
        _add(module, point.value, templates, origins, warnings, replace=False)
    for folder in folders:
        if not folder.is_dir():
            warnings.append(f"The template folder {folder} doesn't exist.")
            continue
        for file in sorted(folder.glob("*.py")):
            if file.name.startswith("_"):
                continue
            try:
                module = _module_of(file)
            except Exception as error:  # isolation boundary: the user's file
                warnings.append(f"The template {file} can't be loaded: {_first_line(error)}")
                continue
            if _is_template(module):  # others are what templates import
                _add(module, str(file), templates, origins, warnings, replace=True)
    return Registry(templates, origins, tuple(warnings))


def _is_template(module: ModuleType) -> bool:
    """Whether a file is meant as one: it has a NAME, or two more of `NEEDED`; a helper may have its own configs()."""
    return hasattr(module, "NAME") or sum(hasattr(module, name) for name in NEEDED) > 1


def _add(
    module: ModuleType,
    origin: str,
    templates: dict[str, Template],
    origins: dict[str, str],
    warnings: list[str],
    *,
    replace: bool,
) -> None:
    if missing := [n for n in NEEDED if not hasattr(module, n)]:
        warnings.append(f"The template {origin} is left out: it has no {', '.join(missing)}.")
        return
    name = str(module.NAME)
    if name in templates:
        if origins[name] == origin:
            return
        kept, dropped = (origin, origins[name]) if replace else (origins[name], origin)
        warnings.append(f"Two templates are called {name!r}: {kept} is used, {dropped} is not.")
        if not replace:
            return
    templates[name], origins[name] = module, origin


def _module_of(file: Path) -> ModuleType:
    name = f"fusescout_template_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
