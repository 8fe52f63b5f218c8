"""Conformance of every template on the CPU target: each case is run by all templates that cover it.

The rule is the tool's own (`verify.Verifier`): float64 truth, at most twice eager's error plus one rounding step, NaN
and infinities placed in the inputs, poisoned outputs, untouched inputs, two equal runs.
"""

import sys
from pathlib import Path

import pytest
import torch
from loss_cases import HEADS
from row_cases import PIECES
from row_cases import ROWS
from row_cases import WIDE
from row_cases import WINDOWED
from scaled_cases import QUANTISING
from scaled_cases import scaled_cases
from template_cases import OPERATORS
from template_cases import POINTWISE
from template_cases import REFUSED
from template_cases import ROWWISE
from template_cases import SHARED
from template_cases import trace

from fusescout.contenders.binding import bind
from fusescout.contenders.compile_cpu import c_source
from fusescout.contenders.compile_cpu import compile_cpu
from fusescout.contenders.preparing import prepared
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.registry import load
from fusescout.verify import Verifier

CPU = Device("cpu", "cpu", "x86_64", 2)
TEMPLATES = load().templates
SHAPES = (
    POINTWISE + ROWWISE + ROWS + WIDE + PIECES + WINDOWED + SHARED + HEADS + scaled_cases(70, 48, 144)[2:] + QUANTISING
)
HALVES = (
    "bias_gelu", "qkv_grouped", "add_rms_norm", "row_scale", "group_norm", "cross_entropy", "rotary", "causal_loss",
)  # fmt: skip


def conform(case, folder, optimise, dtype=None):
    """Check `case` with every template that covers it."""
    graph, inputs = case.traced(dtype=dtype)
    covering = {n: t for n, t in TEMPLATES.items() if t.supports(graph, CPU) is None}
    assert case.family in {t.FAMILY for t in covering.values()}, {
        n: t.supports(graph, CPU) for n, t in TEMPLATES.items()
    }
    verifier = Verifier(graph, inputs, "cpu")
    for name, template in covering.items():
        config = template.configs(graph, CPU)[0]
        split = template.prepared(graph, config) if hasattr(template, "prepared") else None
        steady = split.steady if split else graph
        kernel = template.kernel(steady, config, CPU)
        run = bind(steady, kernel, compile_cpu(kernel, folder, optimise), CPU)
        run = prepared(split, run).run if split else run
        outcome = verifier.check(run, "full")
        assert not outcome.reason, f"{name}: {outcome.reason}"
        assert outcome.stats.deterministic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("case", OPERATORS, ids=lambda c: c.name)
def test_operators(case, folder):
    """At -O3: that is where the compiler uses vector math functions."""
    conform(case, folder, "-O3")


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_shapes(case, folder):
    conform(case, folder, "-O1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [c for c in SHAPES if c.name in HALVES], ids=lambda c: c.name)
def test_16_bit(case, dtype, folder):
    conform(case, folder, "-O1", dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_with_a_reason(name):
    function, inputs = REFUSED[name]
    graph, _ = trace(function, inputs())
    for template in TEMPLATES.values():
        reason = template.supports(graph, CPU)
        assert reason
        assert isinstance(reason, str)


@pytest.mark.parametrize("block", [1, 16, 250, 5000])
def test_block_sizes_and_tails(block, folder):
    """Blocks that divide nothing, and rows cut into pieces."""
    for case in (c for c in POINTWISE if c.name in ("outer",)):
        graph, inputs = case.traced()
        kernel = TEMPLATES["pointwise"].kernel(graph, {"block": block}, CPU)
        run = bind(graph, kernel, compile_cpu(kernel, folder, "-O1"), CPU)
        assert not Verifier(graph, inputs, "cpu").check(run, "quick").reason


def test_the_grid_runs_on_all_threads(folder):
    graph, inputs = trace(
        lambda x, w: torch.nn.functional.rms_norm(x + 1, (256,), w, 1e-6), (torch.randn(300, 256), torch.randn(256))
    )
    kernel = TEMPLATES["rowwise"].kernel(graph, {"block": 2560}, CPU)
    source, _, _ = c_source(kernel)
    assert "#pragma omp parallel for" in source
    assert "/*" not in kernel.source.split("@T.prim_func")[1]
    run = bind(graph, kernel, compile_cpu(kernel, folder, "-O1"), CPU)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (single,) = run(inputs)
        torch.set_num_threads(4)
        (several,) = run(inputs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(single, several)


def test_constants_keep_all_their_bits(folder):
    """The C code generator prints seven digits."""
    graph, inputs = trace(lambda x: x * 0.1767766952966369, (torch.ones(64),))
    kernel = TEMPLATES["pointwise"].kernel(graph, {"block": 64}, CPU)
    (out,) = bind(graph, kernel, compile_cpu(kernel, folder, "-O1"), CPU)(inputs)
    assert torch.equal(out, torch.ones(64) * 0.1767766952966369)


def test_long_chains_stay_small():
    """Values used twice must not be written out in each use: that would be 2^40 terms."""

    def chain(x):
        for _ in range(40):
            x = x * x + x
        return x

    graph, _ = trace(chain, (torch.randn(64),))
    source, _, _ = c_source(TEMPLATES["pointwise"].kernel(graph, {"block": 64}, CPU))
    assert len(source) < 40_000


class TestContender:
    def test_builds_every_variant_and_writes_a_repro_that_runs(self, tmp_path):
        graph, inputs = trace(lambda x, b: torch.relu(x + b) * 2, (torch.randn(6, 40), torch.randn(40)))
        contender = TileLang(cache_dir=tmp_path)
        variants = contender.variants(graph, CPU, "default")
        assert {v["template"] for v in variants} == {"pointwise"}
        built = contender.build(graph, variants[0], CPU)
        (out,) = built.run(inputs)
        assert torch.equal(out, torch.relu(inputs[0] + inputs[1]) * 2)
        assert "T.prim_func" in built.source
        assert contender.upkeep(graph, variants[0]).lines > 20
        script = tmp_path / "repro.py"
        script.write_text(contender.repro(graph, variants[0], CPU))
        import subprocess

        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert "error of eager" in done.stdout

    def test_says_why_no_template_fits(self, tmp_path):
        graph, _ = trace(lambda x: x.cumsum(0), (torch.randn(5),))
        reason = TileLang(cache_dir=tmp_path).variants(graph, CPU, "quick")
        assert isinstance(reason, str)
        assert "pointwise" in reason
        assert "cumsum" in reason

    def test_compiled_kernels_are_kept(self, tmp_path):
        graph, _ = trace(lambda x: x * 3, (torch.randn(50),))
        contender = TileLang(cache_dir=tmp_path)
        variant = contender.variants(graph, CPU, "quick")[0]
        contender.build(graph, variant, CPU)
        (kept,) = (tmp_path / "cpu").glob("*.so")
        stamp = kept.stat().st_mtime_ns
        contender.build(graph, variant, CPU)
        assert [f.stat().st_mtime_ns for f in (tmp_path / "cpu").glob("*.so")] == [stamp]

    def test_a_user_template_is_found_and_a_broken_one_is_a_warning(self, tmp_path):
        (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
        (tmp_path / "mine.py").write_text(
            "from fusescout.templates.pointwise import FAMILY, configs, kernel, supports\nNAME = 'mine'\n"
        )
        contender = TileLang([tmp_path], cache_dir=tmp_path)
        assert "mine" in contender.registry.templates
        assert any("broken.py" in w and "no" in w for w in contender.registry.warnings)


def test_the_example_in_the_readme_works(tmp_path, folder):
    text = (Path(__file__).parents[2] / "templates" / "README.md").read_text()
    example = next(block for block in text.split("```python\n") if block.startswith('"""')).split("```")[0]
    (tmp_path / "flat.py").write_text(example)
    registry = load([tmp_path])
    assert not [w for w in registry.warnings if "flat" in w]
    template = registry.templates["flat"]
    graph, inputs = trace(lambda x: torch.tanh(x) * 2 + x, (torch.randn(5001),))
    assert template.supports(graph, CPU) is None
    kernel = template.kernel(graph, template.configs(graph, CPU)[0], CPU)
    run = bind(graph, kernel, compile_cpu(kernel, folder, "-O1"), CPU)
    assert not Verifier(graph, inputs, "cpu").check(run, "quick").reason
