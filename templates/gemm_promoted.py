"""Products of 8-bit floats whose sums don't stay in the tensor cores' accumulators.

Hopper's tensor cores add products of 8-bit floats with about 14 bits and cut off what is below: over a long K that is
more than a bfloat16 result shows. With `use_fast_accum=False` eager's kernels therefore add what a few instructions
give to float32 sums in registers. So does this: each step along K, of 128 terms as in CUTLASS, has accumulators of
its own that begin at zero. No sum is in the tensor cores for longer than in eager, and all else is float32 arithmetic,
so the error is no larger. With `use_fast_accum=True` and one scale for each operand eager leaves the sums where they
are, and so does the template.
"""

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.gemm_configs import HOPPER
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_small import copied
from fusescout.templates.gemm_source import Writer

from fusescout.device import Device

PRODUCTS = """
@@clear
for k in T.serial(STEPS):
    it = t * STEPS + k
    T.mbarrier_wait_parity(full[it % STAGES], (it // STAGES) & 1)
    @@mma
    T.wait_wgmma(0)
    @@fence
    if T.shuffle_elect(32):
        @@release
    @@add
"""


def narrow_refusal(p: Problem, device: Device) -> str | None:
    """Why no schedule covers a product of 8-bit floats on a GPU, or None."""
    if device.arch not in HOPPER:
        return "Products of 8-bit floats are for Hopper's tensor cores."
    if not p.transposed or p.x.turned:
        return "Tensor cores read both 8-bit operands along K, which are not adjacent in memory."
    return None if copied(p) else "An operand's rows don't start at multiples of 16 bytes."


def promoting(base: type) -> type:
    """A writer that adds each step's sums to float32 ones, else does as `base`."""
    return type("Promoting", (_Promoting, base), {})


class _Promoting(Writer):
    """`step…` are the accumulators of one step."""

    @property
    def _tile(self) -> str:
        return "BN, BM" if self.c["schedule"] == "split" else "BM, BN"

    def _steps_sums(self, suffix: str = "") -> list:
        return [f'step{g}{suffix} = T.alloc_fragment(({self._tile}), "float32")' for g in range(self.gemms)]

    def _fragments(self, suffix: str = "") -> list:
        return super()._fragments(suffix) + self._steps_sums(suffix)

    def _buffers(self) -> list:
        return super()._buffers() + self._steps_sums()

    def _mma(self) -> list:
        products = [
            f"{line.replace(f' a{g}, ', f' step{g}, ').removesuffix(')')}, clear_accum=True)"
            for g, line in enumerate(super()._mma())
        ]
        return products + self._add("")

    def _mma_async(self, suffix: str = "") -> list:
        return [
            line.replace(f" a{g}{suffix}, ", f" step{g}{suffix}, ").replace("clear_accum=(k == 0)", "clear_accum=True")
            for g, line in enumerate(super()._mma_async(suffix))
        ]

    def _add(self, suffix: str) -> list:
        sums = [f"    a{g}{suffix}[i, j] = a{g}{suffix}[i, j] + step{g}{suffix}[i, j]" for g in range(self.gemms)]
        return [f"for i, j in T.Parallel({self._tile}):", *sums]

    def _products(self, suffix: str = "") -> str:
        warpgroups = 1 if suffix else 2
        fence = [line.replace("(a", "(step") for line in self._fence(suffix, warpgroups)]
        return schedules.fill(
            PRODUCTS, clear=[f"T.clear(a{g}{suffix})" for g in range(self.gemms)], mma=self._mma_async(suffix),
            fence=fence, release=self._release("it % STAGES"), add=self._add(suffix),
        )  # fmt: skip

    def _release_last(self) -> list:
        return ["T.evaluate(0)  # every stage has been given back"]
