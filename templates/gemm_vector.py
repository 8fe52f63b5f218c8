"""Products of a few rows without tensor cores: dot products, whose time is that of reading the weight once.

A thread reads the weight 16 bytes at a time, several loads ahead, and multiplies each with all rows of the input, which
come from the level-1 cache. Sums are float32, first in a thread, then over a warp, then over the warps in their order:
two runs give the same bits.
"""

import math

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.dialect import E4M3
from fusescout.templates.gemm_direct import Direct
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_source import behind

MOST_ROWS = 8
"""Above this the multiply-adds take longer than the weight's bytes."""
VECTOR_BYTES = 16
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, E4M3: 1}

DOTS = """
@T.prim_func
def @@signature:
    with T.Kernel(T.ceildiv(N, BN)@@extent, threads=THREADS, prelude=PRELUDE) as (bn@@index):
        tx = T.get_thread_binding()
        @@place
        @@allocate
        @@clear
        for k in T.serial(STEPS):
            @@load
            for u in T.unroll(AHEAD):
                @@multiply
        @@add
        if tx % 32 < WRITERS:
            for m in T.unroll(M):
                for r in T.unroll(COLUMNS):
                    @@keep
        T.sync_threads()
        for e in T.serial(T.ceildiv(M * BN, THREADS)):
            if e * THREADS + tx < M * BN:
                i, j = (e * THREADS + tx) // BN, (e * THREADS + tx) % BN
                if bn * BN + j < N:
                    @@results
"""


def vector(problem: Problem) -> tuple:
    """(elements of a load along K, columns side by side in one load of the weight) that rows and addresses allow.

    A weight [N, K] is read along K as the input is, so its loads hold one column each.
    """
    most = VECTOR_BYTES // SIZES[problem.x.dtype]

    def width(operand, length: int) -> int:
        return math.gcd(most, length, operand.pitch, *operand.batch) if operand.aligned else 1

    along = width(problem.x, problem.K)
    weights = [width(w, problem.K if problem.transposed else problem.N) for w in problem.weights]
    return (min(along, *weights), 1) if problem.transposed else (along, min(weights))


class Vector(Direct):
    """Config: `lanes` threads share a column along K; a thread has `columns` of them and reads `ahead` steps ahead."""

    def source(self, name: str) -> str:
        """The whole module text; its kernel is called `name`."""
        p, c = self.p, self.c
        along = vector(p)[0]
        block = c["lanes"] * along * c["ahead"]
        self.ragged = p.K % block != 0
        beside = c["threads"] // c["lanes"]  # threads with other columns
        # warps that hold sums of one column, and lanes of a warp that hold sums of different ones
        parts = max(c["lanes"] // 32, 1) if p.transposed else c["threads"] // 32
        writers = 1 if p.transposed else beside
        constants = [
            f"M, N, K = {p.M}, {p.N}, {p.K}",
            f"THREADS, LANES, COLUMNS, BN = {c['threads']}, {c['lanes']}, {c['columns']}, {c['BN']}",
            f"ALONG, AHEAD, STEPS = {along}, {c['ahead']}, {-(-p.K // block)}",
            f"PARTS, WRITERS = {parts}, {writers}",
        ]
        gemms = range(self.gemms)
        body = schedules.fill(
            DOTS, **self._grid(), signature=self._signature(name),
            place=self._place(beside), allocate=self._allocate(), clear=[f"T.clear(a{g})" for g in gemms],
            load=self._load(), multiply=self._multiply(), add=self._add(writers),
            keep=[f"s{g}[{self._part()}, m, {self._column()} + r] = a{g}[m, r]" for g in gemms],
            results=self._results(
                [" + ".join(f"s{g}[{part}, i, j]" for part in range(parts)) for g in gemms], "i", "bn * BN + j"
            ),
        )  # fmt: skip
        return f"{self.d.header()}\n" + "\n".join(constants) + f"\n\n{body}\n"

    def _place(self, beside: int) -> list:
        """The thread's place along K, and its first column."""
        if self.p.transposed:
            return ["lane = tx % LANES", "first = bn * BN + tx // LANES * COLUMNS"]
        return [f"lane = tx // {beside}", f"first = bn * BN + tx % {beside} * COLUMNS"]

    def _part(self) -> str:
        return "tx % LANES // 32" if self.p.transposed else "tx // 32"

    def _column(self) -> str:
        return "tx // LANES * COLUMNS" if self.p.transposed else "tx % WRITERS * COLUMNS"

    def _allocate(self) -> list:
        dtype = self.p.x.dtype
        tile = "AHEAD, COLUMNS, ALONG" if self.p.transposed else "AHEAD, ALONG, COLUMNS"
        lines = [f'x_r = T.alloc_local((ALONG,), "{dtype}")']
        for g in range(self.gemms):
            lines += [
                f'w{g}_r = T.alloc_local(({tile}), "{dtype}")',
                f'a{g} = T.alloc_local((M, COLUMNS), "float32")',
                f's{g} = T.alloc_shared((PARTS, M, BN), "float32")',
            ]
        return lines

    def _at(self) -> str:
        """First element along K of step (k, u); a step behind the end reads what it won't use."""
        at = "((k * AHEAD + u) * LANES + lane) * ALONG"
        return f"T.min({at}, K - ALONG)" if self.ragged else at

    def _load(self) -> list:
        p, clamp = self.p, self.p.N % self.c["BN"] != 0
        if p.transposed:
            row = "T.min(first + r, N - 1)" if clamp else "first + r"
            loops, put, take = ("r", "COLUMNS", "v", "ALONG"), "u, r, v", f"{{}}{row}, {self._at()} + v"
        else:
            column = "T.min(first, N - COLUMNS)" if clamp else "first"
            loops, put, take = ("v", "ALONG", "r", "COLUMNS"), "u, v, r", f"{self._at()} + v, {column} + r"
        outer, count, inner, width = loops
        lines = ["for u in T.unroll(AHEAD):", f"    for {outer} in T.unroll({count}):"]
        for g, w in enumerate(p.weights):
            lines += [
                f"        for {inner} in T.vectorized({width}):",
                f"            w{g}_r[{put}] = w{g}[{self._z(w)}{take.format(behind(w))}]",
            ]
        return lines

    def _multiply(self) -> list:
        put = "u, r, v" if self.p.transposed else "u, v, r"
        lines = [
            "for m in T.unroll(M):",
            "    for v in T.vectorized(ALONG):",
            f"        x_r[v] = x[{self._z(self.p.x)}m, {self._at()} + v]",
            "    for r in T.unroll(COLUMNS):",
            "        for v in T.unroll(ALONG):",
            *(
                f'            a{g}[m, r] += T.cast(x_r[v], "float32") * T.cast(w{g}_r[{put}], "float32")'
                for g in range(self.gemms)
            ),
        ]
        if not self.ragged:
            return lines
        return ["if ((k * AHEAD + u) * LANES + lane) * ALONG < K:", *(f"    {line}" for line in lines)]

    def _add(self, writers: int) -> list:
        """Over the lanes of a warp that share columns; 32 writers share none."""
        steps = [s for s in (16, 8, 4, 2, 1) if s >= writers]
        if not steps:
            return []
        lines = ["for m in T.unroll(M):", "    for r in T.unroll(COLUMNS):"]
        lines += [f"        a{g}[m, r] += T.shfl_xor(a{g}[m, r], {s})" for s in steps for g in range(self.gemms)]
        return lines
