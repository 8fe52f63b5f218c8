"""Loading models: every accepted form, every refusal, and what must be left as it was."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from fusescout import errors
from fusescout.nest import convert
from fusescout.nest import tensors
from fusescout.target import Spec
from fusescout.target import as_call
from fusescout.target import is_script
from fusescout.target import load
from fusescout.usercode import run_script
from fusescout.workload import build

HEAD = "import torch\nfrom torch import nn\n"
NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 3)
    def forward(self, x, scale=1.0):
        return self.fc(x) * scale
"""


@pytest.fixture(autouse=True)
def global_state_is_kept() -> Any:
    path, argv, main, rng = list(sys.path), list(sys.argv), sys.modules["__main__"], torch.get_rng_state()
    yield
    assert (sys.path, sys.argv, sys.modules["__main__"]) == (path, argv, main)
    torch.set_rng_state(rng)


def write(folder: Path, text: str, name: str = "model.py", head: str = HEAD) -> str:
    file = folder / name
    file.write_text(head + textwrap.dedent(text))
    return str(file)


@pytest.mark.parametrize(
    "text",
    [
        NET + "def fusescout_workload(): return Net(), (torch.ones(2, 4),)",
        NET + "def fusescout_workload(): return Net(), torch.ones(2, 4)",
        NET + "def fusescout_workload(): return Net(), [torch.ones(2, 4)]",
        NET + "def fusescout_workload(): return Net(), (torch.ones(2, 4),), {'scale': 1.0}",
        NET + "def fusescout_workload(): return Net(), {'x': torch.ones(2, 4), 'scale': 1.0}",
        NET + "def fusescout_workload(): return Net(), ((torch.ones(2, 4),), {'scale': 1.0})",
        NET + "from fusescout.target import Workload\n"
        "def fusescout_workload(): return Workload(Net(), (torch.ones(2, 4),), {})",
        NET + "def get_model(): return Net()\ndef get_inputs(): return (torch.ones(2, 4),)",
        NET + "def get_model(): return Net(), torch.ones(2, 4)",
        NET + "Model = Net\ndef get_inputs(): return [torch.ones(2, 4)]\ndef get_init_inputs(): return [4]",
        NET + "Model = Net\ndef get_inputs(): return [torch.ones(2, 4)]\ndef get_init_inputs(): return {'width': 4}",
        NET + "Model = Net\ndef get_inputs(): return [torch.ones(2, 4)]",
        NET + "if True:\n    def get_model(): return Net(), torch.ones(2, 4)",
        NET + "import os\nfrom os import *\nglobals()['get_model'] = lambda: (Net(), torch.ones(2, 4))",
        # the first name in the documented order wins
        NET + "def get_model(): raise SystemError\ndef fusescout_workload(): return Net(), torch.ones(2, 4)",
    ],
)
def test_a_file_with_an_accepted_name(text: str, tmp_path: Path) -> None:
    workload = load(write(tmp_path, text), device="cpu")
    assert workload.call().shape == (2, 3)
    assert not workload.call().requires_grad and not workload.model.training
    assert (workload.device, workload.dtype, workload.mode) == ("cpu", "float32", "inference")
    assert any("float32[2,4]" in i and i.startswith("x") for i in workload.info().inputs)


@pytest.mark.parametrize(
    ("text", "attribute"),
    [
        (NET + "net = Net()\ndef get_inputs(): return torch.ones(2, 4)", "net"),
        (NET + "def get_inputs(): return torch.ones(2, 4)", "Net"),
        (NET + "def make(): return Net(), torch.ones(2, 4)", "make"),
        (NET + "def make(): return Net()\ndef get_inputs(): return torch.ones(2, 4)", "make"),
        (NET + "pair = (Net(), torch.ones(2, 4))", "pair"),
        (NET + "class Zoo:\n    @staticmethod\n    def small(): return Net(), torch.ones(2, 4)", "Zoo.small"),
        (NET + "class Own(Net):\n    @property\n    def dummy_inputs(self): return {'x': torch.ones(2, 4)}", "Own"),
    ],
)
def test_an_attribute(text: str, attribute: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    assert load(f"{file}:{attribute}", device="cpu").call().shape == (2, 3)


def test_a_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fs_pkg").mkdir()
    write(tmp_path, NET + "def make(): return Net(), torch.ones(2, 4)", "fs_pkg/nets.py")
    monkeypatch.chdir(tmp_path)
    assert load("fs_pkg.nets:make", device="cpu").call().shape == (2, 3)
    for name in ("fs_pkg.nope:make", "fs_nope:make", "fs_nope"):
        with pytest.raises(errors.TargetNotFound, match="no module named"):
            load(name)
    with pytest.raises(errors.TargetNotFound, match=r"Did you mean fs_pkg\.nets:make"):
        load("fs_pkg.nets:mak")


def test_imports_work_as_for_a_script_and_argv_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "fs_sibling.py").write_text("WIDTH = 4\n")
    text = NET + "import sys, fs_sibling\nargs = sys.argv\ndef get_model(): return Net(int(args[1])), torch.ones(2, 4)"
    assert load(write(tmp_path, text), argv=["4"]).model.fc.in_features == 4


def test_classes_of_the_file_can_be_pickled(tmp_path: Path) -> None:
    import copy
    import pickle

    model = load(write(tmp_path, NET + "def get_model(): return Net(), torch.ones(2, 4)")).model
    assert pickle.loads(pickle.dumps(copy.deepcopy(model))).fc.weight.equal(model.fc.weight)


def test_a_dataclass_input_is_keywords_or_one_argument(tmp_path: Path) -> None:
    batch = "from dataclasses import dataclass\n@dataclass\nclass Batch:\n    x: torch.Tensor\n    scale: float = 1.0\n"
    spread = NET + batch + "def get_model(): return Net(), Batch(torch.ones(2, 4))"
    assert load(write(tmp_path, spread, "a.py")).kwargs.keys() == {"x", "scale"}
    whole = batch + "class One(nn.Linear):\n    def forward(self, batch): return super().forward(batch.x)\n"
    workload = load(
        write(tmp_path, whole + "def get_model(): return One(4, 3), Batch(torch.ones(2, 4))"), dtype="float64"
    )
    assert workload.call().dtype == torch.float64


def test_nested_outputs_and_integer_inputs(tmp_path: Path) -> None:
    text = """
    from dataclasses import dataclass
    @dataclass
    class Out:
        logits: torch.Tensor
        extra: dict
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(9, 4)
            self.register_buffer("table", torch.arange(4))
        def forward(self, ids, mask):
            h = self.emb(ids) * mask
            return Out(h, {"pairs": (h, [None, h])})
    def fusescout_workload(): return Net(), {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2, 1)}
    """
    workload = load(write(tmp_path, text), dtype="bfloat16")
    assert [t.dtype for t in tensors(workload.call())] == [torch.bfloat16] * 3
    assert workload.kwargs["ids"].dtype == torch.int64 and workload.kwargs["mask"].dtype == torch.bfloat16
    assert workload.model.table.dtype == torch.int64


def test_complex_parameters_stay_complex() -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    assert build(Rotate(), (torch.ones(4),), dtype="bfloat16").model.w.dtype == torch.complex64


def test_tied_weights_and_shared_inputs_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) + y

    x = torch.ones(2, 4, requires_grad=True)
    workload = build(Tied(), (x, x), dtype="float64")
    assert workload.model.a.weight is workload.model.b.weight
    assert workload.args[0] is workload.args[1] and workload.args[0].requires_grad
    assert x.dtype == torch.float32


def test_training_uses_the_files_loss_or_a_default(tmp_path: Path) -> None:
    text = NET + "def get_model(): return Net(), torch.ones(2, 4)\n"
    default = load(write(tmp_path, text, "a.py"), mode="training")
    assert default.model.training and default.call().requires_grad
    assert default.loss_of(default.call()).item() == pytest.approx(default.call().mean().item())
    own = load(write(tmp_path, text + "def loss(output): return output.pow(2).sum()\n", "b.py"), mode="training")
    assert own.loss_of(own.call()).item() == pytest.approx(own.call().pow(2).sum().item())
    own.step()
    assert own.model.fc.weight.grad is not None
    with pytest.raises(errors.UserCodeRaised, match="ZeroDivisionError"):
        load(write(tmp_path, text + "def loss(output): return 1 / 0\n", "c.py"), mode="training")


def test_training_a_frozen_model_is_refused() -> None:
    with pytest.raises(errors.UsageProblem, match="requires a gradient"):
        build(nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),), mode="training", name="m")


def test_the_check_leaves_rng_buffers_and_grads_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    build(model, (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),), mode="training")
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model[0].weight.grad is None


def test_the_seed_makes_weights_reproducible(tmp_path: Path) -> None:
    file = write(tmp_path, NET + "def get_model(): return Net(), torch.randn(2, 4)")
    first, second = load(file, seed=3), load(file, seed=3)
    assert torch.equal(first.call(), second.call())


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("x = 1", errors.NoModelFound, "get_model"),
        (NET, errors.NoModelFound, "model.py:Net"),
        (NET + "def get_model(): return Net()", errors.NoModelFound, r"get_inputs\(\).*forward\(x, scale=1.0\)"),
        (NET + "def get_model(): return 3", errors.NoModelFound, "int"),
        (NET + "def get_model(): return Net(), 1, 2", errors.NoModelFound, "a tuple of Net, int, int"),
        (NET + "def get_model(size): return Net()", errors.NoModelFound, "size"),
        (NET + "def get_inputs(): return 1\nclass Model: pass", errors.NoModelFound, "no torch.nn.Module"),
        ("import nonexistent_thing\ndef get_model(): ...", errors.UserCodeRaised, "nonexistent_thing"),
        ("from torch import nonexistent\ndef get_model(): ...", errors.UserCodeRaised, "nonexistent"),
        ("def get_model(): raise KeyError('inside')", errors.UserCodeRaised, "inside"),
        ("def get_model(: pass", errors.UserCodeRaised, "SyntaxError"),
        ("import sys\ndef get_model(): sys.exit(7)", errors.UserCodeRaised, "SystemExit"),
        (NET + "def get_model(): return Net(), torch.ones(2, 5)", errors.UserCodeRaised, r"2x5 and 4x3.*x: float32"),
        (NET + "def get_model(): return Net(), (1, 2, 3, 4)", errors.UserCodeRaised, "positional arguments"),
        (NET + "def get_model():\n m = Net(); m.fc.weight.data[1] = float('nan'); return m, torch.ones(2, 4)",
         errors.ModelHasNaN, "Parameter fc.weight holds NaN"),
        (NET + "def get_model():\n m = Net(); m.fc.bias.data[1] = float('inf'); return m, torch.ones(2, 4)",
         errors.ModelHasNaN, "Parameter fc.bias holds inf"),
        (NET + "def get_model(): return Net(), torch.full((2, 4), float('nan'))", errors.ModelHasNaN, "input"),
        ("def get_model(): return nn.Sequential(), torch.ones(2)", errors.ModelEmpty, "no operator"),
        ("def get_model(): return nn.Identity(), torch.ones(2)", errors.ModelEmpty, "no operator"),
        ("class E(nn.Module):\n    def forward(self, x): pass\ndef get_model(): return E(), torch.ones(2)",
         errors.ModelEmpty, "NoneType"),
        ("class E(nn.Module): pass\ndef get_model(): return E(), torch.ones(2)", errors.UserCodeRaised, "forward"),
        ("def get_model(): return nn.Linear(2, 2, device='meta'), torch.ones(2)", errors.NoModelFound, "meta device"),
    ],
)  # fmt: skip
def test_refusals(text: str, error: type[errors.FuseScoutError], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match) as caught:
        load(write(tmp_path, text))
    assert caught.value.exit_code == (4 if error is errors.UserCodeRaised else 2)


def test_a_file_without_a_model_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(errors.NoModelFound):
        load(write(tmp_path, f"open({str(marker)!r}, 'w')"))
    assert not marker.exists()


def test_an_inplace_model_is_not_empty() -> None:
    assert build(nn.ReLU(inplace=True), (torch.ones(2),)).call() is not None


def test_masks_with_minus_inf_are_welcome() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return (x + self.mask + more).softmax(-1)

    build(Masked(), (torch.ones(3, 2), torch.tensor([float("-inf"), 0.0]) * 1))


def test_lazy_modules_are_made_by_the_check() -> None:
    assert build(nn.LazyLinear(3), (torch.ones(2, 4),)).model.weight.shape == (3, 4)


def test_the_users_traceback_has_no_frames_of_ours(tmp_path: Path) -> None:
    with pytest.raises(errors.UserCodeRaised) as caught:
        load(write(tmp_path, "def inner(): raise KeyError('deep')\ndef get_model(): return inner()"))
    assert "inner()" in caught.value.traceback and "fusescout/" not in caught.value.traceback.replace(str(tmp_path), "")


@pytest.mark.parametrize("spec", ["", ":", "model.py:", "a b", "model.py:x y", ":x", "no.such.module.py"])
def test_malformed_specs(spec: str) -> None:
    with pytest.raises(errors.TargetNotFound) as caught:
        load(spec)
    assert caught.value.fix


def test_missing_file_names_a_near_one(tmp_path: Path) -> None:
    write(tmp_path, "", "model.py")
    with pytest.raises(errors.TargetNotFound, match=r"Did you mean model\.py"):
        load(str(tmp_path / "modle.py"))
    with pytest.raises(errors.TargetNotFound, match="folder"):
        load(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_what_works(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    file = write(tmp_path, f"open({str(marker)!r}, 'w')\ndef get_model(): ...")
    with pytest.raises(errors.DeviceUnavailable, match="--device cpu works") as caught:
        load(file, device="cuda")
    assert caught.value.exit_code == 3 and not marker.exists()


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("import fusescout\nwith fusescout.profile(1): pass", True),
        ("def main():\n    from fusescout import profile\nclass Model(nn.Module): pass\ndef get_model(): pass\n", True),
        ("import fusescout\ndef get_model(): pass\ndef get_inputs(): pass", False),
        ("import fusescout\ndef fusescout_workload(): pass", False),
        ("print('no fusescout here')", False),
        ("from .fusescout import x", False),
    ],
)
def test_what_is_a_script(text: str, script: bool, tmp_path: Path) -> None:
    assert is_script(write(tmp_path, text)) is script


def test_scripts_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "fs_beside.py").write_text("HERE = True")
    text = f"""
    import sys, fs_beside, dataclasses, pickle
    @dataclasses.dataclass
    class Point: x: int
    assert __name__ == "__main__" and sys.modules["__main__"].Point is Point
    pickle.dumps(Point(1))
    open({str(tmp_path / "out")!r}, "w").write(" ".join(sys.argv[1:]))
    """
    run_script(Path(write(tmp_path, text, "train.py", "")), ["--lr", "3e-4"])
    assert (tmp_path / "out").read_text() == "--lr 3e-4"


@pytest.mark.parametrize(
    ("text", "match"), [("raise KeyError('k')", "KeyError"), ("import sys; sys.exit(3)", "SystemExit")]
)
def test_what_a_script_raises_is_the_users(text: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(errors.UserCodeRaised, match=match):
        run_script(Path(write(tmp_path, text)), [])
    run_script(Path(write(tmp_path, "import sys; sys.exit(0)")), [])


def test_huggingface_models_bring_their_inputs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = """
    from transformers import GPT2Config, GPT2LMHeadModel
    def get_model(): return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    """
    workload = load(write(tmp_path, text, head=""))
    assert "input_ids" in workload.kwargs and workload.call().logits.shape[-1] == 32


NESTS = st.recursive(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]).map(lambda d: torch.ones(2, dtype=d))
    | st.none()
    | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(nest=NESTS)
def test_converting_keeps_structure_and_casts_only_floats(nest: Any) -> None:
    done = convert(nest, "cpu", torch.bfloat16, {})
    assert type(done) is type(nest)
    for before, after in zip(tensors(nest), tensors(done), strict=True):
        assert after.dtype == (torch.bfloat16 if before.is_floating_point() else before.dtype)


@settings(deadline=None, max_examples=60)
@given(nest=NESTS)
def test_every_input_becomes_a_call(nest: Any) -> None:
    args, kwargs = as_call(nest, nn.Identity())
    assert isinstance(args, tuple) and all(isinstance(k, str) for k in kwargs)
    assert len(list(tensors((args, kwargs)))) == len(list(tensors(nest)))


@given(text=st.text(max_size=12))
def test_any_text_is_a_spec_or_a_clear_error(text: str) -> None:
    try:
        assert Spec.parse(text).text == text
    except errors.TargetNotFound as error:
        assert error.why
