"""Products with few tiles: blocks share the steps along K of one tile, and add their sums up in a fixed order.

The weight's rows are the tensor cores' wide side and the rows of the input the narrow one, so 16 rows of input waste
nothing. The blocks of a tile are a cluster: each leaves its sums in its shared memory, then finishes its share of the
tile's rows from the memory of all, block 0 first, so that two runs give the same bits. In other configs the sums go
through a float32 workspace, and a second launch finishes them.
"""

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.gemm_direct import Direct

from fusescout.template import Param

PAD = 4
"""Columns added to the rows of sums in shared memory, so that a warp's stores fall into different banks."""

CLUSTER = '''
PRELUDE = PRELUDE + r"""
FS int fs_meet() {  // all threads of the cluster's blocks that have not left
  asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  return 0;
}
FS float fs_peer(const float* mine, int block) {  // what lies at the same place in another block's shared memory
  unsigned place = (unsigned)__cvta_generic_to_shared(mine), there;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
  return value;
}
"""


def meet():
    T.evaluate(T.call_extern("int32", "fs_meet"))


def peer(element, block):
    return T.call_extern("float32", "fs_peer", T.address_of(element), block)

'''

MAIN = """
    with T.Kernel(SPLITS, COLUMNS, ROWS * MATRICES, threads=THREADS, prelude=PRELUDE@@launch) as (part, bn, zm):
        @@allocate
        T.no_set_max_nreg()  # few sums: the registers are better spent on a second block
        row, col = zm % ROWS * BM, bn * BN
        @@clear
        for k in T.Pipelined(STEPS, num_stages=STAGES):
            @@load
            @@mma
        @@join
"""

FROM_SHARED = """
for j, i in T.Parallel(BN, BM):
    @@keep
@@meet
for i, j in T.Parallel(BM // SPLITS, BN):
    m = row + part * (BM // SPLITS) + i
    if m < M:
        if col + j < N:
            @@results
@@leave
"""

TO_WORKSPACE = """
for j, i in T.Parallel(BN, BM):
    if row + i < M:
        if col + j < N:
            @@keep
"""

FROM_WORKSPACE = """
    with T.Kernel(T.ceildiv(M * N, 256), MATRICES, threads=256) as (piece, z):
        for e in T.Parallel(256):
            if piece * 256 + e < M * N:
                m, n = (piece * 256 + e) // N, (piece * 256 + e) % N
                @@results
"""


class Split(Direct):
    """Config: `splits` blocks for a tile, whose sums meet in `join`: "cluster" or "memory"."""

    @property
    def through_memory(self) -> bool:
        return self.c["join"] == "memory"

    def params(self) -> tuple:
        """In memory, the sums of each block, product, matrix and result: float32, all of them written."""
        given = super().params()
        if not self.through_memory:
            return given
        shape = (self.c["splits"], self.matrices, self.p.M, self.p.N)
        stride = (self.matrices * self.p.M * self.p.N, self.p.M * self.p.N, self.p.N, 1)
        return (*given, *(Param(f"p{g}", "scratch", g, shape, stride, "float32") for g in range(self.gemms)))

    def source(self, name: str) -> str:
        """The whole module text; its kernel is called `name`."""
        p, c = self.p, self.c
        constants = [
            f"M, N, K = {p.M}, {p.N}, {p.K}",
            f"BM, BN, BK = {c['BM']}, {c['BN']}, {c['BK']}",
            f'DTYPE, STAGES, THREADS = "{p.x.dtype}", {c["stages"]}, {c["threads"]}',
            f"SPLITS, STEPS, MATRICES = {c['splits']}, {self._steps()}, {self.matrices}",
            f"ROWS, COLUMNS = {-(-p.M // c['BM'])}, {-(-p.N // c['BN'])}",
        ]
        clustered = c["splits"] > 1 and not self.through_memory
        self.matrix = "zm // ROWS"
        main = schedules.fill(
            MAIN,
            launch=", cluster_dims=(SPLITS, 1, 1)" if clustered else "", allocate=self._buffers(),
            clear=[f"T.clear(a{g})" for g in range(self.gemms)],
            load=self._load("(part * STEPS + k)"), mma=self._mma(), join=self._join(clustered),
        )  # fmt: skip
        finish = ""
        if self.through_memory:
            self.matrix = "z"
            sums = self._sums("p{g}[{s}, z, m, n]")
            finish = "\n" + schedules.fill(FROM_WORKSPACE, results=self._results(sums, "m", "n"))
        extra = CLUSTER if clustered else ""
        head = f"{self.d.header()}\n" + "\n".join(constants) + f"\n{extra}"
        return f"{head}\n@T.prim_func\ndef {self._signature(name)}:\n{main}{finish}\n"

    def _steps(self) -> int:
        """Steps along K of one block."""
        return -(-self.p.K // (self.c["BK"] * self.c["splits"]))

    def _sums(self, text: str) -> list:
        return [" + ".join(text.format(g=g, s=s) for s in range(self.c["splits"])) for g in range(self.gemms)]

    def _buffers(self) -> list:
        lines = self._tiles()
        for g in range(self.gemms):
            lines.append(f'a{g} = T.alloc_fragment((BN, BM), "float32")')
            if not self.through_memory:
                lines.append(f's{g} = T.alloc_shared((BM, BN + {PAD}), "float32")')
        return lines

    def _mma(self) -> list:
        flip = f"{'' if self.p.transposed else 'transpose_A=True, '}transpose_B={not self.p.x.turned}"
        return [f"T.gemm(w{g}_s, x_s, a{g}, {flip}, policy=T.GemmWarpPolicy.FullRow)" for g in range(self.gemms)]

    def _join(self, clustered: bool) -> list:
        if self.through_memory:
            keep = [f"p{g}[part, zm // ROWS, row + i, col + j] = a{g}[j, i]" for g in range(self.gemms)]
            return schedules.fill(TO_WORKSPACE, keep=keep).splitlines()
        place = "part * (BM // SPLITS) + i, j"
        sums = self._sums(f"peer(s{{g}}[{place}], {{s}})" if clustered else f"s{{g}}[{place}]")
        return schedules.fill(
            FROM_SHARED, keep=[f"s{g}[i, j] = a{g}[j, i]" for g in range(self.gemms)],
            results=self._results(sums, "m", "col + j"), meet=["meet()"] if clustered else [],
            leave=["meet()  # its memory is read until here"] if clustered else [],
        ).splitlines()  # fmt: skip
