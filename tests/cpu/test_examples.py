"""Every example runs as it is, and gives FuseScout a model by a documented name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
SMALL = {"training_loop": ["--width", "32"]}
assert EXAMPLES


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_an_example_runs(file: Path) -> None:
    if "transformers" in file.read_text():
        pytest.importorskip("transformers")
    assert "def main() -> None:" in file.read_text()
    done = subprocess.run(
        [sys.executable, str(file), *SMALL.get(file.stem, [])], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
