"""Settings: precedence, sources, and messages that name the culprit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusescout.config import DISABLE
from fusescout.config import Config
from fusescout.config import disabled
from fusescout.config import load
from fusescout.config import to_environment
from fusescout.errors import BadSetting
from fusescout.errors import ConfigUnreadable
from fusescout.errors import FuseScoutError
from fusescout.errors import UnknownSetting

NAMES = tuple(Config.model_fields)


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_defaults_without_any_source(tmp_path: Path) -> None:
    config = load(folder=tmp_path, environ={})
    assert (config.device, config.effort, config.threshold, config.min_gain) == ("auto", "default", 1.05, 1.0)
    assert (config.runs, config.rounds, config.top, config.deadline_s) == (5, 30, 12, 60)
    assert config.use_cache and not config.allow_tf32 and config.fail_under is None
    assert 1 <= config.jobs <= 8


def test_arguments_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    folder = project(tmp_path, "[tool.fusescout]\ntop = 3\nruns = 3\nrounds = 3\n")
    config = load({"top": 9}, folder=folder, environ={"FUSESCOUT_TOP": "7", "FUSESCOUT_RUNS": "7"})
    assert (config.top, config.runs, config.rounds, config.seed) == (9, 7, 3, 0)


def test_an_argument_that_is_none_is_not_given(tmp_path: Path) -> None:
    assert load({"top": None}, folder=tmp_path, environ={"FUSESCOUT_TOP": "7"}).top == 7


def test_an_empty_variable_is_not_given(tmp_path: Path) -> None:
    assert load(folder=tmp_path, environ={"FUSESCOUT_TOP": ""}).top == 12


def test_nearest_file_with_the_table_wins(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    project(tmp_path, "[tool.fusescout]\ntop = 3\n")
    project(tmp_path / "a", "[tool.other]\nx = 1\n")
    assert load(folder=inner, environ={}).top == 3
    project(tmp_path / "a", "[tool.fusescout]\ntop = 4\n")
    assert load(folder=inner, environ={}).top == 4


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    inner = tmp_path / "a"
    inner.mkdir()
    project(tmp_path, '[tool.fusescout]\ntemplates = ["mine", "/abs"]\ncache-dir = "cache"\n')
    config = load(folder=inner, environ={})
    assert config.templates == (tmp_path / "mine", Path("/abs"))
    assert config.cache_dir == tmp_path / "cache"


def test_templates_variable_is_a_path_list(tmp_path: Path) -> None:
    assert load(folder=tmp_path, environ={"FUSESCOUT_TEMPLATES": os.pathsep.join(["a", "b"])}).templates == (
        Path("a"),
        Path("b"),
    )


@pytest.mark.parametrize(
    ("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float64", "float64")]
)
def test_short_dtype_names(short: str, name: str, tmp_path: Path) -> None:
    assert load({"dtype": short}, folder=tmp_path, environ={}).dtype == name


@pytest.mark.parametrize(
    ("text", "environ", "arguments", "culprit"),
    [
        ("[tool.fusescout]\nthreshhold = 2\n", {}, {}, "pyproject.toml"),
        ("", {"FUSESCOUT_THRESHHOLD": "2"}, {}, "FUSESCOUT_THRESHHOLD"),
        ("", {}, {"threshhold": 2}, "argument threshhold"),
    ],
)
def test_unknown_names_are_errors_with_the_closest(
    text: str, environ: dict[str, str], arguments: dict[str, int], culprit: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownSetting) as caught:
        load(arguments, folder=project(tmp_path, text), environ=environ)
    message = str(caught.value)
    assert culprit in message and "Did you mean" in message and "threshold" in message.lower()
    assert "min_gain" in message.lower()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "environ", "arguments", "parts"),
    [
        ('[tool.fusescout]\neffort = "fast"\n', {}, {}, ["pyproject.toml: effort", "'fast'", "quick", "max"]),
        ("", {"FUSESCOUT_RUNS": "many"}, {}, ["FUSESCOUT_RUNS", "'many'", "integer"]),
        ("", {}, {"threshold": 0.9}, ["argument threshold", "0.9", "1"]),
        ("", {}, {"device": "tpu"}, ["argument device", "'tpu'", "cuda:N"]),
        ("", {}, {"threshold": float("nan")}, ["argument threshold", "nan"]),
        ("[tool.fusescout]\ntop = 0\n", {}, {}, ["pyproject.toml: top", "0"]),
    ],
)  # fmt: skip
def test_bad_values_name_source_given_and_allowed(
    text: str, environ: dict[str, str], arguments: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BadSetting) as caught:
        load(arguments, folder=project(tmp_path, text), environ=environ)
    for part in parts:
        assert part in str(caught.value)


def test_a_bad_value_that_is_overridden_does_no_harm(tmp_path: Path) -> None:
    assert load({"top": 3}, folder=tmp_path, environ={"FUSESCOUT_TOP": "many"}).top == 3


@pytest.mark.parametrize("text", ["[tool.fusescout\n", "[tool]\nfusescout = 3\n"])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigUnreadable, match=r"pyproject\.toml"):
        load(folder=project(tmp_path, text), environ={})


def test_the_switch_of_all_patches_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder=tmp_path, environ={DISABLE: "1"})
    for text, off in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv(DISABLE, text)
        assert disabled() == off


def test_it_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(folder=tmp_path, environ={}).top = 3  # type: ignore[misc]


@given(
    top=st.integers(1, 99),
    tf32=st.booleans(),
    gain=st.floats(0.5, 3),
    dirs=st.lists(st.from_regex(r"[a-z/]{1,9}", fullmatch=True), min_size=1),
)
def test_the_environment_form_says_the_same(top: int, tf32: bool, gain: float, dirs: list[str]) -> None:
    settings = {"top": top, "allow_tf32": tf32, "min_gain": gain, "templates": tuple(map(Path, dirs))}
    config = load(folder=Path("/"), environ=to_environment(settings))
    assert {k: getattr(config, k) for k in settings} == settings


@given(
    name=st.sampled_from(NAMES),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())),
)
def test_any_value_is_a_config_or_a_clear_error(name: str, value: object) -> None:
    try:
        assert isinstance(load({name: value}, folder=Path("/"), environ={}), Config)
    except FuseScoutError as error:
        assert f"argument {name}" in str(error)


def test_it_needs_no_torch() -> None:
    code = "import sys, fusescout.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
