"""The command line on what is there already: reports, templates, help, doctor and the terminal itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_session import accepted
from sample_session import hostile

from fusescout import cli
from fusescout.cli.terminal import Terminal
from fusescout.cli.terminal import visible
from fusescout.errors import Unwritable


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    accepted().save(tmp_path / "run" / "session.json")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.html", "<!doctype html>"), ("r.json", "{"), ("r.md", "**patching"), ("r.txt", ""), ("r.HTML", "<!")],
)
def test_report_picks_the_format_by_extension(name: str, start: str, saved: Path, capsys: Any) -> None:
    assert cli.main(["report", str(saved), "-o", name]) == 0
    assert Path(name).read_text().lower().lstrip().startswith(start)
    assert not capsys.readouterr().out
    before = Path(name).read_bytes()
    assert cli.main(["report", str(saved), "-o", name]) == 2
    assert "--force" in capsys.readouterr().err and Path(name).read_bytes() == before
    assert cli.main(["report", str(saved), "-o", name, "--force"]) == 0


def test_report_to_stdout(saved: Path, capsys: Any) -> None:
    assert cli.main(["report", str(saved / "session.json")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert cli.main(["report", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == accepted().verdict
    assert cli.main(["report", str(saved), "--format", "html"]) == 0
    assert capsys.readouterr().out.lower().startswith("<!doctype")


@pytest.mark.parametrize(("line", "code"), [(["report", "run"], 141), (["--help"], 141), (["report", "no.json"], 2)])
def test_a_reader_that_went_away_is_no_failed_gate(line: list[str], code: int, saved: Path) -> None:
    nobody, stdout = os.pipe()
    os.close(nobody)
    stderr = stdout if code == 2 else subprocess.PIPE
    done = subprocess.run([sys.executable, "-m", "fusescout", *line], stdout=stdout, stderr=stderr, check=False)
    os.close(stdout)
    assert done.returncode == code and not done.stderr


def test_html_is_never_written_to_a_terminal(saved: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["report", str(saved), "--format", "html"]) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "line", [["-o", "x.pdf"], ["--format", "pdf"], ["--json", "--format", "html"], ["-o", "run"], ["-o", "no.txt/x.md"]]
)
def test_report_refusals(line: list[str], saved: Path, capsys: Any) -> None:
    Path("no.txt").write_text("a file, no folder")
    assert cli.main(["report", str(saved), *line]) in (2, 3)
    assert "error: " in capsys.readouterr().err
    assert {p.name for p in saved.parent.iterdir()} == {"run", "no.txt"}


def test_report_of_no_session(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["report", str(tmp_path / "no.json")]) == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_hostile_sessions_are_shown_not_obeyed(tmp_path: Path, capsys: Any) -> None:
    hostile().save(tmp_path / "session.json")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", [[], ["analyze"], ["report"], ["apply"], ["templates"], ["templates", "check"], ["doctor"]]
)
def test_help(verb: list[str], capsys: Any) -> None:
    assert cli.main([*verb, "--help"]) == 0
    assert "Usage: fusescout" in capsys.readouterr().out


def test_version(capsys: Any) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"fusescout \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_and_report_start_without_torch(saved: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, tilelang=None)\nfrom fusescout.cli import main; sys.exit(main({}))"
    )
    for line in (["--help"], ["report", str(saved)], ["templates", "--help"]):
        assert (
            subprocess.run([sys.executable, "-c", code.format(line)], capture_output=True, check=False).returncode == 0
        )
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fusescout", "--help"], capture_output=True, check=True)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 1.5  # 0.15 s on a quiet machine; torch alone takes longer than this bound


TEMPLATE = '''"""Doubles."""
NAME = "double"
FAMILY = "pointwise"
def supports(graph, device): return "never"
def configs(graph, device): return []
def kernel(graph, config, device): ...
'''


def test_templates_of_a_folder(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "double.py").write_text(TEMPLATE)
    option = ["--templates", str(tmp_path)]
    assert cli.main(["templates", "list", "doub*", "--json", *option]) == 0
    listed = json.loads(capsys.readouterr().out)["templates"]
    assert [(t["name"], t["summary"]) for t in listed] == [("double", "Doubles.")]
    assert cli.main(["templates", "list", "doub*", *option]) == 0
    assert capsys.readouterr().out.startswith("double  pointwise  Doubles.")
    assert cli.main(["templates", "show", "double", "-v", *option]) == 0
    assert 'FAMILY = "pointwise"' in capsys.readouterr().out
    assert cli.main(["templates", "show", "nope", *option]) == 2
    assert "double" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('return "never"', "return None"), "must refuse"),
        (('return "never"', "return graph.inputs[7]"), "IndexError"),
        (("NAME =", "from __future__ import annotations\nNAME ="), "__future__"),
        (("def kernel", "def colonel"), "kernel"),
        (('NAME = "double"', ""), "double.py is left out: it has no NAME."),
        (("NAME =", "1/0\nNAME ="), "ZeroDivisionError"),
    ],
)
def test_templates_check_finds_broken_ones(change: tuple[str, str], said: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "double.py").write_text(TEMPLATE.replace(*change))
    (tmp_path / "sound.py").write_text(TEMPLATE.replace("double", "sound"))
    assert cli.main(["templates", "check", "[sd]ou*", "--templates", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert said in out + err and "sound: ok" in out


def test_a_helper_beside_templates_may_have_its_own_configs(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "double.py").write_text(TEMPLATE)
    (tmp_path / "tiles.py").write_text("def configs(tile): ...\n")
    assert cli.main(["templates", "check", "double", "--templates", str(tmp_path)]) == 0
    assert "tiles" not in capsys.readouterr().err


def test_doctor_strict(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("fusescout.cli.doctor._ask", lambda code: ("tilelang" not in code, "No module named tilelang"))
    line = ["doctor", "--cache-dir", str(tmp_path)]
    assert cli.main(line) == 0
    assert re.search(r"tilelang +MISSING .*pip install 'fusescout\[tilelang\]'", capsys.readouterr().out)
    assert cli.main([*line, "--strict"]) == 3
    capsys.readouterr()
    assert cli.main([*line, "--json"]) == 0
    checks = {c["name"]: c["ok"] for c in json.loads(capsys.readouterr().out)}
    assert checks["torch"] and not checks["tilelang"] and checks["cache"]


@given(st.text())
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t" for c in visible(text))


def test_a_full_disk_behind_stdout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(Unwritable, match="No space left"):
            Terminal().out("x" * 100_000)
        monkeypatch.undo()
