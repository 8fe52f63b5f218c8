"""Writes the TileLang source of one attention kernel.

A block keeps its queries and walks their keys tile by tile, with the largest score and the sum of exponentials of each
row so far ("stream", "ahead"); where one tile holds all keys there is nothing to walk ("whole"). Statistics are
float32. A NaN or an infinite score makes its row NaN, through the exponential; hidden keys weigh exactly 0.
"""

import math

from fusescout.templates import attention_schedules as schedules
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

    def _element(self, n: int, row: str, column: str, stage: str) -> str:
        o = self.p.operands[n]
        if (n, o) in self.staged:
            return self.d.load(f"e{n}_s[{stage}i, j]", o.dtype)
        own = ", ".join(t for t, s in zip((row, column), o.strides, strict=True) if s)
        return self.d.load(f"e{n}[{(self._z(o) + own).removesuffix(', ') or '0'}]", o.dtype)

    # -- scores
    def _chain(self, row: str, column: str, score: str, stage: str = "") -> list:
        """Lines from a product's score to what the softmax reads; `stage` starts the index of a tile of operands."""
        p, d = self.p, self.d
        if self.folded:
            return []
        if p.safe:
            text = f"{score} * {d.f32(p.scale)}"
            if self.mask:
                value = self._element(0, row, column, stage)
                text += f" + {f'where({value}, ZERO, LOWEST)' if self.mask.dtype == 'bool' else value}"
            return [f"{score} = {text}"]
        writer = Writer(p.graph, {o.value: self._element(n, row, column, stage) for n, o in enumerate(p.operands)}, d)
        writer.values[p.scores] = score
        for value in p.chain:
            op = p.graph.op_of(value)
            if op.name in VIEWS:
                writer.values[value] = writer.values[op.args[0].to]
            else:
                writer.write(value)
        return [*writer.lines, f"{score} = {writer.values[p.weighed]}"]

    def _scores(self, column: str = "col", stage: str = "") -> list:
        """The chain, then keys that are not there or lie behind a query get the lowest score."""
        p, c, loop = self.p, self.c, "for i, j in T.Parallel(BM, BN):"
        body = self._chain("row + i", f"{column} + j", "s[i, j]", stage)
        lines = [loop, *(f"    {b}" for b in body)] if body else []
        known = []
        if p.keys % c["BN"]:
            known.append((f"{column} + BN > KEYS", f"{column} + j < KEYS"))
        if p.causal:
            known.append((f"{column} + BN - 1 > row", f"{column} + j <= row + i"))
        for some, seen in known:
            hide = [loop, f"    s[i, j] = where({seen}, s[i, j], LOWEST)"]
            lines += hide if c["schedule"] == "whole" else [f"if {some}:", *(f"    {h}" for h in hide)]
        return lines

    def _power(self, score: str) -> str:
        """The weight of a score, or how much earlier ones shrink, against the base of its row.

        Not `score * FACTOR - base * FACTOR`: contracted, a base less itself is not 0 but what its product was rounded
        by, and with scores of 1e9 the rows so far would be weighed by powers of two.
        """
        return f"ex2(({score} - base[i]) * FACTOR)"

    # -- the whole text
    def source(self, name: str) -> str:
        body = getattr(self, f"_{self.c['schedule']}")()
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
            f"ROW_BLOCKS, MOST_STEPS = {-(-p.rows // c['BM'])}, {-(-p.keys // c['BN'])}",
            f"FACTOR = {f32(factor)}",
            'ex2 = math("ex2")',
        ]
        if self.staged:
            lines.insert(0, "from tilelang.layout import make_swizzled_layout\n")
        return "\n".join(lines) + "\n"

    def _allocate(self) -> list:
        p, c = self.p, self.c
        stages = "STAGES, " if c["schedule"] == "ahead" else ""
        tiles = {"q_s": "BM, D", "k_s": f"{stages}BN, D", "v_s": f"{stages}BN, DV", "y_s": "BM, DV"}
        rows = ["top", "base", "total"] + (["before", "shrink", "part"] if c["schedule"] != "whole" else [])
        return [
            *(f'{name} = T.alloc_shared(({shape}), "{p.q.dtype}")' for name, shape in tiles.items()),
            *(
                f'e{n}_s = T.alloc_shared(({stages}BM, BN), "{o.dtype}")'
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
            return fill(schedules.WHOLE, **blocks, load=load, arrived=[])
        first = [tile for tile in tiles if tile != "v_s"]
        load = ["came = T.alloc_barrier([1] * 2)"]
        for tile, tensor in tiles.items():
            last = ', annotations={"emit_arrive": 1}' if tile in (first[-1], "v_s") else ""
            load.append(f"T.tma_copy({tensor}, {tile}, barrier=came[{int(tile == 'v_s')}]{last})")
        load.append("T.mbarrier_wait_parity(came[0], 0)")
        return fill(schedules.WHOLE, **blocks, load=load, arrived=["T.mbarrier_wait_parity(came[1], 0)"])

    def _stages(self) -> dict:
        """Tiles of operands that come through shared memory, and what is copied there."""
        return {f"e{n}_s": f"e{n}[{self._z(o)}row, col]" for n, o in self.staged}

    def _steps(self) -> str:
        steps = "T.ceildiv(KEYS, BN)"
        return f"T.min({steps}, T.ceildiv(row + BM, BN))" if self.p.causal else steps

    def _stream(self) -> str:
        hints = []
        if self.c.get("ctas", 1) == 2:  # the default 24/240 needs more registers than half an SM has, and hangs
            hints = [
                "T.annotate_min_blocks_per_sm(2)", "T.annotate_producer_reg_dealloc(24)",
                "T.annotate_consumer_reg_alloc(232)",
            ]  # fmt: skip
        shrink = self._power("before[i]")
        return fill(schedules.STREAM, **self._blocks(), steps=self._steps(), hints=hints, shrink=shrink)

    def _ahead(self) -> str:
        p, c = self.p, self.c
        few, many = (24, 240) if c["threads"] <= 256 else (32, 160)
        wide = {n: self._z(getattr(p, n)) for n in "qkv"}
        tiles = {f"e{n}_s": f"e{n}[{self._z(o)}row : row + BM, t * BN : (t + 1) * BN]" for n, o in self.staged}
        tiles["k_s"] = f"k[{wide['k']}t * BN : (t + 1) * BN, 0:D]"
        load = [
            f"T.tma_copy({tensor}, {tile}[t % STAGES, :, :], barrier=k_full[t % STAGES]"
            + (', annotations={"emit_arrive": 1})' if tile == "k_s" else ")")
            for tile, tensor in tiles.items()
        ]

        def fence(name: str, columns: int) -> list:
            return [f"T.warpgroup_fence_operand({name}, num_regs={c['BM'] * columns // c['threads']})"]

        blocks = self._blocks() | {
            "q": f"q[{wide['q']}row : row + BM, 0:D]",
            "v": f"v[{wide['v']}t * BN : (t + 1) * BN, 0:DV]",
            "scores": self._scores(stage="n % STAGES, "),
        }
        return fill(
            schedules.AHEAD, **blocks, steps=self._steps(), load=load, few=str(few), many=str(many),
            first=self._scores("0", "0, "), fence_s=fence("s", c["BN"]), fence_o=fence("o", padded(p.value_width)),
            shrink=self._power("before[i]"),
            scored="transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow",
        )  # fmt: skip

    def _serial(self) -> str:
        p, d = self.p, self.d
        lead = {n: self._z(getattr(p, n)) for n in "qkvy"}
        scores = self._chain("row", "j", "s[j]")
        if p.causal:
            scores.append("s[j] = where(j <= row, s[j], LOWEST)")
        above = f"(s[j] - top[0]) * {d.f32(p.scale)}" if self.folded else "s[j] - top[0]"
        return fill(
            schedules.SERIAL,
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
