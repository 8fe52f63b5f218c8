"""Writes the GEMM of a linear with a cross entropy: its scores stay in registers, and only what rows need is kept.

Of each tile of classes a row leaves its largest score and the sum of exponentials less that; of the tile that its own
class is in, that score. The schedules are those of the GEMM template, with another epilogue.
"""

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.dialect import Dialect
from fusescout.templates.gemm_batch import indices
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_source import Writer
from fusescout.templates.loss_finish import CLASS
from fusescout.templates.loss_finish import HIT
from fusescout.templates.loss_finish import SUM
from fusescout.templates.loss_finish import TOP
from fusescout.templates.loss_finish import TOTAL
from fusescout.templates.loss_finish import Finish
from fusescout.templates.loss_problem import Loss
from fusescout.templates.rowwise_passes import LOWEST

LANES = 32
"""Partial results side by side on the CPU: sums are vectorised without being reordered."""
MINUS_INFINITY = float("-inf")


class LossWriter(Writer):
    """The GEMM of one chain. `finish` has the workspace it writes, and what reads that."""

    def __init__(self, problem: Problem, loss: Loss, config: dict, dialect: Dialect, finish: Finish) -> None:
        super().__init__(problem, config, dialect)
        self.loss, self.finish = loss, finish
        self.staged, self.residual = [False], None
        self.low, self.lowest, self.zero = (dialect.f32(v) for v in (MINUS_INFINITY, LOWEST, 0.0))

    def params(self) -> tuple:
        return (*(q for q in super().params() if q.role != "output"), *self.finish.params)

    def _signature(self, name: str) -> str:
        given = [f"{q.name}: {self._declare(q)}" for q in super().params() if q.role != "output"]
        for o in self.finish.operands:
            shape, stride = o.spec.shape, o.spec.stride
            if self.d.cpu:
                given.append(f'{o.buffer}: T.Tensor(({o.span},), "{self.d.storage(o.dtype)}")')
            else:
                given.append(f'{o.buffer}_: T.StridedTensor({shape}, {stride}, "{o.dtype}")')
        return f"{name}({', '.join(given)})"

    def _row(self, row: str) -> str:
        """Number of a row among those of all matrices."""
        if not self.p.batch:
            return row
        (matrix,) = indices((self.matrices,), "z")
        return f"{matrix} * M + {row}"

    # ---- CUDA -------------------------------------------------------------------------------------------------

    def _fragments(self, suffix: str = "") -> list:
        sums = ("m", "s", *("u" * bool(self.loss.smoothing)))
        return [
            *super()._fragments(suffix),
            *(f'{n}_f{suffix} = T.alloc_fragment((BM,), "float32")' for n in sums),
            f't_f{suffix} = T.alloc_fragment((BM,), "int32")',
        ]

    def _preload(self, suffix: str = "") -> list:
        """The rows' classes too; rows behind the last have none."""
        number = f'T.cast({CLASS}_[{self._row("row + i")}], "int32")'
        return [
            *super()._preload(suffix),
            "for i in T.Parallel(BM):",
            f"    t_f{suffix}[i] = T.if_then_else(row + i < M, {number}, T.int32(-1))",
        ]

    def _epilogue(self, suffix: str = "", threads: int = 0) -> list:
        tile = f"a0{suffix}[i, j]"
        body, value = self._compute(0, [tile], "row + i", "col + j", suffix)
        loop = "for i, j in T.Parallel(BM, BN):"
        lines = [loop, *(f"    {b}" for b in body), f"    {tile} = {value}"] if body or value != tile else []
        lines += [loop, f"    if col + j == t_f{suffix}[i]:", f"        {HIT}_[{self._row('row + i')}] = {tile}"]
        if self.loss.smoothing:
            lines += [*self._behind_last(tile, self.zero), f"T.reduce_sum(a0{suffix}, u_f{suffix}, dim=1)"]
        lines += [
            *self._behind_last(tile, self.low),
            f"T.reduce_max(a0{suffix}, m_f{suffix}, dim=1)",
            "for i in T.Parallel(BM):",
            f"    m_f{suffix}[i] = T.max(m_f{suffix}[i], {self.lowest})",
            loop,
            f"    {tile} = exp({tile} - m_f{suffix}[i])",
            f"T.reduce_sum(a0{suffix}, s_f{suffix}, dim=1)",
            "for i in T.Parallel(BM):",
            "    if row + i < M:",
        ]
        kept = {TOP: "m", TOTAL: "s"} | ({SUM: "u"} if self.loss.smoothing else {})
        return [*lines, *(f"        {k}_[bn, {self._row('row + i')}] = {v}_f{suffix}[i]" for k, v in kept.items())]

    def _behind_last(self, tile: str, value: str) -> list:
        """Put `value` where there are no classes any more."""
        if self.p.N % self.c["BN"] == 0:
            return []
        return [
            "if col + BN > N:", "    for i, j in T.Parallel(BM, BN):",
            f"        {tile} = T.if_then_else(col + j < N, {tile}, {value})",
        ]  # fmt: skip

    # ---- the CPU ----------------------------------------------------------------------------------------------

    def _plain(self) -> str:
        p, dtype, width = self.p, self.p.x.dtype, "T.min(BN, N - bn * BN)"
        x = self.d.load(f"x[{self._z(p.x)}bm * BM + i, k]", dtype)
        w = self.d.load(f"w0[{self._z(p.w)}{'bn * BN + j, k' if p.transposed else 'k, bn * BN + j'}]", dtype)
        body, value = self._compute(0, ["a[j]"], "bm * BM + i", "bn * BN + j")
        row = [
            f"r = {self._row('bm * BM + i')}",
            f"for j in T.serial({width}):", f"    a[j] = {self.zero}",
            "for k in T.serial(K):", f"    for j in T.serial({width}):", f"        a[j] = a[j] + {x} * {w}",
            f"for j in T.serial({width}):", *(f"    {b}" for b in body), f"    a[j] = {value}",
            f"if {CLASS}[r] >= bn * BN and {CLASS}[r] < bn * BN + {width}:",
            f'    {HIT}[r] = a[T.cast({CLASS}[r], "int32") - bn * BN]',
        ]  # fmt: skip
        if self.loss.smoothing:
            row += self._filled(width, self.zero) + self._reduced("s", "a[k * LANES + l]") + self._kept_of(SUM, "s")
        row += self._filled(width, self.low)
        row += self._reduced("m", "a[k * LANES + l]", "T.max", self.lowest) + self._kept_of(TOP, "m")
        row += self._reduced("s", "exp(a[k * LANES + l] - m[0])") + self._kept_of(TOTAL, "s")
        sizes = {"a": "BN", "m": LANES, "s": LANES}
        allocate = [f'{name} = T.alloc_local(({size},), "float32")' for name, size in sizes.items()]
        return schedules.fill(schedules.PLAIN, allocate=allocate, row=row, **self._grid())

    def _constants(self) -> str:
        return super()._constants() + (f"LANES = {LANES}\n" if self.d.cpu else "")

    def _filled(self, width: str, value: str) -> list:
        return ["for j in T.serial(BN):", f"    if j >= {width}:", f"        a[j] = {value}"]

    def _kept_of(self, name: str, lanes: str) -> list:
        return [f"{name}[bn * {self.loss.rows} + r] = {lanes}[0]"]

    def _reduced(self, into: str, value: str, both: str = "", start: str = "") -> list:
        """The tile's sum, or what `both` makes of two values, in the first lane of `into`."""

        def step(a: str, b: str) -> str:
            return f"{both}({a}, {b})" if both else f"{a} + {b}"

        lines = [
            f"for l in T.serial({LANES}):", f"    {into}[l] = {start or self.zero}",
            "for k in T.serial(BN // LANES):", f"    for l in T.serial({LANES}):",
            f"        {into}[l] = {step(f'{into}[l]', value)}",
        ]  # fmt: skip
        half = LANES // 2
        while half:
            lines += [f"for l in T.serial({half}):", f"    {into}[l] = {step(f'{into}[l]', f'{into}[l + {half}]')}"]
            half //= 2
        return lines
