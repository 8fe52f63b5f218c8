"""Runs generated CUDA on the CPU, a thread for each of a block's threads: for plain C++ with barriers and shuffles.

What needs the GPU's own units (tensor cores, the copy engine, clusters) can't be run so.
"""

import ctypes
import re
import subprocess

SHIM = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
using std::min, std::max;
typedef unsigned uint;
typedef unsigned char uchar;
struct uint2 { uint x, y; };
struct uint4 { uint x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float x) {
    uint u;
    memcpy(&u, &x, 4);
    bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  operator float() const { return __int_as_float(bits << 16); }
};
struct Place { unsigned x, y, z; };
thread_local Place threadIdx, blockIdx;
struct Block {
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<float> lanes;
  alignas(1024) char shared[1 << 17];
  Block(int threads) : all(threads), lanes(threads) {
    for (int k = 0; k < threads; k += 32) warps.push_back(std::make_unique<std::barrier<>>(32));
    memset(shared, 0xff, sizeof shared);  // NaN
  }
};
thread_local Block* block;
static void __syncthreads() { block->all.arrive_and_wait(); }
static float __shfl_xor_sync(uint, float x, int mask, int) {
  std::barrier<>& warp = *block->warps[threadIdx.x / 32];
  block->lanes[threadIdx.x] = x;
  warp.arrive_and_wait();
  float other = block->lanes[threadIdx.x ^ mask];
  warp.arrive_and_wait();
  return other;
}
"""
RUN = """
extern "C" void run(void** p, int blocks, int threads) {{
  for (unsigned b = 0; b < blocks; ++b) {{
    Block shared(threads);
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t)
      running.emplace_back([&, t] {{ threadIdx = {{t}}; blockIdx = {{b}}; block = &shared; {call}; }});
    for (auto& thread : running) thread.join();
  }}
}}
"""


def compile_threads(source, names, folder):
    """A function of (tensors in the order of `names`, blocks, threads) that runs the one kernel of `source`."""
    text = re.sub(r"#include .*", "", source[source.index("#define FS") :])
    text = re.sub(r'float y; asm\("ex2[^;]*;[^;]*; return y;', "return exp2f(x);", text)
    text = re.sub(r'float y; asm\("rcp[^;]*;[^;]*; return y;', "return 1 / x;", text)
    text = re.sub(r"extern __shared__ \S+ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)block->shared;", text)
    kernel = re.search(r"(\w+_kernel)\(([^)]*)\) \{", text)
    types, given = zip(*(a.rsplit(" ", 1) for a in kernel[2].split(", ")), strict=True)
    order = [names.index(re.sub(r"_\d+$", "", name)) for name in given]
    kinds = [t.replace(" __restrict__", "") for t in types]
    call = f"{kernel[1]}({', '.join(f'({kind})p[{k}]' for k, kind in enumerate(kinds))})"
    file = folder / "kernel.cpp"
    file.write_text(SHIM + text + RUN.format(call=call))
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        "-o",
        str(folder / "kernel.so"),
        str(file),
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))

    def launch(tensors, blocks, threads):
        library.run((ctypes.c_void_p * len(order))(*(tensors[k].data_ptr() for k in order)), blocks, threads)

    return launch
