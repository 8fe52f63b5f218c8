"""What differs between the two targets one template source serves: CUDA, and TileLang's `c` target on the CPU.

Generated source text starts with `Dialect.header()`: a few short names (`load`, `store`, `let`, `where`, `exp`, …) that
mean the same on both targets, so that the text below is the same too, and stands alone. The scalar functions behind
them are the `PRELUDE_*` texts, in CUDA C++ or C++.
"""

import math
import struct
from dataclasses import dataclass

CUDA_PASS_CONFIGS = {"tl.disable_data_race_check": True}
CPU_PASS_CONFIGS = {"tirx.disable_vectorize": True}

MATH = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin",
    "acos", "atan", "erf", "sqrt", "rsqrt", "rcp", "div", "pow", "fmod", "atan2", "floor", "ceil", "trunc", "rint",
    "erfc", "asinh", "acosh", "atanh", "hypot", "copysign", "fabs", "maximum", "minimum", "sigmoid",
    "gelu", "remainder", "floor_div", "nan_if_inf",
)  # fmt: skip

HALF = ("float16", "bfloat16")
E4M3 = "float8_e4m3fn"
NARROW = (*HALF, E4M3)
"""Floats that are float32 while they are computed with."""


@dataclass(frozen=True)
class Dialect:
    """One target. `fast` allows approximate device functions: for results that are rounded to 16 bits anyway."""

    kind: str
    fast: bool = False

    @property
    def cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def target(self) -> str:
        return "c" if self.cpu else "cuda"

    @property
    def pass_configs(self) -> dict:
        return dict(CPU_PASS_CONFIGS if self.cpu else CUDA_PASS_CONFIGS)

    def header(self) -> str:
        """Start of a generated source: imports, the scalar functions, and the names the text below uses."""
        prelude = PRELUDE_CPU if self.cpu else PRELUDE_CUDA_FAST if self.fast else PRELUDE_CUDA
        return HEADER.format(prelude=prelude, names=", ".join(MATH), text=" ".join(MATH), **(_C if self.cpu else _CUDA))

    def kernel(self, *grid: object, threads: int = 128) -> str:
        """The launch expression: `with {kernel(…)} as (…):`."""
        extents = ", ".join(map(str, grid))
        return f"T.Kernel({extents})" if self.cpu else f"T.Kernel({extents}, threads={threads}, prelude=PRELUDE)"

    def parallel(self, *extents: object) -> str:
        """Iterator of an element-wise loop nest."""
        return f"{'T.grid' if self.cpu else 'T.Parallel'}({', '.join(map(str, extents))})"

    def tile(self, shape: object, dtype: str = "float32") -> str:
        """Allocation of per-thread or per-block values that no other block sees."""
        return f'{"T.alloc_local" if self.cpu else "T.alloc_fragment"}({shape}, "{dtype}")'

    def stage(self, shape: object, dtype: str) -> str:
        """Allocation of an operand tile: shared memory where there is any."""
        return f'{"T.alloc_local" if self.cpu else "T.alloc_shared"}({shape}, "{dtype}")'

    def storage(self, dtype: str) -> str:
        """The dtype a buffer of `dtype` is declared with. The C code generator has no narrow floats worth using."""
        return dtype if not self.cpu or dtype not in NARROW else "uint8" if dtype == E4M3 else "uint16"

    def load(self, element: str, dtype: str) -> str:
        """Value of a buffer element: narrow floats come as float32."""
        if dtype not in NARROW:
            return element
        return f"load_{dtype}({element})" if self.cpu else f'T.cast({element}, "float32")'

    def store(self, value: str, dtype: str) -> str:
        """What to assign to a buffer element of `dtype`; `value` is float32 for all float dtypes."""
        if dtype not in NARROW:
            return value
        return f"store_{dtype}({value})" if self.cpu else f'T.cast({value}, "{dtype}")'

    def f32(self, value: float) -> str:
        """A float32 literal with all its bits, which the compiler doesn't fold away where it is 0 (0 * NaN is NaN)."""
        value = float(value)
        single = _round_f32(value)
        if not math.isfinite(single):
            return f"bits({_bits(single)})"
        if single == 0.0 or (self.cpu and _round_f32(float(f"{single:e}")) != single):
            return f"bits({_bits(single)})"  # the C code generator prints seven digits only
        return f"T.float32({single!r})"


def dialect_for(kind: str, output_dtypes: tuple) -> Dialect:
    """The dialect of a device kind for a kernel with these output dtypes."""
    floats = [d for d in output_dtypes if d.startswith(("float", "bfloat"))]
    return Dialect(kind, fast=kind == "cuda" and bool(floats) and all(d in NARROW for d in floats))


def _round_f32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


HEADER = '''import tilelang.language as T

PRELUDE = r"""{prelude}"""


def math(name):
    return lambda *x: T.call_pure_extern("float32", "fs_" + name, *x)


{names} = map(math, "{text}".split())
where = T.Select  # both sides are evaluated


def let(x):  # name a value, so that later passes don't copy its expression into each use
    return T.call_extern(x.dtype, "fs_let_" + str(x.dtype), x)


def bits(x):  # float32 from its bit pattern
    return T.call_pure_extern("float32", "fs_bits", T.int32(x))


def isnan(x):
    return T.call_pure_extern("bool", "fs_isnan", x)

{extra}
'''

_CUDA = {"extra": ""}
_C = {
    "extra": """
def load_bfloat16(x):
    return T.call_pure_extern("float32", "fs_load_bf16", x)


def load_float16(x):
    return T.call_pure_extern("float32", "fs_load_f16", x)


def store_bfloat16(x):
    return T.call_pure_extern("uint16", "fs_store_bf16", x)


def store_float16(x):
    return T.call_pure_extern("uint16", "fs_store_f16", x)


def load_float8_e4m3fn(x):
    return T.call_pure_extern("float32", "fs_load_e4m3", x)


def store_float8_e4m3fn(x):
    return T.call_pure_extern("uint8", "fs_store_e4m3", x)
"""
}

_LETS = "".join(
    f"FS {c} fs_let_{d}({c} x) {{ return x; }}\n"
    for d, c in {
        "float32": "float", "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
        "int32": "int", "int64": "INT64",
    }.items()
)  # fmt: skip

_SHARED = (
    _LETS
    + """FS bool fs_isnan(float x) { return x != x; }
FS float fs_exp2(float x) { return exp2f(x); }
FS float fs_expm1(float x) { return expm1f(x); }
FS float fs_log(float x) { return logf(x); }
FS float fs_log2(float x) { return log2f(x); }
FS float fs_log10(float x) { return log10f(x); }
FS float fs_log1p(float x) { return log1pf(x); }
FS float fs_sin(float x) { return sinf(x); }
FS float fs_cos(float x) { return cosf(x); }
FS float fs_tan(float x) { return tanf(x); }
FS float fs_asin(float x) { return asinf(x); }
FS float fs_acos(float x) { return acosf(x); }
FS float fs_atan(float x) { return atanf(x); }
FS float fs_atan2(float y, float x) { return atan2f(y, x); }
FS float fs_erf(float x) { return erff(x); }
FS float fs_erfc(float x) { return erfcf(x); }
FS float fs_asinh(float x) { return asinhf(x); }
FS float fs_acosh(float x) { return acoshf(x); }
FS float fs_atanh(float x) { return atanhf(x); }
FS float fs_hypot(float x, float y) { return hypotf(x, y); }
FS float fs_copysign(float x, float y) { return copysignf(x, y); }
FS float fs_sqrt(float x) { return sqrtf(x); }
FS float fs_pow(float x, float y) { return powf(x, y); }
FS float fs_fmod(float x, float y) { return fmodf(x, y); }
FS float fs_floor(float x) { return floorf(x); }
FS float fs_ceil(float x) { return ceilf(x); }
FS float fs_trunc(float x) { return truncf(x); }
FS float fs_rint(float x) { return rintf(x); }
FS float fs_fabs(float x) { return fabsf(x); }
FS float fs_maximum(float x, float y) { return ((x > y) | (x != x)) ? x : y; }
FS float fs_minimum(float x, float y) { return ((x < y) | (x != x)) ? x : y; }
FS float fs_remainder(float x, float y) {
  float m = fmodf(x, y);
  return (m != 0.0f) & ((y < 0.0f) != (m < 0.0f)) ? m + y : m;
}
FS float fs_floor_div(float x, float y) {
  if (y == 0.0f) return x / y;
  float m = fmodf(x, y), d = (x - m) / y;
  if ((m != 0.0f) & ((y < 0.0f) != (m < 0.0f))) d -= 1.0f;
  float f = floorf(d);
  if (d - f > 0.5f) f += 1.0f;
  return d != 0.0f ? f : copysignf(0.0f, x / y);
}
"""
)

_EXACT = """FS float fs_exp(float x) { return expf(x); }
FS float fs_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
FS float fs_tanh(float x) { return tanhf(x); }
FS float fs_gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }
"""

# One special-function instruction each (two where there is a quotient) and no denormal fix-up: relative errors near
# 1e-6, where 16-bit results round at 5e-4. GELU is x Phi(x) with Phi(-|x|) = exp(-x^2 / 2) Q(1 / (1 + 0.29 |x|)), a
# minimax fit of relative error 9e-5 up to |x| = 6.5 (7e-4 up to 9, where eager's 1 + erf has no bit right): half of
# erff's instructions, which took half as long as the whole product of a 16384x3072x768 GEMM.
_FAST = """FS float fs_ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
FS float fs_approx_rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
FS float fs_exp(float x) { return fs_ex2(x * 1.4426950408889634f); }
// as 2^-4 / (2^-4 + 2^-4 exp(-x)): nothing is flushed before x = -90, and eager's expf(-x) is infinite from -88.72 on
FS float fs_sigmoid(float x) {
  return fs_approx_rcp(0.0625f + fs_ex2(fmaf(x, -1.4426950408889634f, -4.0f))) * 0.0625f;
}
FS float fs_tanh(float x) {
  float s = x * x, t = 1.0f - 2.0f * fs_approx_rcp(1.0f + fs_ex2(x * 2.8853900817779268f));
  return s < 0.01f ? x * (1.0f - s * (0.333333333f - s * 0.133333333f)) : t;
}
FS float fs_gelu(float x) {
  float t = fs_approx_rcp(1.0f + 0.29f * fabsf(x));
  float q = t * (0.11032371f + t * (0.16056797f + t * (-0.03021649f + t * 0.25936792f)));
  float below = q * fs_ex2(x * -0.72134752f * x);
  return x * (x < 0.0f ? below : 1.0f - below);
}
"""

# TileLang gathers bfloat16 with a function that its headers name differently. The macro renames one that they may get.
_CUDA_START = """#define FS static __device__ __forceinline__
#define INT64 long long
#define __pack_bfloat162 fs_pack_bfloat162
template <class T> FS unsigned fs_pack_bfloat162(T x, T y) {
  return *(unsigned short*)&x | (unsigned)*(unsigned short*)&y << 16;
}
FS float fs_bits(int x) { return __int_as_float(x); }
FS float fs_rcp(float x) { return 1.0f / x; }
FS float fs_div(float x, float y) { return x / y; }
FS float fs_rsqrt(float x) { return rsqrtf(x); }
FS float fs_nan_if_inf(float x) { return x + (x - x); }
FS float fs_sinh(float x) { return sinhf(x); }
FS float fs_cosh(float x) { return coshf(x); }
"""

PRELUDE_CUDA = _CUDA_START + _EXACT + _SHARED
PRELUDE_CUDA_FAST = _CUDA_START + _FAST + _SHARED

PRELUDE_CPU = (
    """#include <math.h>
#include <stdint.h>
#include <string.h>
extern "C" {
#define FS static inline __attribute__((always_inline))
#define INT64 int64_t
FS float fs_bits(int32_t x) { float f; memcpy(&f, &x, 4); return f; }
FS uint32_t fs_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
FS float fs_rcp(float x) { return 1.0f / x; }
FS float fs_div(float x, float y) { return x / y; }
FS float fs_rsqrt(float x) { return (float)(1.0 / sqrt((double)x)); }
FS float fs_sinh(float x) { return (float)sinh((double)x); }
FS float fs_cosh(float x) { return (float)cosh((double)x); }
FS float fs_load_bf16(uint16_t h) { return fs_bits((int32_t)((uint32_t)h << 16)); }
FS uint16_t fs_store_bf16(float x) {
  uint32_t u = fs_of(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);
}
FS float fs_load_f16(uint16_t h) {
  uint32_t o = (h & 0x7fffu) << 13, e = o & 0x0f800000u, sign = (uint32_t)(h & 0x8000u) << 16;
  uint32_t normal = o + (112u << 23) + (e == 0x0f800000u ? 112u << 23 : 0u);
  float tiny = fs_bits((int32_t)(o + (113u << 23))) - fs_bits(113 << 23);
  return fs_bits((int32_t)((e == 0 ? fs_of(tiny) : normal) | sign));
}
FS uint16_t fs_store_f16(float x) {
  uint32_t u = fs_of(x), sign = u & 0x80000000u, f = u ^ sign;
  uint32_t big = f > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t tiny = fs_of(fs_bits((int32_t)f) + fs_bits(126 << 23)) - (126u << 23);
  uint32_t normal = (f + (uint32_t)((15 - 127) * (1 << 23)) + 0xfffu + ((f >> 13) & 1u)) >> 13;
  return (uint16_t)((f >= (143u << 23) ? big : f < (113u << 23) ? tiny : normal) | (sign >> 16));
}
"""
    + """// four bits of exponent and three of fraction; what is beyond 448 becomes that
FS float fs_load_e4m3(uint8_t b) {
  float x = fs_bits((b & 0x7f) << 20) * 0x1p120f;
  return fs_bits((int32_t)(((b & 0x7f) == 0x7f ? 0x7fc00000u : fs_of(x)) | (uint32_t)(b & 0x80) << 24));
}
FS uint8_t fs_store_e4m3(float x) {
  uint32_t u = fs_of(x), f = u & 0x7fffffffu, sign = u >> 24 & 0x80u;
  uint32_t normal = ((f + 0x7ffffu + (f >> 20 & 1u)) >> 20) - (120u << 3);
  uint32_t tiny = (uint32_t)rintf(fs_bits((int32_t)f) * 512.0f);
  uint32_t found = f > 0x7f800000u ? 0x7fu : f >= 0x43e00000u ? 0x7eu : f < 0x3c800000u ? tiny : normal;
  return (uint8_t)(found | sign);
}
"""
    + _EXACT
    + _SHARED
    + "}\n"
)
