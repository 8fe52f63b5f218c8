"""Ways to run attention, as TileLang source text, filled in by `attention_source.py` (as `gemm_schedules.py`).

STREAM leaves loads and their order to TileLang. AHEAD is written by hand: while a tile's weights multiply their values,
the next tile's scores become weights. WHOLE is for rows whose keys fit one tile, SERIAL for the CPU.
"""

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

AHEAD = """
@T.prim_func
def @@signature:
    with T.Kernel(ROW_BLOCKS * MATRICES, threads=THREADS + 128, prelude=PRELUDE) as block:
        tx = T.get_thread_binding()
        z = block // ROW_BLOCKS
        @@allocate
        q_full = T.alloc_barrier([1])
        k_full = T.alloc_barrier([1] * STAGES)
        v_full = T.alloc_barrier([1] * STAGES)
        k_empty = T.alloc_barrier([THREADS // 32] * STAGES)
        v_empty = T.alloc_barrier([THREADS // 32] * STAGES)
        row = @@row
        steps = @@steps
        if tx < 128:  # the producer: one thread of one warp issues all loads
            T.set_max_nreg(@@few, 0)
            if tx < 32:
                T.tma_copy(@@q, q_s, barrier=q_full[0], annotations={"emit_arrive": 1})
                for t in T.serial(steps):
                    T.mbarrier_wait_parity(k_empty[t % STAGES], ((t // STAGES) & 1) ^ 1)
                    @@load
                    T.mbarrier_wait_parity(v_empty[t % STAGES], ((t // STAGES) & 1) ^ 1)
                    T.tma_copy(@@v, v_s[t % STAGES, :, :], barrier=v_full[t % STAGES], annotations={"emit_arrive": 1})
        else:
            T.set_max_nreg(@@many, 1)
            T.clear(o)
            T.mbarrier_wait_parity(q_full[0], 0)
            T.mbarrier_wait_parity(k_full[0], 0)
            T.wgmma_gemm(q_s, k_s[0, :, :], s, @@scored)
            T.wait_wgmma(0)
            @@fence_s
            @@first
            if T.shuffle_elect(32):
                T.mbarrier_arrive(k_empty[0])
            T.reduce_max(s, top, dim=1)
            for i in T.Parallel(BM):
                base[i] = where(top[i] == LOWEST, ZERO, top[i])
            for i, j in T.Parallel(BM, BN):
                s[i, j] = @@weight
            T.reduce_sum(s, total, dim=1)
            T.copy(s, p)
            for t in T.serial(MOST_STEPS - 1):  # of `steps - 1` known to be 0 or 1 TileLang makes 1, and drops the test
                n = t + 1
                if n < steps:
                    T.mbarrier_wait_parity(k_full[n % STAGES], (n // STAGES) & 1)
                    T.wgmma_gemm(q_s, k_s[n % STAGES, :, :], s, @@scored)
                    T.mbarrier_wait_parity(v_full[t % STAGES], (t // STAGES) & 1)
                    T.wgmma_gemm(p, v_s[t % STAGES, :, :], o, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(1)
                    @@fence_s
                    col = n * BN
                    @@scores
                    if T.shuffle_elect(32):
                        T.mbarrier_arrive(k_empty[n % STAGES])
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
                    T.wait_wgmma(0)
                    @@fence_o
                    if T.shuffle_elect(32):
                        T.mbarrier_arrive(v_empty[t % STAGES])
                    T.copy(s, p)
                    for i, j in T.Parallel(BM, DV):
                        o[i, j] = o[i, j] * shrink[i]
            last = steps - 1
            T.mbarrier_wait_parity(v_full[last % STAGES], (last // STAGES) & 1)
            T.wgmma_gemm(p, v_s[last % STAGES, :, :], o, policy=T.GemmWarpPolicy.FullRow)
            T.wait_wgmma(0)
            @@fence_o
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
