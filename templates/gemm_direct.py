"""What kernels for few results share: each element is finished by one thread from sums in shared memory, and stored."""

from fusescout.templates.dialect import Dialect
from fusescout.templates.expression import emit
from fusescout.templates.gemm_problem import Operand
from fusescout.templates.gemm_problem import Problem
from fusescout.templates.gemm_source import Writer


class Direct(Writer):
    """A writer without tiles of results: operands are read where they lie."""

    def __init__(self, problem: Problem, config: dict, dialect: Dialect) -> None:
        super().__init__(problem, config, dialect)
        self.staged = [False] * len(problem.outputs)

    def _kept(self, o: Operand) -> bool:
        return False

    def _results(self, sums: list, m: str, n: str) -> list:
        """Statements from the sums of element (m, n), one text a product, to its stored results."""
        lines = [f"sum{g} = let({text})" for g, text in enumerate(sums)]
        start, values = self._started([f"sum{g}" for g in range(self.gemms)], m, n)
        body, found = emit(self.p.graph, values, self.d, self.p.epilogue)
        stores = [
            f"y{k}[{self._z(o)}{m}, {n}] = {self.d.store(found[self.p.graph.outputs[k]], o.dtype)}"
            for k, o in enumerate(self.p.outputs)
        ]
        return [*lines, *start, *body, *stores]
