"""Ways to run a GEMM with an epilogue, as TileLang source text: sizes are module constants, so the text stays readable.

A line `@@name` stands for a block that depends on the problem: operand loads, the MMA, the epilogue. The hand-written
schedules keep these rules, learnt from the generated code: roles are one if/elif chain on the thread index; a stage is
released only after `wait_wgmma`; a waiter is never more than one phase ahead of its barrier, because a parity wait two
phases ahead falls through (two warpgroups that take turns need a barrier for the turn); no loop may have no trip,
because TileLang 0.1.15 makes a loop of none or one trip its bare body (a second warpgroup without a tile then waits for
one for ever), so such a body has a condition of its own.
"""

RASTER = """
def place(t):  # tile number -> (row block, column block): panels of GROUP row blocks share their weight columns in L2
    if GROUP == 1:
        return t % ROWS, t // ROWS
    return (t // (GROUP * COLUMNS)) * GROUP + t % GROUP, (t % (GROUP * COLUMNS)) // GROUP

"""

PLAIN = """
@T.prim_func
def @@signature:
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM)@@extent) as (bn, bm@@index):
        @@allocate
        for i in T.serial(T.min(BM, M - bm * BM)):
            @@row
"""

AUTO = """
@T.prim_func
def @@signature:
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM)@@extent, threads=THREADS, prelude=PRELUDE) as (bn, bm@@index):
        @@allocate
        @@hints
        row, col = bm * BM, bn * BN
        @@clear
        for k in @@loop:
            @@load
            @@mma
        @@preload
        @@epilogue
"""

ROLES = """
@T.prim_func
def @@signature:
    with T.Kernel(GRID, threads=THREADS, prelude=PRELUDE) as block:
        @@allocate
        @@hints
        for t in T.serial(T.ceildiv(TILES - block, GRID)):
            @@where
            row, col = bm * BM, bn * BN
            @@clear
            for k in @@loop:
                @@load
                @@mma
            @@preload
            @@epilogue
"""

MANUAL = """
@T.prim_func
def @@signature:
    with T.Kernel(GRID, threads=384, prelude=PRELUDE@@launch) as block:
        tx = T.get_thread_binding()
        @@allocate
        full = T.alloc_barrier([1] * STAGES)
        empty = @@empty
        @@barriers
        tiles = @@tiles
        if tx < 128:  # the producer: one thread of one warp issues all loads
            T.set_max_nreg(24, 0)
            if tx < 32:
                for t in T.serial(tiles):
                    @@where
                    row, col = bm * BM, bn * BN
                    for k in T.serial(STEPS):
                        it = t * STEPS + k
                        T.mbarrier_wait_parity(empty[it % STAGES], ((it // STAGES) & 1) ^ 1)
                        @@load
                    @@prefetch
        @@consumers
        @@leave
"""

PRODUCTS = """
for k in T.serial(STEPS):
    it = t * STEPS + k
    T.mbarrier_wait_parity(full[it % STAGES], (it // STAGES) & 1)
    @@mma
    T.wait_wgmma(GEMMS)
    if k > 0:
        if T.shuffle_elect(32):
            @@release
"""

COOPERATIVE = """
else:  # both consumer warpgroups work on one tile
    T.set_max_nreg(240, 1)
    for t in T.serial(tiles):
        @@where
        row, col = bm * BM, bn * BN
        @@preload
        @@products
        T.wait_wgmma(0)
        @@fence
        if T.shuffle_elect(32):
            @@release_last
        @@epilogue
    @@drain
"""

TAKING_TURNS = """
@@branch
    T.set_max_nreg(240, 1)
    for s in T.serial((tiles + 1) // 2):
        t = s * 2 + @@w
        if t < tiles:
            @@where
            row, col = bm * BM, bn * BN
            @@preload
            T.mbarrier_wait_parity(turn[@@w], @@parity)
            @@products
            if T.shuffle_elect(32):
                T.mbarrier_arrive(turn[@@other])
            T.wait_wgmma(0)
            @@fence
            if T.shuffle_elect(32):
                @@release_last
            @@epilogue
    @@drain
"""


def fill(text, **blocks):
    """Replace each `@@name`: alone on a line by a block with that line's indentation, inside a line by its text."""
    lines = []
    for line in text.strip("\n").splitlines():
        bare = line.strip()
        if bare.startswith("@@") and bare[2:] in blocks:
            indent = line[: len(line) - len(line.lstrip())]
            block = blocks[bare[2:]]
            block = block.splitlines() if isinstance(block, str) else block
            lines += [indent + part if part else "" for part in block]
            continue
        for name, block in blocks.items():
            if f"@@{name}" in line:
                line = line.replace(f"@@{name}", block)
        lines.append(line)
    return "\n".join(lines)
