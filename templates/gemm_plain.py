"""The CPU's GEMM: a scalar loop over rows, which is there to prove epilogues and layouts without a GPU."""

from fusescout.templates import gemm_schedules as schedules
from fusescout.templates.gemm_source import Writer
from fusescout.templates.gemm_source import behind


class Plain(Writer):
    """Writes the schedule "plain"."""

    def _plain(self) -> str:
        p, dtype = self.p, self.p.x.dtype
        width = "T.min(BN, N - bn * BN)"
        at = "k, bm * BM + i" if p.x.turned else "bm * BM + i, k"
        row, x = [], self.d.load(f"x[{self._z(p.x)}{at}]", dtype)
        for g, w in enumerate(p.weights):
            at = f"{behind(w)}bn * BN + j, k" if p.transposed else "k, bn * BN + j"
            row += [
                f"for j in T.serial({width}):", f"    a{g}[j] = T.float32(0)",
                "for k in T.serial(K):", f"    for j in T.serial({width}):",
                f"        a{g}[j] = a{g}[j] + {x} * {self.d.load(f'w{g}[{self._z(w)}{at}]', dtype)}",
            ]  # fmt: skip
        row.append(f"for j in T.serial({width}):")
        for k, o in enumerate(p.outputs):
            body, value = self._compute(k, [f"a{g}[j]" for g in range(self.gemms)], "bm * BM + i", "bn * BN + j")
            place = f"{self._z(o)}bm * BM + i, bn * BN + j"
            row += [*(f"    {b}" for b in body), f"    y{k}[{place}] = {self.d.store(value, o.dtype)}"]
        allocate = [f'a{g} = T.alloc_local((BN,), "float32")' for g in range(self.gemms)]
        return schedules.fill(schedules.PLAIN, allocate=allocate, row=row, **self._grid())
