"""The command line without torch: wiring, exit codes, output, run folders. The analysis is a fake here."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_session import accepted
from sample_session import all_kept

from fusescout import cli
from fusescout.cli.options import spell
from fusescout.cli.runfolder import place_for
from fusescout.config import Config
from fusescout.errors import FuseScoutError
from fusescout.errors import OutputExists
from fusescout.ir import Subgraph
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.session import EndToEnd
from fusescout.session import Session

MODEL = "def get_model(): ...\ndef get_inputs(): ...\n"
EMPTY = Subgraph((), (), ())
PLAN = Plan(target="model.py", mode="training", device_kind="cpu", device_name="any", torch="2.13")


@dataclass(frozen=True)
class Outcome:
    session: Session
    plan: Plan


class Spare:
    """Stands in for the worker's process."""

    started = False

    def start(self) -> None:
        self.started = True

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class Fake:
    """Stands in for loading and analysing; keeps what it was given."""

    session: Session = field(default_factory=accepted)
    raises: BaseException | None = None
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)

    def load(self, spec: str, **options: Any) -> str:
        print("the user's code prints this")
        os.write(1, b"so does a compiler, below Python\n")
        self.loads.append((spec, options))
        return "a workload"

    def run(self, workload: str, config: Config, on_event: Any, folder: Path, spare: Spare) -> Outcome:
        assert workload == "a workload"
        assert spare.started, "its imports take as long as ours"
        self.configs.append(config)
        on_event("race", 1, 2, "[bold]linear[/bold]")
        (folder / "trace.json.gz").write_bytes(b"trace")
        if self.raises:
            raise self.raises
        profile = self.session.profile.model_copy(update={"trace": str(folder / "trace.json.gz")})
        return Outcome(self.session.model_copy(update={"profile": profile}), PLAN)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    made = Fake()
    analysis = ModuleType("fusescout.analysis")
    analysis.run = made.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fusescout.analysis", analysis)
    monkeypatch.setattr("fusescout.target.load", made.load)
    monkeypatch.setattr("fusescout.environment.require_torch", lambda: None)
    monkeypatch.setattr("fusescout.workerpool.Spare", Spare)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSESCOUT_CACHE_DIR", str(tmp_path / "cache"))
    Path("model.py").write_text(MODEL)
    return made


def entries(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if "cache" not in p.parts}


def test_analyze_writes_the_run_folder_and_prints_the_report(
    fake: Fake, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/fusescout", "analyze", "model.py"])
    assert cli.main() == 0
    out, err = capfd.readouterr()
    assert accepted().verdict in re.sub(r"\s+", " ", out)
    assert "prints this" not in out and "below Python" not in out
    assert "prints this" in err and "below Python" in err
    assert "fusescout-runs/model/report.html" in err
    run = tmp_path / "fusescout-runs" / "model"
    assert entries(run) == {"session.json", "plan.json", "report.html", "trace.json.gz"}
    session = Session.load(run)
    assert session.profile.trace == "trace.json.gz"
    assert session.settings["run_dir"] == "fusescout-runs/model"
    assert session.workload.command == "fusescout analyze model.py"
    assert Plan.load(run) == PLAN
    assert fake.loads[0][1]["seed"] == 0


def test_runs_at_several_shapes_go_into_one_plan(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, file = ["analyze", "-q", "--into", "all.json", "model.py"], tmp_path / "all.json"
    assert cli.main(line) == 0
    assert Plan.load(file) == PLAN
    other = Entry(
        id="p", family="pointwise", chain=[], subgraph=EMPTY.to_json(), contender="eager", variant={}, sites=1
    )
    PLAN.model_copy(update={"entries": [other]}).save(file)
    assert cli.main(line) == 0
    assert Plan.load(file).entries == [other], "what was there stays"
    PLAN.model_copy(update={"device_name": "another"}).save(file)
    assert cli.main(line) == 3
    assert "another" in capsys.readouterr().err
    assert len(list((tmp_path / "fusescout-runs").iterdir())) == 3, "the run itself is kept"
    file.write_text("{}")
    assert cli.main(line) == 2
    assert len(fake.loads) == 3, "a file that is no plan is told before anything is run"


def test_json_is_exactly_one_document(fake: Fake, capfd: Any) -> None:
    assert cli.main(["analyze", "--json", "model.py"]) == 0
    assert json.loads(capfd.readouterr().out)["schema_version"] == 2


def test_options_reach_the_configuration(fake: Fake, tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    line = [
        "analyze",
        "--effort",
        "quick",
        "--top",
        "3",
        "--no-use-cache",
        "--allow-tf32",
        "--dtype",
        "bf16",
        "-j",
        "1",
    ]
    assert cli.main([*line, "--templates", str(folders[0]), "--templates", str(folders[1]), "model.py"]) == 0
    config = fake.configs[0]
    assert (config.effort, config.top, config.use_cache, config.allow_tf32) == ("quick", 3, False, True)
    assert (config.dtype, config.jobs, config.templates) == ("bfloat16", 1, folders)
    assert fake.loads[0][1]["dtype"] == "bfloat16"


def test_a_folder_of_templates_that_is_not_there_is_refused(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "--templates", "nowhere", "model.py"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not fake.loads


def test_every_setting_has_an_option_with_its_name_and_default() -> None:
    import typer

    command = typer.main.get_command(cli.app).commands["analyze"]  # type: ignore[attr-defined]
    parameters = {p.name: p for p in command.params}
    assert set(Config.model_fields) <= set(parameters)
    assert all(spell(n) in parameters[n].opts for n in Config.model_fields)
    assert "--with" in parameters["compose"].opts
    for name, info in Config.model_fields.items():
        shown = re.search(r"\[default: (.*)\]", parameters[name].help or "")
        if isinstance(info.default, int | float) and not isinstance(info.default, bool):
            assert shown and float(shown[1]) == info.default, name


def test_what_follows_the_target_is_the_targets(fake: Fake) -> None:
    assert cli.main(["analyze", "model.py", "--lr", "3e-4", "x"]) == 0
    assert fake.loads[-1][1]["argv"] == ["--lr", "3e-4", "x"]
    assert cli.main(["analyze", "model.py", "--", "--json"]) == 0
    assert fake.loads[-1][1]["argv"] == ["--json"]


@pytest.mark.parametrize("stray", [["--json"], ["--device", "cpu"], ["--effort=quick"], ["-v"]])
def test_our_options_behind_the_target_are_refused(stray: list[str], fake: Fake, capsys: Any) -> None:
    assert cli.main(["analyze", "model.py", *stray]) == 2
    assert f"before {stray[0]}" in capsys.readouterr().err.replace("Put ", "before ")
    assert not fake.loads


def test_a_second_run_gets_its_own_folder(fake: Fake, tmp_path: Path) -> None:
    assert [cli.main(["analyze", "-q", "model.py"]) for _ in range(2)] == [0, 0]
    assert {p.name for p in (tmp_path / "fusescout-runs").iterdir()} == {"model", "model-2"}


def test_an_earlier_run_is_replaced_only_with_force(fake: Fake, tmp_path: Path, capsys: Any) -> None:
    line = ["analyze", "-o", "out", "model.py"]
    assert cli.main(line) == 0
    fake.session = all_kept()
    assert cli.main(line) == 2
    assert "--force" in capsys.readouterr().err
    assert Session.load(tmp_path / "out").verdict == accepted().verdict
    assert cli.main(["analyze", "--force", *line[1:]]) == 0
    assert Session.load(tmp_path / "out").verdict == all_kept().verdict
    assert {p.name for p in tmp_path.iterdir()} == {"out", "model.py", "cache"}


def test_force_never_replaces_something_else(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    assert cli.main(["analyze", "--force", "-o", "precious", "model.py"]) == 2
    assert cli.main(["analyze", "--force", "-o", "model.py", "model.py"]) == 2
    assert (tmp_path / "precious" / "thesis.tex").exists() and Path("model.py").read_text() == MODEL


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "nothing was written"),
        (FuseScoutError("What.", "Why.", "Fix."), 2, "Why."),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried\nmore"), 3, "End what else uses"),
        (ZeroDivisionError("oops"), 70, "internal error: ZeroDivisionError: oops"),
        (OSError(28, "No space left on device"), 3, "No space left on device"),
        (OSError(13, "Permission denied", "/elsewhere"), 70, "Permission denied"),
        (SystemExit(5), 5, ""),
    ],
)
def test_nothing_half_written_is_left(
    error: BaseException, code: int, said: str, fake: Fake, tmp_path: Path, capsys: Any
) -> None:
    fake.raises = error
    assert cli.main(["analyze", "model.py"]) == code
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err and not out
    assert entries(tmp_path) == {"model.py"}


def test_internal_errors_show_their_traceback_on_request(fake: Fake, capsys: Any) -> None:
    fake.raises = ZeroDivisionError("oops")
    assert cli.main(["analyze", "-v", "model.py"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "code"), [("1.0", 0), ("99", 1)])
def test_fail_under(limit: str, code: int, fake: Fake, capsys: Any) -> None:
    assert cli.main(["analyze", "--fail-under", limit, "model.py"]) == code
    assert ("--fail-under" in capsys.readouterr().err) is bool(code)


def test_keeping_the_frameworks_code_is_a_speedup_of_one(fake: Fake) -> None:
    fake.session = all_kept().model_copy(update={"end_to_end": None})
    assert cli.main(["analyze", "--fail-under", "1.0", "model.py"]) == 0
    assert cli.main(["analyze", "--fail-under", "1.01", "model.py"]) == 1


def test_quiet_says_only_the_result(fake: Fake, capfd: Any) -> None:
    assert cli.main(["analyze", "-q", "model.py"]) == 0
    assert "report.html" not in capfd.readouterr().err


def test_markup_in_user_text_is_text(fake: Fake, capsys: Any) -> None:
    assert cli.main(["analyze", "[bold red]x[/].py"]) == 2 or fake.loads
    fake.raises = FuseScoutError("[link=evil]what[/link] \x1b]0;title\x07", "[/]", "")
    assert cli.main(["analyze", "model.py"]) == 2
    err = capsys.readouterr().err
    assert "[link=evil]what[/link] \\x1b]0;title\\x07" in err and "\x1b]0" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["analyze", "--dtpe", "x", "model.py"], "--dtype"),
        (["analyze"], "TARGET"),
        (["analize", "model.py"], "analyze"),
        (["analyze", "--top", "many", "model.py"], "many"),
        (["analyze", "--effort", "fast", "model.py"], "option --effort can't be 'fast'"),
        (["report"], "SESSION"),
    ],
)
def test_wrong_usage(line: list[str], said: str, fake: Fake, capsys: Any) -> None:
    assert cli.main(line) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and not fake.loads


@dataclass
class FakeApply:
    """Stands in for patching and the end-to-end comparison."""

    verdict: EndToEnd = field(default_factory=lambda: accepted().end_to_end or pytest.fail("the sample has no verdict"))
    calls: list[str] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)

    def patch(self, model: Any, plan: Plan) -> FakeApply:
        self.calls.append("patch")
        return self

    def undo(self) -> None:
        self.calls.append("undo")

    def compare(
        self, workload: Any, plan: Plan, config: Config, on_event: Any, may_leave: bool
    ) -> tuple[EndToEnd, Plan]:
        print("noise")
        assert may_leave is plan.is_empty
        self.calls.append("compare")
        self.configs.append(config)
        return self.verdict, plan


@pytest.fixture
def applied(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> FakeApply:
    made = FakeApply()
    for module, names in (("patching", ["patch"]), ("endtoend", ["compare"])):
        stand_in = ModuleType(f"fusescout.{module}")
        for name in names:
            setattr(stand_in, name, getattr(made, name))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr("fusescout.target.load", lambda spec, **_: SimpleNamespace(model=spec))
    PLAN.save(Path("plan.json"))
    return made


def test_apply_patches_as_the_plan_was_made_and_prints_the_verdict(applied: FakeApply, capfd: Any) -> None:
    assert cli.main(["apply", "plan.json", "model.py"]) == 0
    out, err = capfd.readouterr()
    assert applied.verdict.verdict in out and "noise" not in out and "noise" in err
    assert applied.calls == ["patch", "undo", "compare"]
    assert (applied.configs[0].mode, applied.configs[0].device) == ("training", "cpu")
    assert cli.main(["apply", "--mode", "inference", "--json", "plan.json", "model.py"]) == 0
    assert applied.configs[1].mode == "inference"
    assert json.loads(capfd.readouterr().out)["verdict"] == applied.verdict.verdict


@pytest.mark.parametrize("change", [{"dropped": ["gemm-1"]}, {"verified": False}])
def test_apply_fails_where_the_plan_does_not_hold(change: dict[str, Any], applied: FakeApply) -> None:
    entry = Entry(id="a", family="f", chain=["relu"], subgraph=EMPTY.to_json(), contender="t", variant={}, sites=1)
    PLAN.model_copy(update={"entries": [entry]}).save(Path("plan.json"))
    assert cli.main(["apply", "plan.json", "model.py"]) == 0
    applied.verdict = applied.verdict.model_copy(update=change)
    assert cli.main(["apply", "plan.json", "model.py"]) == 1


def test_apply_checks_the_plan_before_the_model(applied: FakeApply, capsys: Any) -> None:
    Path("plan.json").write_text("{}")
    assert cli.main(["apply", "plan.json", "model.py"]) == 2
    assert "plan_version" in capsys.readouterr().err and not applied.calls


def test_analyze_without_torch_says_what_to_install(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["analyze", "model.py"]) == 3
    assert "pip install 'fusescout[torch]'" in capsys.readouterr().err


def test_a_run_folder_for_every_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"model.py": "model", "a/b.py:Net": "b-Net", "pkg.mod:make": "pkg.mod-make", "..": "run", "x y.py": "x-y"}
    for target, name in names.items():
        assert place_for(None, target, force=False) == Path("fusescout-runs", name)


@given(st.text())
def test_a_run_folder_is_always_a_plain_name(target: str) -> None:
    place = place_for(None, target, force=False)
    assert place.parent == Path("fusescout-runs") and not place.name.startswith(".") and "/" not in place.name


def test_output_exists_is_said_before_anything_runs(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(OutputExists):
        place_for(tmp_path, "model.py", force=True)
