"""float32 GEMM with a pointwise epilogue on Hopper's bfloat16 tensor cores, as accurate as float32 arithmetic.

Three bfloat16 numbers hold all 24 bits of a float32: x = x0 + x1 + x2 (`planes.py`). Of the nine products of two such
sums, six matter. Tensor cores round their sums towards zero, so the leading product goes to a float32 sum in registers
after every step; the other five, 2^-8 of it and less, have a sum of their own. Infinities and NaN are the leading
product's.

The planes of a weight that is a parameter are prepared once and take one and a half times its memory beside it; those
of the input, and of other weights, are made in each call. H200, 2026-11-30, torch 2.11, TF32 off, ms, weights split in
each call; the largest error against float64 was 4.7e-6, eager's 3.6e-5:

    M x N x K, epilogue                          eager  template
    32768 x 4096 x 1024, bias and gelu           6.011     2.327
    4096 x 4096 x 4096, bias                     2.774     1.098
    1024 x 8192 x 8192, bias and silu            2.803     1.203
    1024 x 1024 x 1024, relu                     0.097     0.047
    1000 x 776 x 520, addmm, relu and residual   0.098     0.050
    128 x 16384 x 16384, bias and relu           1.544     1.266  (splitting the weight takes most of it)

Not covered: batches of products, several products of one input in one kernel, and several results.
"""

from fusescout.templates import gemm_problem
from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import unsupported
from fusescout.templates.gemm_batch import Refused
from fusescout.templates.gemm_configs import HOPPER
from fusescout.templates.gemm_source import Writer
from fusescout.templates.planes import PLANES
from fusescout.templates.planes import pitch_of
from fusescout.templates.planes import split_weight
from fusescout.templates.source import build

from fusescout.constants import Split
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.template import Kernel
from fusescout.template import Param

NAME = "gemm_float32"
FAMILY = "gemm_epilogue"
PRODUCTS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1))
"""Planes of x and w whose products correct the leading one, smallest first."""
TILES = ((128, 128, 2), (128, 64, 3))
"""BM, BN, stages: a stage holds three planes of both operands."""

SPLIT = '''
PRELUDE = PRELUDE + r"""
// nearest bfloat16 that is finite where x is
FS float fs_plane(float x) {
  unsigned u = __float_as_uint(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u, inf = 0x7f800000u;
  return (u & inf) == inf ? x : __uint_as_float((r & inf) == inf ? u & 0xffff0000u : r);
}
FS float fs_beyond(float x, float y) { return isfinite(y) ? x - y : 0.0f; }
"""


def plane(x):
    return T.call_pure_extern("float32", "fs_plane", x)


def beyond(x, y):
    return T.call_pure_extern("float32", "fs_beyond", x, y)

'''
SPLITTING = """
    with T.Kernel(T.ceildiv(@@count, 1024), threads=256@@prelude) as part:
        for i in T.Parallel(1024):
            if part * 1024 + i < @@count:
                v = let(@@name[(part * 1024 + i) // @@columns, (part * 1024 + i) % @@columns])
                p0 = let(plane(v))
                v1 = let(beyond(v, p0))
                p1 = let(plane(v1))
                @@planes[0, (part * 1024 + i) // @@columns, (part * 1024 + i) % @@columns] = T.cast(p0, "bfloat16")
                @@planes[1, (part * 1024 + i) // @@columns, (part * 1024 + i) % @@columns] = T.cast(p1, "bfloat16")
                @@planes[2, (part * 1024 + i) // @@columns, (part * 1024 + i) % @@columns] = T.cast(v1 - p1, "bfloat16")
"""
PRODUCT = """
    with T.Kernel(GRID, threads=384) as block:
        tx = T.get_thread_binding()
        @@allocate
        full = T.alloc_barrier([1] * STAGES)
        empty = T.alloc_barrier([8] * STAGES)
        tiles = T.ceildiv(TILES - block, GRID)
        if tx < 128:  # the producer: one thread of one warp issues all loads
            T.set_max_nreg(24, 0)
            if tx < 32:
                for t in T.serial(tiles):
                    bm, bn = place(t * GRID + block)
                    row, col = bm * BM, bn * BN
                    for k in T.serial(STEPS):
                        it = t * STEPS + k
                        T.mbarrier_wait_parity(empty[it % STAGES], ((it // STAGES) & 1) ^ 1)
                        @@load
        else:
            T.set_max_nreg(240, 1)
            for t in T.serial(tiles):
                bm, bn = place(t * GRID + block)
                row, col = bm * BM, bn * BN
                @@preload
                T.clear(a0)
                for k in T.serial(STEPS):
                    it = t * STEPS + k
                    T.mbarrier_wait_parity(full[it % STAGES], (it // STAGES) & 1)
                    @@mma
                    T.wait_wgmma(0)
                    @@fence
                    if T.shuffle_elect(32):
                        T.mbarrier_arrive(empty[it % STAGES])
                    for i, j in T.Parallel(BM, BN):
                        a0[i, j] = a0[i, j] + lead[i, j]
                for i, j in T.Parallel(BM, BN):
                    a0[i, j] = where(fabs(a0[i, j]) < bits(0x7F800000), a0[i, j] + rest[i, j], a0[i, j])
                @@epilogue
"""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    try:
        problem = gemm_problem.read(graph)
    except Refused as reason:
        return f"{reason}."
    if {problem.x.dtype, problem.w.dtype} != {"float32"}:
        return "It is for float32 products."
    if device.kind != "cuda" or device.arch not in HOPPER:
        return "It is for Hopper's tensor cores."
    for value in problem.epilogue:
        if why := unsupported(graph.op_of(value), graph):
            return f"{why}."
    if min(problem.M, problem.N, problem.K) == 0:
        return "The matrix product is empty."
    if problem.batch:
        return "The float32 product is batched."
    if not _is_countable(problem.x) or not (split_weight(graph, problem.w) or _is_countable(problem.w)):
        return "The planes of an operand have more elements than 32 bits count."
    if [o.dtype for o in problem.outputs] != ["float32"]:
        return "The float32 product has several results, or one of another dtype."
    return None


def configs(graph: Subgraph, device: Device) -> list:
    """Prepared planes of the weight come first, and tiles that give the most multiprocessors something to do."""
    problem = gemm_problem.read(graph)

    def waves(shape: tuple) -> float:
        bm, bn, _ = shape
        tiles = -(-problem.M // bm) * -(-problem.N // bn)
        return -(-tiles // max(device.cores, 1)) * (bm * bn + 32 * (bm + bn))

    fixed = {"schedule": "split", "BK": 64, "threads": 384, "grid": device.cores}
    tiles = [{**fixed, "BM": bm, "BN": bn, "stages": stages} for bm, bn, stages in sorted(TILES, key=waves)]
    ready = [{**tile, "weight": "prepared"} for tile in tiles] if split_weight(graph, problem.w) else []
    return ready + (tiles if _is_countable(problem.w) else [])


def _is_countable(operand: gemm_problem.Matrix) -> bool:
    """Whether a kernel of its own can make an operand's planes; prepared ones are only loaded, by their coordinates."""
    return PLANES * operand.rows * pitch_of(operand.columns) < 1 << 31


def prepared(graph: Subgraph, config: dict) -> Split | None:
    """The weight's planes as a prepared constant; None where a config makes them in each call."""
    return split_weight(graph, gemm_problem.read(graph).w) if config.get("weight") == "prepared" else None


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    """The kernel of a config; with a prepared weight of the steady part, whose last input are the planes."""
    problem = gemm_problem.read(graph)
    writer = _Writer(problem, {**config, "policy": "FullRow"}, Dialect("cuda"))
    source = writer.source(NAME)
    return Kernel(build(source, NAME), writer.params(), source, writer.pass_configs())


class _Writer(Writer):
    """Planes that are not prepared are scratch: a launch for each operand makes them, the last one multiplies."""

    @property
    def _prepared(self) -> bool:
        return self.c.get("weight") == "prepared"

    def params(self) -> tuple:
        def planes(name: str, o: gemm_problem.Matrix, role: str, index: int) -> Param:
            pitch = pitch_of(o.columns)
            shape, stride = (PLANES, o.rows, o.columns), (o.rows * pitch, pitch, 1)
            return Param(name, role, index, shape, stride, "bfloat16")

        given = super().params()
        xs = planes("xs", self.p.x, "scratch", 0)
        if not self._prepared:
            return (*given, xs, planes("ws", self.p.w, "scratch", 0))
        ws = planes("ws", self.p.w, "input", len(self.p.graph.inputs) - 1)
        return (*(q for q in given if q.name != "w0"), xs, ws)

    def source(self, name: str) -> str:
        p = self.p
        blocks = [
            schedules.fill(
                SPLITTING, name=of, planes=to, count=str(o.rows * o.columns), columns=str(o.columns),
                prelude=", prelude=PRELUDE" if of == "x" else "",  # once for the whole source
            )
            for of, to, o in (("x", "xs", p.x), *([] if self._prepared else [("w0", "ws", p.w)]))
        ]  # fmt: skip
        registers = self.c["BM"] * self.c["BN"] // 256
        product = schedules.fill(
            PRODUCT,
            allocate=self._operands() + self._fragments() + self._sums(), load=self._load_planes(),
            preload=self._preload(), mma=self._six(), epilogue=self._epilogue("", 256),
            fence=[f"T.warpgroup_fence_operand({s}, num_regs={registers})" for s in ("lead", "rest")],
        )  # fmt: skip
        head = f"{self.d.header()}\n{self._constants()}\n{schedules.RASTER}{SPLIT}"
        return f"{head}\n@T.prim_func\ndef {self._signature(name)}:\n" + "\n".join([*blocks, product]) + "\n"

    def _operands(self) -> list:
        w = "BN, BK" if self.p.transposed else "BK, BN"
        return [
            f'{name}{k}_s = T.alloc_shared((STAGES, {shape}), "bfloat16")'
            for name, shape in (("x", "BM, BK"), ("w", w))
            for k in range(PLANES)
        ]

    def _sums(self) -> list:
        return [f'{name} = T.alloc_fragment((BM, BN), "float32")' for name in ("lead", "rest")]

    def _load_planes(self) -> list:
        rows, steps = "col : col + BN", "k * BK : (k + 1) * BK"
        at = f"{rows}, {steps}" if self.p.transposed else f"{steps}, {rows}"
        places = [("xs", "x", k, f"row : row + BM, {steps}") for k in range(PLANES)]
        places += [("ws", "w", k, at) for k in range(PLANES)]
        last = len(places) - 1
        return [
            f"T.tma_copy({source}[{k}, {where}], {name}{k}_s[it % STAGES, :, :], barrier=full[it % STAGES]"
            + (', annotations={"emit_arrive": 1})' if n == last else ")")
            for n, (source, name, k, where) in enumerate(places)
        ]

    def _six(self) -> list:
        def product(x: int, w: int, into: str, clear: str) -> str:
            return (
                f"T.wgmma_gemm(x{x}_s[it % STAGES, :, :], w{w}_s[it % STAGES, :, :], {into}, "
                f"transpose_B={self.p.transposed}, policy=T.GemmWarpPolicy.FullRow, clear_accum={clear})"
            )

        small = [product(x, w, "rest", "(k == 0)" if n == 0 else "False") for n, (x, w) in enumerate(PRODUCTS)]
        return [*small, product(0, 0, "lead", "True")]
