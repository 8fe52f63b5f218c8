"""Rules that the whole repository keeps: who may import what, who may print, how files are named, how long they are."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusescout"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "templates").rglob("*.py")])
ALL = sorted([*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
HEAVY = ("torch", "tilelang", "triton", "transformers")
LIGHT = (
    "ir", "session", "regions", "candidates", "decide", "plan", "stats", "graph", "flops", "config", "errors",
    "template", "device",
)  # fmt: skip
MAX_LINES = 400


def name_of(file: Path) -> str:
    """The name a file is imported by, and that tests are called by."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def light_modules() -> list[str]:
    front = [name_of(f) for folder in ("report", "cli") for f in sorted((PACKAGE / folder).glob("*.py"))]
    return ["fusescout", *(f"fusescout.{m}" for m in LIGHT), *front]


def test_what_reads_and_reports_imports_without_torch() -> None:
    modules = light_modules()
    assert len(modules) > 25
    script = (
        "import importlib, sys\n"
        f"for heavy in {HEAVY}: sys.modules[heavy] = None\n"
        "failed = []\n"
        f"for name in {modules}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: failed.append(f'{name}: {error}')\n"
        "sys.exit('\\n'.join(failed) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def speaking(module: ast.Module) -> Iterator[str]:
    """Places where a module prints, ends the process or knows of the command line."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Name(id="print" | "exit" | "quit" as name)):
                yield f"{node.lineno}: {name}()"
            case ast.Attribute(value=ast.Name(id="sys"), attr="exit" | "stdout" as name):
                yield f"{node.lineno}: sys.{name}"
            case ast.ImportFrom(module="typer" | "click" as name):
                yield f"{node.lineno}: from {name}"
            case ast.Import(names=names):
                yield from (f"{node.lineno}: import {n.name}" for n in names if n.name in ("typer", "click"))


def test_only_the_command_line_prints_and_exits() -> None:
    quiet = [f for f in SOURCES if PACKAGE / "cli" not in f.parents and f != PACKAGE / "__main__.py"]
    found = {name_of(f): places for f in quiet if (places := list(speaking(tree(f))))}
    assert found == {}
    assert any(list(speaking(tree(f))) for f in SOURCES if f not in quiet), "the search finds nothing where it should"


def test_templates_keep_their_annotations_as_values() -> None:
    """TileLang reads a kernel's annotations when it is traced; as strings they would name nothing there."""
    future = [
        name_of(f)
        for f in SOURCES
        if PACKAGE not in f.parents
        for node in ast.walk(tree(f))
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    assert future == []


def test_no_file_is_too_long() -> None:
    lengths = {name_of(f): len(f.read_text().splitlines()) for f in ALL}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize("word", ["utils", "util", "common", "helpers", "helper", "misc"])
def test_files_are_named_after_what_they_hold(word: str) -> None:
    assert [name_of(f) for f in ALL if word in name_of(f).split(".")] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(f) for f in ALL if f.read_text().strip() and not ast.get_docstring(tree(f))] == []


def test_the_wheel_holds_every_package() -> None:
    """Packages are listed by hand, because `templates/` lies outside `fusescout/`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(settings["tool"]["setuptools"]["packages"])
    made = {name_of(f) for f in PACKAGE.rglob("__init__.py")}
    assert listed == made | {"fusescout.report.assets", "fusescout.templates"}
    entries = settings["project"]["entry-points"]["fusescout.templates"].values()
    for entry in entries:
        assert (ROOT / "templates" / f"{entry.rpartition('.')[2]}.py").exists()
