"""The approximate device functions, run on the CPU: their own text, over emulated special-function instructions.

`ex2.approx.ftz` and `rcp.approx.ftz` take and give zeros instead of denormal numbers, and err by up to two steps here.
"""

import ctypes
import subprocess

import numpy as np
import pytest
import torch
from fusescout.templates.dialect import PRELUDE_CUDA_FAST
from template_cases import ROWWISE

from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.registry import load

EMULATED = """#include <math.h>
#define FS static inline
static float error;
FS float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
FS float fs_ex2(float x) { return flushed((float)(exp2((double)flushed(x)) * (1.0 + error))); }
FS float fs_approx_rcp(float x) { return flushed((float)((1.0 + error) / (double)flushed(x))); }
"""
LOOP = """extern "C" void NAME(const float* x, float* y, long n, float e) {
  error = e;
  for (long i = 0; i < n; ++i) y[i] = fs_NAME(x[i]);
}
"""
HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)
TEMPLATES = load().templates


def function_text(name):
    """The definition of `name` in the CUDA prelude."""
    start = PRELUDE_CUDA_FAST.index(f"FS float {name}(")
    return PRELUDE_CUDA_FAST[start:].split("\nFS ")[0] + "\n"


def compiled(name, folder):
    """The function over an array, with an error for each special-function instruction."""
    (folder / "fast.cpp").write_text(EMULATED + function_text(f"fs_{name}") + LOOP.replace("NAME", name))
    command = ["g++", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", "fast.so", "fast.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    function = getattr(ctypes.CDLL(str(folder / "fast.so")), name)

    def run(x, error=0.0):
        y = np.empty_like(x)
        pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
        function(pointer(x), pointer(y), ctypes.c_long(x.size), ctypes.c_float(error))
        return y

    return run


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory):
    return compiled("sigmoid", tmp_path_factory.mktemp("sigmoid"))


@pytest.fixture(scope="module")
def gelu(tmp_path_factory):
    return compiled("gelu", tmp_path_factory.mktemp("gelu"))


def exact_gelu(x):
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("error", [-(2.0**-22), 0.0, 2.0**-22])
def test_gelu_is_far_more_accurate_than_a_16_bit_step_also_in_its_negative_tail(gelu, error):
    x = np.concatenate([np.linspace(-6.5, 13, 500_001), np.geomspace(1e-30, 1, 1001)]).astype(np.float32)
    x = np.concatenate([x, -x[-1001:]])
    truth = x * torch.special.log_ndtr(torch.from_numpy(x.astype(np.float64))).exp().numpy()
    ratio = gelu(x, error)[x != 0] / truth[x != 0]
    assert np.abs(ratio - 1).max() < 2.0**-13
    tail = np.linspace(-40, -6.5, 100_001, dtype=np.float32)
    truth = tail * torch.special.log_ndtr(torch.from_numpy(tail.astype(np.float64))).exp().numpy()
    assert (np.abs(gelu(tail, error) - truth) <= np.abs(exact_gelu(tail) - truth) + 1e-13).all()


def test_gelu_of_special_values_is_eagers(gelu):
    x = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, -200, 200, 3e38, -3e38])
    np.testing.assert_array_equal(gelu(x), exact_gelu(x))


def eager(x):
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


@pytest.mark.parametrize("error", [-(2.0**-22), 0.0, 2.0**-22])
def test_sigmoid_is_accurate_and_flushes_no_earlier_than_eager(sigmoid, error):
    x = np.concatenate([np.linspace(-88.7, 110, 500_001), np.linspace(-88.72, -87, 50_001)]).astype(np.float32)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.abs(sigmoid(x, error) / truth - 1).max() < 2.0**-16  # far below a float16 step
    tail = np.linspace(-110, -80, 300_001, dtype=np.float32)
    assert (sigmoid(tail, error)[eager(tail) > 0] > 0).all()


def test_a_gate_that_is_tiny_keeps_the_sign_of_an_infinite_factor(sigmoid):
    """silu(-88) is -5e-37 in eager; as a zero it would turn an infinite factor into NaN."""
    gate = np.float32([-87, -87.5, -88, -88.5, -88.7])
    assert (gate * sigmoid(gate) * np.float32(-np.inf) == np.inf).all()


def test_sigmoid_and_silu_of_special_values_are_eagers(sigmoid):
    x = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, -200, 200, 3e38, -3e38])
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_array_equal(sigmoid(x), eager(x))
        np.testing.assert_array_equal(x * sigmoid(x), x / (np.float32(1) + np.exp(-x)))


def source_of(name):
    case = next(c for c in ROWWISE if c.name == name)
    graph, _ = case.traced()
    template = TEMPLATES["rowwise"]
    return template.kernel(graph, template.configs(graph, HOPPER)[0], HOPPER).source.split("@T.prim_func")[1]


def test_only_the_fused_rms_norm_makes_nan_of_a_row_with_an_infinity():
    assert source_of("add_rms_norm").count("nan_if_inf(") == 1
    assert not [n for n in ("layer_norm", "llama_norm", "spelled_layer_norm") if "nan_if_inf(" in source_of(n)]


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
def test_the_compiler_keeps_the_difference_that_makes_the_nan(tmp_path):
    kernel = 'extern "C" __global__ void k(float* x) { *x = fs_nan_if_inf(*x); }\n'
    (tmp_path / "k.cu").write_text("#define FS static __device__\n" + function_text("fs_nan_if_inf") + kernel)
    command = [nvcc_path(), "--ptx", "-O3", "-arch=sm_90a", "-o", "k.ptx", "k.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    text = (tmp_path / "k.ptx").read_text()
    assert "sub.f32" in text or "sub.rn.f32" in text
    assert "add.f32" in text or "add.rn.f32" in text
