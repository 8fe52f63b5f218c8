"""Operands as large as the result that the copy engine can't bring: read into registers ahead of the product.

Without that each is waited for when the sums are done, and read two bytes at a time between the epilogue's operators.
"""

import math

from fusescout.templates.dialect import HALF
from fusescout.templates.dialect import Dialect
from fusescout.templates.gemm_configs import MANY
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_source import Writer

REGISTERS = 200
"""Of sums and what is held of a thread; 240 is what it may have in all."""


def ahead(p: Problem, config: dict) -> dict:
    """The config, with such operands held in registers where that fits."""
    if config["schedule"] not in ("coop", "pingpong") or p.M * math.prod(p.batch) < MANY:
        return config
    count = len(_held(Writer(p, config, Dialect("cuda"))))
    threads = 128 if config["schedule"] == "pingpong" else 256
    sums = len(p.weights) * (1 + p.promoted)
    registers = config["BM"] * config["BN"] * (sums + (count + len(p.outputs) - 1) / 2) / threads
    return {**config, "residual": "registers"} if count and registers <= REGISTERS else config


def holding(base: type) -> type:
    """A writer that reads these operands ahead, else does as `base`."""
    return type("Holding", (_Holding, base), {})


def _held(writer: Writer) -> list:
    return [
        k
        for k, o in enumerate(writer.p.operands)
        if o.kind == "full" and o.dtype in HALF and o.stride[-1] == 1 and k != writer.residual
    ]


class _Holding(Writer):
    """Each has a fragment like that of the sums."""

    def _element(self, k: int, m: str, n: str, suffix: str) -> str:
        if k not in _held(self):
            return super()._element(k, m, n, suffix)
        return self.d.load(f"e{k}_f{suffix}[i, j]", self.p.operands[k].dtype)

    def _preload(self, suffix: str = "") -> list:
        operands = self.p.operands
        held = [f"T.copy(e{k}[{self._z(operands[k])}row, col], e{k}_f{suffix})" for k in _held(self)]
        return super()._preload(suffix) + held

    def _fragments(self, suffix: str = "") -> list:
        operands = self.p.operands
        held = [f'e{k}_f{suffix} = T.alloc_fragment((BM, BN), "{operands[k].dtype}")' for k in _held(self)]
        return super()._fragments(suffix) + held
