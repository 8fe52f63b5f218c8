"""Writes the TileLang source of one attention kernel.

A block keeps its queries and walks their keys tile by tile, with the largest score and the sum of exponentials of each
row so far ("stream"); where one tile holds all keys of a row there is nothing to walk ("whole"). Statistics are
float32. A NaN or an infinite score makes its row NaN, through the exponential; hidden keys weigh exactly 0.
"""

import math

from fusescout.templates.attention_problem import Operand
from fusescout.templates.attention_problem import Problem
from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import Writer
from fusescout.templates.gemm_batch import indices
from fusescout.templates.gemm_schedules import fill
from fusescout.templates.layout import EXPANDS
from fusescout.templates.layout import PERMUTES
from fusescout.templates.layout import REGROUPS

from fusescout.template import Param

LOG2E = math.log2(math.e)
STAGED = ("float32", *HALF)
VIEWS = (*REGROUPS, *PERMUTES, *EXPANDS)

STREAM = """
@T.prim_func
def @@signature:
    with T.Kernel(ROW_BLOCKS * MATRICES, threads=THREADS, prelude=PRELUDE) as block:
        z = block // ROW_BLOCKS
        @@allocate
        @@hints
        row = @@row
        T.copy(@@q, q_s)
        T.clear(o)
        T.clear(total)
        T.fill(top, LOWEST)
        for t in T.Pipelined(@@steps, num_stages=STAGES):
            col = t * BN
            T.copy(@@k, k_s)
            @@stage
            T.gemm(q_s, k_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            @@scores
            T.copy(top, before)
            T.reduce_max(s, top, dim=1, clear=False)
            for i in T.Parallel(BM):
                base[i] = where(top[i] == LOWEST, ZERO, top[i])
                shrink[i] = @@shrink
            for i, j in T.Parallel(BM, BN):
                s[i, j] = @@weight
            T.reduce_sum(s, part, dim=1)
            for i in T.Parallel(BM):
                total[i] = total[i] * shrink[i] + part[i]
            T.copy(s, p)
            for i, j in T.Parallel(BM, DV):
                o[i, j] = o[i, j] * shrink[i]
            T.copy(@@v, v_s)
            T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullRow)
        @@finish
"""

WHOLE = """
@T.prim_func
def @@signature:
    with T.Kernel(ROW_BLOCKS * MATRICES, threads=THREADS, prelude=PRELUDE) as block:
        z = block // ROW_BLOCKS
        @@allocate
        row = @@row
        col = 0
        @@load
        T.gemm(q_s, k_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        @@scores
        T.reduce_max(s, top, dim=1)
        for i in T.Parallel(BM):
            base[i] = where(top[i] == LOWEST, ZERO, top[i])
        for i, j in T.Parallel(BM, BN):
            s[i, j] = @@weight
        T.reduce_sum(s, total, dim=1)
        T.copy(s, p)
        @@arrived
        T.gemm(p, v_s, o, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
        @@finish
"""

SERIAL = """
@T.prim_func
def @@signature:
    with T.Kernel(ROWS, MATRICES) as (row, z):
        s = T.alloc_local((KEYS,), "float32")
        o = T.alloc_local((DV,), "float32")
        top = T.alloc_local((1,), "float32")
        total = T.alloc_local((1,), "float32")
        top[0] = LOWEST
        total[0] = ZERO
        for j in T.serial(KEYS):
            s[j] = ZERO
            for d in T.serial(D):
                s[j] = s[j] + @@q * @@k
        for j in T.serial(KEYS):
            @@scores
        for j in T.serial(KEYS):
            top[0] = maximum(top[0], s[j])
        if top[0] == LOWEST:
            top[0] = ZERO
        for j in T.serial(KEYS):
            s[j] = exp(@@above)
            total[0] = total[0] + s[j]
        for d in T.serial(DV):
            o[d] = ZERO
        for j in T.serial(KEYS):
            for d in T.serial(DV):
                o[d] = o[d] + s[j] * @@v
        for d in T.serial(DV):
            @@y = @@result
"""


class AttentionWriter:
    """One kernel being written: the problem, a config and a dialect."""

    def __init__(self, problem: Problem, config: dict, dialect: Dialect) -> None:
        self.p, self.c, self.d = problem, config, dialect
        self.mask = problem.operands[0] if problem.safe and problem.operands else None
        self.folded = problem.plain and self.mask is None
        """Whether the scale can wait until the exponential."""
        self.staged = [] if dialect.cpu else [(n, o) for n, o in enumerate(problem.operands) if staged(problem, o)]

    # -- parameters
    def params(self) -> tuple:
        p = self.p
        found = [self._param(n, "input", getattr(p, n), whole=True) for n in "qkv"]
        found += [self._param(f"e{n}", "input", o) for n, o in enumerate(p.operands)]
        return (*found, self._param("y", "output", p.y, whole=True))

    def _param(self, name: str, role: str, o: Operand, whole: bool = False) -> Param:
        """Without the dimensions an operand lacks; the four tensors of attention keep their last two."""
        dims = [(n, s) for n, s in zip(self.p.batch, o.lead, strict=True) if s]
        dims += [(n, max(s, 1)) for n, s in zip(o.shape, o.strides, strict=True) if s or whole]
        dims = dims or [(1, 1)]
        return Param(name, role, o.index, tuple(n for n, _ in dims), tuple(s for _, s in dims), o.dtype)

    def _signature(self, name: str) -> str:
        given = []
        for q in self.params():
            dense = tuple(math.prod(q.shape[k + 1 :]) for k in range(len(q.shape)))
            kind = "Tensor" if q.stride == dense else "StridedTensor"
            stride = "" if q.stride == dense else f"{q.stride}, "
            given.append(f'{q.name}: T.{kind}({q.shape}, {stride}"{self.d.storage(q.dtype)}")')
        return f"{name}({', '.join(given)})"

    def _z(self, o: Operand) -> str:
        """Start of an index into an operand: its matrix."""
        places = zip(indices(self.p.batch, "z"), o.lead, strict=True)
        return "".join(f"{text}, " for text, stride in places if stride)

    def _element(self, n: int, row: str, column: str) -> str:
        o = self.p.operands[n]
        if (n, o) in self.staged:
            return self.d.load(f"e{n}_s[i, j]", o.dtype)
        own = ", ".join(t for t, s in zip((row, column), o.strides, strict=True) if s)
        return self.d.load(f"e{n}[{(self._z(o) + own).removesuffix(', ') or '0'}]", o.dtype)

    # -- scores
    def _chain(self, row: str, column: str, score: str) -> list:
        """Lines from a product's score to what the softmax reads."""
        p, d = self.p, self.d
        if self.folded:
            return []
        if p.safe:
            text = f"{score} * {d.f32(p.scale)}"
            if self.mask:
                value = self._element(0, row, column)
                text += f" + {f'where({value}, ZERO, LOWEST)' if self.mask.dtype == 'bool' else value}"
            return [f"{score} = {text}"]
        writer = Writer(p.graph, {o.value: self._element(n, row, column) for n, o in enumerate(p.operands)}, d)
        writer.values[p.scores] = score
        for value in p.chain:
            op = p.graph.op_of(value)
            if op.name in VIEWS:
                writer.values[value] = writer.values[op.args[0].to]
            else:
                writer.write(value)
        return [*writer.lines, f"{score} = {writer.values[p.weighed]}"]

    def _scores(self) -> list:
        """The chain, then keys that are not there or lie behind a query get the lowest score."""
        p, c, loop = self.p, self.c, "for i, j in T.Parallel(BM, BN):"
        body = self._chain("row + i", "col + j", "s[i, j]")
        lines = [loop, *(f"    {b}" for b in body)] if body else []
        known = []
        if p.keys % c["BN"]:
            known.append(("col + BN > KEYS", "col + j < KEYS"))
        if p.causal:
            known.append(("col + BN - 1 > row", "col + j <= row + i"))
        for some, seen in known:
            hide = [loop, f"    s[i, j] = where({seen}, s[i, j], LOWEST)"]
            lines += hide if c["schedule"] == "whole" else [f"if {some}:", *(f"    {h}" for h in hide)]
        return lines

    def _power(self, score: str) -> str:
        """The weight of a score, or how much earlier ones shrink, against the base of its row."""
        if self.folded:
            return f"ex2({score} * FACTOR - base[i] * FACTOR)"
        return f"ex2(({score} - base[i]) * FACTOR)"

    # -- the whole text
    def source(self, name: str) -> str:
        body = {"serial": self._serial, "stream": self._stream, "whole": self._whole}[self.c["schedule"]]()
        return f"{self.d.header()}\n{self._constants()}\n" + body.replace("@@signature", self._signature(name)) + "\n"

    def _constants(self) -> str:
        p, c, f32 = self.p, self.c, self.d.f32
        lines = [
            f"ROWS, KEYS, MATRICES = {p.rows}, {p.keys}, {p.matrices}",
            f"LOWEST, ZERO = {f32(-math.inf)}, {f32(0.0)}",
        ]
        if self.d.cpu:
            return "\n".join([*lines, f"D, DV = {p.width}, {p.value_width}"]) + "\n"
        factor = p.scale * LOG2E if self.folded else LOG2E
        lines += [
            f"D, DV = {padded(p.width)}, {padded(p.value_width)}",
            f"BM, BN, STAGES, THREADS = {c['BM']}, {c['BN']}, {c['stages']}, {c['threads']}",
            f"ROW_BLOCKS, FACTOR = {-(-p.rows // c['BM'])}, {f32(factor)}",
            'ex2 = math("ex2")',
        ]
        if self.staged:
            lines.insert(0, "from tilelang.layout import make_swizzled_layout\n")
        return "\n".join(lines) + "\n"

    def _allocate(self) -> list:
        p, c = self.p, self.c
        tiles = {"q_s": "BM, D", "k_s": "BN, D", "v_s": "BN, DV", "y_s": "BM, DV"}
        rows = ["top", "base", "total"] + (["before", "shrink", "part"] if c["schedule"] == "stream" else [])
        return [
            *(f'{name} = T.alloc_shared(({shape}), "{p.q.dtype}")' for name, shape in tiles.items()),
            *(
                f'e{n}_s = T.alloc_shared((BM, BN), "{o.dtype}")'
                for n, o in self.staged
            ),
            's = T.alloc_fragment((BM, BN), "float32")',
            f'p = T.alloc_fragment((BM, BN), "{p.q.dtype}")',
            'o = T.alloc_fragment((BM, DV), "float32")',
            *(f'{name} = T.alloc_fragment((BM,), "float32")' for name in rows),
            *(f"T.annotate_layout({{e{n}_s: make_swizzled_layout(e{n}_s)}})" for n, _ in self.staged),
        ]  # fmt: skip

    def _blocks(self) -> dict:
        p = self.p
        lead = {n: self._z(getattr(p, n)) for n in "qkvy"}
        last = "ROW_BLOCKS - 1 - " if p.causal else ""  # longest rows first
        return {
            "allocate": self._allocate(),
            "row": f"({last}block % ROW_BLOCKS) * BM",
            "q": f"q[{lead['q']}row, 0]",
            "k": f"k[{lead['k']}col, 0]",
            "v": f"v[{lead['v']}col, 0]",
            "stage": [f"T.copy({tensor}, {tile})" for tile, tensor in self._stages().items()],
            "scores": self._scores(),
            "weight": self._power("s[i, j]"),
            "finish": [
                "for i in T.Parallel(BM):",
                f"    total[i] = {self._share('total[i]')}",
                "for i, j in T.Parallel(BM, DV):",
                "    o[i, j] = o[i, j] * total[i]",
                "T.copy(o, y_s)",
                f"T.copy(y_s, y[{lead['y']}row, 0])",
            ],
        }

    def _share(self, total: str) -> str:
        """One part of a row's sum; 0 of a row that sees no key, if it is to be 0."""
        return f"where({total} == ZERO, ZERO, rcp({total}))" if self.p.safe else f"rcp({total})"

    def _whole(self) -> str:
        """All loads are under way before the first is waited for, where the copy engine can bring them."""
        blocks = self._blocks()
        tiles = {"q_s": blocks["q"], "k_s": blocks["k"], **self._stages(), "v_s": blocks["v"]}
        if not all(map(bulk, (self.p.q, self.p.k, self.p.v))):
            load = [f"T.copy({tensor}, {tile})" for tile, tensor in tiles.items()]
            return fill(WHOLE, **blocks, load=load, arrived=[])
        first = [tile for tile in tiles if tile != "v_s"]
        load = ["came = T.alloc_barrier([1] * 2)"]
        for tile, tensor in tiles.items():
            last = ', annotations={"emit_arrive": 1}' if tile in (first[-1], "v_s") else ""
            load.append(f"T.tma_copy({tensor}, {tile}, barrier=came[{int(tile == 'v_s')}]{last})")
        load.append("T.mbarrier_wait_parity(came[0], 0)")
        return fill(WHOLE, **blocks, load=load, arrived=["T.mbarrier_wait_parity(came[1], 0)"])

    def _stages(self) -> dict:
        """Tiles of operands that come through shared memory, and what is copied there."""
        return {f"e{n}_s": f"e{n}[{self._z(o)}row, col]" for n, o in self.staged}

    def _stream(self) -> str:
        steps = "T.ceildiv(KEYS, BN)"
        if self.p.causal:
            steps = f"T.min({steps}, T.ceildiv(row + BM, BN))"
        hints = []
        if self.c.get("ctas", 1) == 2:  # the default 24/240 needs more registers than half an SM has, and hangs
            hints = [
                "T.annotate_min_blocks_per_sm(2)", "T.annotate_producer_reg_dealloc(24)",
                "T.annotate_consumer_reg_alloc(232)",
            ]  # fmt: skip
        return fill(STREAM, **self._blocks(), steps=steps, hints=hints, shrink=self._power("before[i]"))

    def _serial(self) -> str:
        p, d = self.p, self.d
        lead = {n: self._z(getattr(p, n)) for n in "qkvy"}
        scores = self._chain("row", "j", "s[j]")
        if p.causal:
            scores.append("s[j] = where(j <= row, s[j], LOWEST)")
        above = f"(s[j] - top[0]) * {d.f32(p.scale)}" if self.folded else "s[j] - top[0]"
        return fill(
            SERIAL,
            q=d.load(f"q[{lead['q']}row, d]", p.q.dtype), k=d.load(f"k[{lead['k']}j, d]", p.k.dtype),
            v=d.load(f"v[{lead['v']}j, d]", p.v.dtype), y=f"y[{lead['y']}row, d]", scores=scores or ["pass"],
            above=above, result=d.store(f"o[d] * {self._share('total[0]')}", p.y.dtype),
        )  # fmt: skip

    def pass_configs(self) -> dict:
        return self.d.pass_configs


def padded(width: int) -> int:
    """Tensor cores take 16 numbers at a time: the copy fills up with zeros."""
    return -(-width // 16) * 16


def staged(p: Problem, o: Operand) -> bool:
    """Whether an operand comes through shared memory, as the copy engine brings it: 16 bytes at a time."""
    lane = 4 if o.dtype == "float32" else 8
    steps = (*o.lead, o.strides[0])
    even = all(s % lane == 0 for s in steps) and p.graph.inputs[o.index].aligned
    return o.dtype in STAGED and o.strides[0] != 0 and o.strides[1] == 1 and even


def bulk(o: Operand) -> bool:
    """Whether the copy engine can bring it: every step is a multiple of 16 bytes."""
    return all(s % 8 == 0 for s in (*o.lead, o.strides[0]))
