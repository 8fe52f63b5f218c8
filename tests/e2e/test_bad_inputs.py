"""What goes wrong at users', as they meet it: one clear message, the documented code, nothing left behind.

What depends on the process (signals, limits, a whole environment) runs in one of its own; the rest calls `main`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fusescout.cli import main

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.fc(x))

"""
SOUND = NET + "def get_model():\n    return Net()\n\ndef get_inputs():\n    return (torch.ones(2, 4),)\n"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def process(folder: Path, *line: str, before: Callable[[], None] | None = None, **variables: str) -> Done:
    """Run `fusescout` as a user does."""
    environ = {**os.environ, "FUSESCOUT_CACHE_DIR": str(folder / "cache"), "NO_COLOR": "1", **variables}
    command = [sys.executable, "-m", "fusescout", *line]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False, preexec_fn=before
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def fusescout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run the same in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSESCOUT_CACHE_DIR", str(tmp_path / "cache"))

    def run(_folder: Path, *line: str, **variables: str) -> Done:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Done(main(line), *capfd.readouterr())

    return run


def refused(done: Done, code: int, *said: str, traceback: bool = False) -> None:
    """Check one refusal: its code, one message that says `said`, and no noise."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(re.findall(r"^(?:internal )?error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    for text in said:
        assert text in done.stderr
    assert ("Traceback (most recent call last)" in done.stderr) is traceback, done.stderr
    assert "fusescout/" not in "".join(re.findall(r'File "(.*?)"', done.stderr)).replace(
        os.environ.get("TMPDIR", "/tmp"), ""
    )


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "model.py").write_text(textwrap.dedent(text))
        return tmp_path

    return write


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> None:
    yield
    left = {p.name for p in tmp_path.iterdir()} - {"model.py", "cache", "__pycache__"}
    assert not left, f"left behind: {left}"


def test_missing_file(tmp_path: Path, fusescout: Callable[..., Done]) -> None:
    refused(fusescout(tmp_path, "analyze", "modell.py"), 2, "modell.py", "no such file", "model.py, file.py:attribute")


def test_no_model_in_it(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    done = fusescout(model(NET), "analyze", "model.py")
    refused(done, 2, "No model", "fusescout_workload()", "get_model()", "get_inputs()", "KernelBench", "model.py:Net")


def test_import_error_inside(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    done = fusescout(model("import no_such_package_here\n" + SOUND), "analyze", "model.py")
    refused(done, 4, "No module named 'no_such_package_here'", "model.py", traceback=True)
    assert "No model" not in done.stderr


def test_wrong_input_shape(model: Callable[[str], Path]) -> None:
    done = process(model(SOUND.replace("(2, 4)", "(2, 5)")), "analyze", "--device", "cpu", "model.py")
    refused(done, 4, "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x3)", "x: float32[2,5]", traceback=True)


def test_nan_weights(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    poisoned = SOUND.replace("return Net()", "net = Net()\n    net.fc.weight.data[0, 0] = float('nan')\n    return net")
    refused(fusescout(model(poisoned), "analyze", "--device", "cpu", "model.py"), 2, "fc.weight", "NaN")


def test_weights_that_overflow_in_the_dtype_asked_for(
    model: Callable[[str], Path], fusescout: Callable[..., Done]
) -> None:
    large = SOUND.replace("return Net()", "net = Net()\n    net.fc.bias.data[0] = 1e6\n    return net")
    done = fusescout(model(large), "analyze", "--device", "cpu", "--dtype", "fp16", "model.py")
    refused(done, 2, "fc.bias", "inf", "overflow")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("return nn.Sequential(), torch.ones(2)", "runs no operator"),
        ("return nn.Module(), torch.ones(2)", "forward"),
        ("net = nn.Linear(2, 2)\n    net.forward = lambda x: None\n    return net, torch.ones(2)", "NoneType"),
    ],
)
def test_empty_module(text: str, said: str, model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    folder = model(f"import torch\nfrom torch import nn\n\ndef get_model():\n    {text}\n")
    code = 4 if "nn.Module()" in text else 2
    refused(fusescout(folder, "analyze", "--device", "cpu", "model.py"), code, said, traceback=code == 4)


def test_cuda_without_a_gpu(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    done = fusescout(model(SOUND), "analyze", "--device", "cuda", "model.py", CUDA_VISIBLE_DEVICES="")
    refused(done, 3, "cuda", "--device cpu works")


def test_no_nvcc(tmp_path: Path) -> None:
    """Without nvcc the rest still works: the doctor names what is lost and what to install."""
    variables = {"PATH": str(tmp_path / "cache"), "CUDA_HOME": "", "CUDA_PATH": ""}
    done = process(tmp_path, "doctor", "--strict", **variables)
    assert done.returncode == 3, done.stderr
    assert re.search(r"^g\+\+ +MISSING", done.stdout, re.MULTILINE)
    assert re.search(r"^torch +ok", done.stdout, re.MULTILINE)
    line = next(text for text in done.stdout.splitlines() if text.startswith("nvcc"))
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert "fusescout[nvcc]" in line and "all else works" in line


def test_cache_folder_that_cannot_be_made(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    folder = model(SOUND)
    done = fusescout(folder, "analyze", "--cache-dir", "model.py/cache", "model.py")
    refused(done, 3, "cache", "Not a directory", "--cache-dir")


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limits here")
def test_disk_that_takes_no_more(model: Callable[[str], Path]) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    folder = model(SOUND)
    done = process(folder, "analyze", "model.py", before=limit, PYTHONDONTWRITEBYTECODE="1")
    refused(done, 3, "File too large", "--cache-dir")
    assert not [p for p in (folder / "cache").rglob("*") if p.is_file()]


def test_full_disk(model: Callable[[str], Path]) -> None:
    folder = model(SOUND)
    (folder / "cache").mkdir()
    mount = f"mount -t tmpfs -o size=4k tmpfs cache && head -c 9999 /dev/zero > cache/x 2>/dev/null; {sys.executable} "
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    command = ["unshare", "-m", "sh", "-c", mount + "-m fusescout analyze --cache-dir cache model.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("mounting needs privileges that this user doesn't have")
    refused(done, 3, "No space left on device", "--cache-dir")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["analyze", "--dtpe", "fp16", "model.py"], "--dtype"),
        (["analyze", "model.py", "--device", "cpu"], "Put --device before model.py"),
        (["analyze", "--effort", "fast", "model.py"], "'quick', 'default' or 'max'"),
    ],
)
def test_unknown_option(
    line: list[str], said: str, model: Callable[[str], Path], fusescout: Callable[..., Done]
) -> None:
    refused(fusescout(model(SOUND), *line), 2, said)


def test_unknown_environment_setting(model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    refused(fusescout(model(SOUND), "analyze", "model.py", FUSESCOUT_EFORT="max"), 2, "Did you mean FUSESCOUT_EFFORT?")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return torch.relu(self.fc(x))", "raise ValueError('[bold]no luck[/]')"),
        ("return Net()", "raise ValueError('[bold]no luck[/]')"),
        ("super().__init__()", "raise ValueError('[bold]no luck[/]')"),
    ],
)
def test_model_that_raises(old: str, new: str, model: Callable[[str], Path], fusescout: Callable[..., Done]) -> None:
    done = fusescout(model(SOUND.replace(old, new)), "analyze", "--device", "cpu", "model.py")
    refused(done, 4, "ValueError: [bold]no luck[/]", "model.py", traceback=True)


def test_interrupted(model: Callable[[str], Path]) -> None:
    folder = model("import pathlib, time\npathlib.Path('cache/started').touch()\ntime.sleep(60)\n" + SOUND)
    environ = {**os.environ, "FUSESCOUT_CACHE_DIR": "cache"}
    command = [sys.executable, "-m", "fusescout", "analyze", "--device", "cpu", "model.py"]
    running = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell starts its background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        while not (folder / "cache" / "started").exists() and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=45)  # less than the model sleeps
    finally:
        running.kill()
    assert running.returncode == 130 and out == "" and "Traceback" not in err
    assert "Interrupted; nothing was written." in err
