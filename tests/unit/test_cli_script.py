"""`fusescout analyze` on scripts that call FuseScout themselves, without torch: the analyses are fakes here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace
from typing import Any

import pytest
from sample_session import accepted

from fusescout import cli

SESSIONS = {"fast": accepted(), "slow": accepted().model_copy(update={"end_to_end": None})}
ANALYSES = """import fusescout, sys, types
for kind in sys.argv[1:]:
    fusescout.analyze(types.SimpleNamespace(kind=kind, modules=list))
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    analysis = ModuleType("fusescout.analysis")
    analysis.run = lambda kind, *_: SimpleNamespace(session=SESSIONS[kind])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fusescout.analysis", analysis)
    monkeypatch.setattr("fusescout.admission.check_model", lambda *_: None)
    monkeypatch.setattr("fusescout.workload.build", lambda model, *_, **__: model.kind)
    monkeypatch.setattr("fusescout.target.load", lambda *_, **__: pytest.fail("a script was taken for a model"))
    monkeypatch.setattr("fusescout.environment.require_torch", lambda: None)
    monkeypatch.chdir(tmp_path)


def test_a_script_runs_as_python_would_run_it(capsys: Any) -> None:
    Path("train.py").write_text(
        "import fusescout, os, sys\nassert __name__ == '__main__'\n"
        "print(sys.argv[1:], os.environ['FUSESCOUT_EFFORT'], os.environ['FUSESCOUT_OUTPUT'])\n"
    )
    assert cli.main(["analyze", "--effort", "quick", "-o", "out", "train.py", "--lr", "3e-4"]) == 0
    assert capsys.readouterr().out.strip() == "['--lr', '3e-4'] quick out"
    assert "FUSESCOUT_EFFORT" not in os.environ
    Path("train.py").write_text("import fusescout\nraise KeyError('inside')\n")
    assert cli.main(["analyze", "train.py"]) == 4
    assert "KeyError: 'inside'" in capsys.readouterr().err
    assert cli.main(["analyze", "--json", "train.py"]) == 2


@pytest.mark.parametrize(("kinds", "code"), [("fast", 0), ("slow", 1), ("slow fast", 1), ("fast slow", 1)])
def test_fail_under_holds_for_every_analysis_of_a_script(kinds: str, code: int, capsys: Any) -> None:
    Path("train.py").write_text(ANALYSES)
    assert cli.main(["analyze", "train.py", *kinds.split()]) == 0
    assert "analysed nothing" not in capsys.readouterr().err
    assert cli.main(["analyze", "--fail-under", "1.01", "train.py", *kinds.split()]) == code
    assert ("below --fail-under" in capsys.readouterr().err) is bool(code)


def test_a_script_that_analyses_nothing_passes_no_gate(capsys: Any) -> None:
    Path("train.py").write_text(ANALYSES)
    assert cli.main(["analyze", "train.py"]) == 0
    assert "train.py ran and analysed nothing." in capsys.readouterr().err
    assert cli.main(["analyze", "--fail-under", "0.5", "train.py"]) == 1
    assert "--fail-under has nothing to judge" in capsys.readouterr().err
