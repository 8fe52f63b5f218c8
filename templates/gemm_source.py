"""Writes the TileLang source of one GEMM kernel: constants, parameters, and the blocks a schedule leaves open."""

import math

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.dialect import NARROW
from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import emit
from fusescout.templates.gemm_batch import indices
from fusescout.templates.gemm_problem import Operand
from fusescout.templates.gemm_problem import Problem

from fusescout.ir import DTYPE_BYTES
from fusescout.ir import FLOATS
from fusescout.template import Param

ROLE_BASED = {"tl.enable_auto_warp_specialization": "role_based"}
NO_REUSE = {"tl.disable_shared_memory_reuse": True}
"""Two warpgroups use their staging buffers at the same time, which the allocator's liveness analysis doesn't see."""


class Writer:
    """One kernel being written. `p` is the problem, `c` the config; block names are those of the schedule texts."""

    matrix = "z"
    """Text of the number of the matrix in the batch."""

    def __init__(self, problem: Problem, config: dict, dialect: Dialect) -> None:
        self.p, self.c, self.d = problem, config, dialect
        self.gemms, self.cluster = len(problem.weights), config.get("cluster", 1)
        self.matrices = math.prod(problem.batch)
        half = next((o.dtype for o in problem.outputs if o.dtype in NARROW), None)
        through_shared = not dialect.cpu and config["BN"] % 16 == 0
        self.staged = [through_shared and o.dtype == half for o in problem.outputs]
        self.bulk = [all(s * DTYPE_BYTES[o.dtype] % 16 == 0 for s in (o.pitch, *o.batch)) for o in problem.outputs]
        self.residual = self._residual()

    # ---- parameters -------------------------------------------------------------------------------------------

    def params(self) -> tuple:
        p = self.p

        def param(name: str, role: str, index: int, o, shape: tuple, stride: tuple) -> Param:
            sizes = tuple(n for n, s in zip(p.batch, o.batch, strict=True) if s)
            strides = tuple(s for s in o.batch if s)
            return Param(name, role, index, (*sizes, *shape), (*strides, *stride), o.dtype)

        found = [param("x", "input", p.x.input, p.x, (p.K, p.M) if p.x.turned else (p.M, p.K), (p.x.pitch, 1))]
        for g, w in enumerate(p.weights):
            found.append(param(f"w{g}", "input", w.input, w, (w.offset + w.rows, w.columns), (w.pitch, 1)))
        for k, o in enumerate(p.operands):
            found.append(param(f"e{k}", "input", o.input, o, (o.offset + o.shape[0], *o.shape[1:]), o.stride))
        for k, o in enumerate(p.outputs):
            found.append(param(f"y{k}", "output", k, o, (p.M, p.N), (o.pitch, 1)))
        return tuple(found)

    def _z(self, o) -> str:
        """Start of an index into an operand: its matrix of the batch, where it has several."""
        places = zip(indices(self.p.batch, self.matrix), o.batch, strict=True)
        return "".join(f"{text}, " for text, stride in places if stride)

    def _signature(self, name: str) -> str:
        return f"{name}({', '.join(f'{q.name}: {self._declare(q)}' for q in self.params())})"

    def _declare(self, q: Param) -> str:
        dense = q.stride == _dense(q.shape)
        dtype = self.d.storage(q.dtype)
        return f'T.Tensor({q.shape}, "{dtype}")' if dense else f'T.StridedTensor({q.shape}, {q.stride}, "{dtype}")'

    # ---- the epilogue -----------------------------------------------------------------------------------------

    def _residual(self) -> int | None:
        """The operand, as large as the result, that the producer brings into the staging buffer ahead of time."""
        manual = self.c["schedule"] in ("coop", "pingpong")
        if not manual or len(self.p.outputs) != 1 or not (self.staged[0] and self.bulk[0]):
            return None
        for k, o in enumerate(self.p.operands):
            even = all(s * DTYPE_BYTES[o.dtype] % 16 == 0 for s in (o.stride[0], *o.batch)) and o.stride[-1] == 1
            if o.kind == "full" and o.dtype == self.p.outputs[0].dtype and even:
                return k
        return None

    def _kept(self, o: Operand) -> bool:
        """Row and column vectors are read once per tile, ahead of the MMA."""
        return not self.d.cpu and o.kind in ("row", "column") and o.dtype in FLOATS

    def _element(self, k: int, m: str, n: str, suffix: str) -> str:
        """Text of operand `k` at result element (m, n), in a loop over (i, j) of the tile."""
        o = self.p.operands[k]
        if self._kept(o):
            return f"e{k}_f{suffix}[{'j' if o.kind == 'row' else 'i'}]"
        if k == self.residual:
            return self.d.load(f"y_s{suffix}[i, j]", o.dtype)
        at = {
            "full": f"{m}, {n}", "row": f"{behind(o)}{n}", "column": m, "scalar": str(o.offset),
            "cycle": f"({m}) % {o.period}, {n}", "block": f"({m}) // {o.period}, {n}",
            "cycle_column": f"({m}) % {o.period}", "block_column": f"({m}) // {o.period}",
        }[o.kind]  # fmt: skip
        return self.d.load(f"e{k}[{self._z(o)}{at}]", o.dtype)

    def _started(self, accs: list, m: str, n: str, suffix: str = "") -> tuple:
        """(statements, value texts) of what the epilogue starts from: the operands, the GEMMs with their own biases."""
        p = self.p
        values = {o.value: self._element(k, m, n, suffix) for k, o in enumerate(p.operands)}
        lines = []
        for anchor, bias, acc in zip(p.anchors, p.bias, accs, strict=True):
            values[anchor] = acc
            text = acc if p.alpha == 1.0 else f"{acc} * {self.d.f32(p.alpha)}"
            if bias is not None and p.beta != 0.0:
                text += f" + {values[bias]}" if p.beta == 1.0 else f" + {values[bias]} * {self.d.f32(p.beta)}"
            if text != acc:
                values[anchor] = f"v{anchor}"
                lines.append(f"v{anchor} = let({text})")
        return lines, values

    def _compute(self, output: int, accs: list, m: str, n: str, suffix: str = "") -> tuple:
        """(statements, value text) of one output element."""
        lines, values = self._started(accs, m, n, suffix)
        wanted = self.p.graph.outputs[output]
        body, found = emit(self.p.graph, values, self.d, _needed(self.p, wanted))
        return lines + body, found[wanted]

    def _epilogue(self, suffix: str = "", threads: int = 0) -> list:
        """From accumulators to results. `threads` > 0: hand-written, the store stays in flight until the next tile."""
        p, last = self.p, len(self.p.outputs) - 1
        accs = [f"a{g}{suffix}[i, j]" for g in range(self.gemms)]
        lines = []
        if self.residual is not None:
            lines.append(f"T.mbarrier_wait_parity(arrived[{suffix or 0}], {'s' if suffix else 't'} & 1)")
        for k, o in enumerate(p.outputs):
            body, value = self._compute(k, accs, "row + i", "col + j", suffix)
            into = f"a0{suffix}" if k == last else f"o{k}_f{suffix}"
            value = value if k == last else self.d.store(value, o.dtype)
            if body or value != accs[0]:
                lines += ["for i, j in T.Parallel(BM, BN):", *(f"    {b}" for b in body), f"    {into}[i, j] = {value}"]
            tile = f"y{k}[{self._z(o)}row, col]"
            if not self.staged[k]:
                lines.append(f"T.copy({into}, {tile})")
                continue
            free = threads and self.bulk[k] and self.residual is None
            if free:
                lines += [f"if T.shuffle_elect({threads}):", "    T.tma_store_wait(0)"]
            lines.append(f"T.copy({into}, y_s{suffix})")
            if not self.bulk[k] or not threads:
                lines.append(f"T.copy(y_s{suffix}, {tile})")
                continue
            lines += [
                "T.fence_proxy_async()",
                f"T.tma_copy(y_s{suffix}, y{k}[{self._z(o)}row : row + BM, col : col + BN])",
            ]
            if self.residual is not None:
                lines += [
                    f"if T.shuffle_elect({threads}):",
                    "    T.tma_store_wait(0)",
                    f"    T.mbarrier_arrive(taken[{suffix or 0}])",
                ]
        return lines

    def _preload(self, suffix: str = "") -> list:
        text = {"row": "{0}col : {0}col + BN", "column": "row : row + BM"}
        return [
            f"T.copy(e{k}[{self._z(o)}{text[o.kind].format(behind(o))}], e{k}_f{suffix})"
            for k, o in enumerate(self.p.operands)
            if self._kept(o)
        ]

    def _fragments(self, suffix: str = "") -> list:
        """Allocations of one group of math threads: accumulators, vectors, and the staging buffer of the result."""
        lines = [f'a{g}{suffix} = T.alloc_fragment((BM, BN), "float32")' for g in range(self.gemms)]
        for k, o in enumerate(self.p.operands):
            if self._kept(o):
                lines.append(f'e{k}_f{suffix} = T.alloc_fragment(({"BN" if o.kind == "row" else "BM"},), "float32")')
        for k, o in enumerate(self.p.outputs[:-1]):
            lines.append(f'o{k}_f{suffix} = T.alloc_fragment((BM, BN), "{o.dtype}")')
        if any(self.staged):
            dtype = self.p.outputs[self.staged.index(True)].dtype
            lines.append(f'y_s{suffix} = T.alloc_shared((BM, BN), "{dtype}")')
        return lines

    # ---- the main loop ----------------------------------------------------------------------------------------

    def _tiles(self, stages: str = "") -> list:
        x = "BK, BM" if self.p.x.turned else "BM, BK"
        w = "BN, BK" if self.p.transposed else "BK, BN"
        tiles = [("x", x), *((f"w{g}", w) for g in range(self.gemms))]
        return [f"{name}_s = T.alloc_shared(({stages}{shape}), DTYPE)" for name, shape in tiles]

    def _load(self, step: str = "k") -> list:
        """TileLang takes all tensors to begin at multiples of 16 bytes: of others each element is loaded by itself."""
        x, k = self.p.x, f"{step} * BK"
        w_at = f"{{}}col, {k}" if self.p.transposed else f"{k}, col"
        found = [("x", x, f"{k}, row" if x.turned else f"row, {k}")]
        found += [(f"w{g}", w, w_at.format(behind(w))) for g, w in enumerate(self.p.weights)]
        return [f"T.copy({n}[{self._z(o)}{i}], {n}_s{'' if o.aligned else ', coalesced_width=1'})" for n, o, i in found]

    def _turns(self) -> str:
        """How the operands lie in their tiles."""
        return f"{'transpose_A=True, ' if self.p.x.turned else ''}transpose_B={self.p.transposed}"

    def _mma(self) -> list:
        policy = f"policy=T.GemmWarpPolicy.{self.c['policy']}"
        return [f"T.gemm(x_s, w{g}_s, a{g}, {self._turns()}, {policy})" for g in range(self.gemms)]

    def _load_async(self) -> list:
        rows, steps = "{0}col : {0}col + BN", "k * BK : (k + 1) * BK"
        z = self._z(self.p.x)
        part = f"{steps}, row : row + BM" if self.p.x.turned else f"row : row + BM, {steps}"
        x = f"T.tma_copy(x[{z}{part}], x_s[it % STAGES, :, :], barrier=full[it % STAGES])"
        at = f"{rows}, {steps}" if self.p.transposed else f"{steps}, {rows}"
        last = self.gemms - 1
        return [x] + [
            f"T.tma_copy(w{g}[{self._z(w)}{at.format(behind(w))}], w{g}_s[it % STAGES, :, :], barrier=full[it % STAGES]"
            + (", cluster_mask=3" if self.cluster == 2 else "")
            + (', annotations={"emit_arrive": 1})' if g == last else ")")
            for g, w in enumerate(self.p.weights)
        ]

    def _mma_async(self, suffix: str = "") -> list:
        policy = "" if suffix else f"policy=T.GemmWarpPolicy.{self.c['policy']}, "
        return [
            f"T.wgmma_gemm(x_s[it % STAGES, :, :], w{g}_s[it % STAGES, :, :], a{g}{suffix}, "
            f"{self._turns()}, {policy}clear_accum=(k == 0))"
            for g in range(self.gemms)
        ]

    def _fence(self, suffix: str, warpgroups: int) -> list:
        registers = self.c["BM"] * self.c["BN"] // (128 * warpgroups)
        return [f"T.warpgroup_fence_operand(a{g}{suffix}, num_regs={registers})" for g in range(self.gemms)]

    def _prefetch(self, suffixes: list) -> list:
        """The producer's load of the residual tile, into the staging buffer that the store before last has left."""
        if self.residual is None:
            return []

        def copy(buffer: str, barrier: int) -> str:
            z = self._z(self.p.operands[self.residual])
            tile = f"e{self.residual}[{z}row : row + BM, col : col + BN]"
            return f'T.tma_copy({tile}, y_s{buffer}, barrier=arrived[{barrier}], annotations={{"emit_arrive": 1}})'

        if suffixes == [""]:
            return ["T.mbarrier_wait_parity(taken[0], (t & 1) ^ 1)", copy("", 0)]
        wait = "T.mbarrier_wait_parity(taken[t % 2], ((t // 2) & 1) ^ 1)"
        return [wait, "if t % 2 == 0:", f"    {copy('0', 0)}", "else:", f"    {copy('1', 1)}"]

    def _where(self) -> list:
        """The tile of turn `t`: two blocks of a cluster work side by side on the same columns."""
        if self.p.batch:
            return [
                "tile = t * GRID + block",
                "z = tile // (ROWS * COLUMNS)",
                "bm, bn = place(tile % (ROWS * COLUMNS))",
            ]
        if self.cluster == 1:
            return ["bm, bn = place(t * GRID + block)"]
        return ["pair, bn = place(t * (GRID // 2) + block // 2)", "bm = pair * 2 + block % 2"]

    def _release(self, stage: str) -> list:
        """Give a stage back; in a cluster to both blocks, as the first one loads for both."""
        if self.cluster == 1:
            return [f"T.mbarrier_arrive(empty[{stage}])"]
        return [f"T.mbarrier_arrive(empty[{stage}], {block})" for block in range(2)]

    def _release_last(self) -> list:
        return self._release("(t * STEPS + STEPS - 1) % STAGES")

    def _products(self, suffix: str = "") -> str:
        """A tile's steps along K; a stage is given back while the next one is multiplied."""
        release = self._release("(it + STAGES - 1) % STAGES")
        return schedules.fill(schedules.PRODUCTS, mma=self._mma_async(suffix), release=release)

    # ---- schedules --------------------------------------------------------------------------------------------

    def source(self, name: str) -> str:
        """The whole module text; its kernel is called `name`."""
        body = getattr(self, f"_{self.c['schedule']}")()
        return f"{self.d.header()}\n{self._constants()}\n" + body.replace("@@signature", self._signature(name)) + "\n"

    def _constants(self) -> str:
        p, c = self.p, self.c
        lines = [f"M, N, K = {p.M}, {p.N}, {p.K}", f"BM, BN, BK = {c['BM']}, {c['BN']}, {c['BK']}"]
        if not self.d.cpu:
            rows, columns = -(-p.M // (c["BM"] * self.cluster)), -(-p.N // c["BN"])
            tiles = rows * columns * self.matrices
            group = max(g for g in range(1, c.get("group", 8) + 1) if rows % g == 0)
            lines += [
                f'DTYPE, STAGES, THREADS, GEMMS = "{p.x.dtype}", {c["stages"]}, {c["threads"]}, {self.gemms}',
                f"ROWS, COLUMNS, STEPS, GROUP = {rows}, {columns}, {-(-p.K // c['BK'])}, {group}",
                f"TILES, GRID = {tiles}, {min(tiles * self.cluster, c.get('grid', tiles))}",
            ]
        return "\n".join(lines) + "\n"

    def _loop(self) -> str:
        once = self.c["BK"] >= self.p.K  # a pipelined loop of one trip hangs under warp specialisation
        return "T.serial(1)" if once else "T.Pipelined(T.ceildiv(K, BK), num_stages=STAGES)"

    def _grid(self) -> dict:
        """The batch as a dimension of the launch."""
        return {"extent": f", {self.matrices}", "index": ", z"} if self.p.batch else {"extent": "", "index": ""}

    def _hints(self) -> list:
        ctas = self.c.get("ctas", 1)
        if ctas == 1:
            return []
        lines = [f"T.annotate_min_blocks_per_sm({ctas})"]
        if self.c["schedule"] == "auto":  # the default 24/240 needs more registers than half an SM has, and hangs
            lines += ["T.annotate_producer_reg_dealloc(24)", "T.annotate_consumer_reg_alloc(232)"]
        return lines

    def _auto(self) -> str:
        swizzle = [f"T.use_swizzle({self.c['swizzle']})"] if self.c.get("swizzle") else []
        return schedules.fill(
            schedules.AUTO, **self._grid(),
            allocate=self._tiles() + self._fragments(), hints=swizzle + self._hints(), loop=self._loop(),
            clear=[f"T.clear(a{g})" for g in range(self.gemms)], load=self._load(), mma=self._mma(),
            preload=self._preload(), epilogue=self._epilogue(),
        )  # fmt: skip

    def _roles(self) -> str:
        return schedules.RASTER + schedules.fill(
            schedules.ROLES, where=self._where(),
            allocate=self._tiles() + self._fragments(), hints=self._hints(), loop=self._loop(),
            clear=[f"T.clear(a{g})" for g in range(self.gemms)], load=self._load(), mma=self._mma(),
            preload=self._preload(), epilogue=self._epilogue(),
        )  # fmt: skip

    def _manual(self, suffixes: list, barriers: list, releases: int, consumers: str) -> str:
        fragments = [line for s in suffixes for line in self._fragments(s)]
        if any(self.staged):
            swizzle = ", ".join(f"y_s{s}: make_swizzled_layout(y_s{s})" for s in suffixes)
            fragments.append(f"T.annotate_layout({{{swizzle}}})")
        if self.residual is not None:
            barriers = [
                *barriers,
                *(f"{name} = T.alloc_barrier([1] * {len(suffixes)})" for name in ("arrived", "taken")),
            ]
        pair = self.cluster == 2
        releases *= self.cluster
        head = f"from tilelang.layout import make_swizzled_layout\n\nRELEASES = {releases}  # one per consumer warp\n"
        return head + schedules.RASTER + schedules.fill(
            schedules.MANUAL,
            allocate=self._tiles("STAGES, ") + fragments, barriers=barriers, load=self._load_async(),
            prefetch=self._prefetch(suffixes), consumers=consumers, where=self._where(),
            launch=", cluster_dims=2" if pair else "", leave=["T.cluster_sync()"] if pair else [],
            empty=f"T.alloc_{'cluster_' if pair else ''}barrier([RELEASES] * STAGES)",
            tiles=f"T.ceildiv(TILES - {'block // 2, GRID // 2' if pair else 'block, GRID'})",
        )  # fmt: skip

    def _drain(self, threads: int) -> list:
        """A block must not end while the copy engine still reads its shared memory."""
        if any(s and b for s, b in zip(self.staged, self.bulk, strict=True)) and self.residual is None:
            return [f"if T.shuffle_elect({threads}):", "    T.tma_store_wait(0)"]
        return []

    def _coop(self) -> str:
        consumers = schedules.fill(
            schedules.COOPERATIVE,
            preload=self._preload(), products=self._products(), fence=self._fence("", 2),
            epilogue=self._epilogue("", 256), drain=self._drain(256), where=self._where(),
            release_last=self._release_last(),
        )  # fmt: skip
        return self._manual([""], [], 8, consumers)

    def _pingpong(self) -> str:
        consumers = "\n".join(
            schedules.fill(
                schedules.TAKING_TURNS,
                branch="elif tx < 256:  # even tiles" if w == 0 else "else:  # odd tiles",
                parity="(s & 1) ^ 1" if w == 0 else "s & 1",
                w=str(w), other=str(1 - w), preload=self._preload(str(w)),
                products=self._products(str(w)), fence=self._fence(str(w), 1), epilogue=self._epilogue(str(w), 128),
                drain=self._drain(128), where=self._where(), release_last=self._release_last(),
            )
            for w in range(2)
        )  # fmt: skip
        return self._manual(["0", "1"], ["turn = T.alloc_barrier([4] * 2)"], 4, consumers)

    def pass_configs(self) -> dict:
        extra = {"roles": ROLE_BASED, "pingpong": NO_REUSE}.get(self.c["schedule"], {})
        return {**self.d.pass_configs, **extra}


def behind(o) -> str:
    """Start of the index of an operand that lies behind others in the tensor that is passed."""
    return f"{o.offset} + " if o.offset else ""


def _dense(shape: tuple) -> tuple:
    return (shape[1], 1) if len(shape) == 2 else (1,)


def _needed(p: Problem, value: int) -> tuple:
    """The epilogue ops that `value` is computed from, in order."""
    wanted, todo = set(), [value]
    while todo:
        v = todo.pop()
        if v in p.epilogue and v not in wanted:
            wanted.add(v)
            op = p.graph.op_of(v)
            todo += op.inputs
    return tuple(v for v in p.epilogue if v in wanted)
