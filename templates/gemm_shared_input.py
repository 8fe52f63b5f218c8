"""Several matrix products of one input with parameters, such as q, k and v, as one GEMM.

The weights lie side by side in one prepared matrix, each from a multiple of the tile's width on: a tile belongs to one
result, and is written to where that result lies. All schedules are those of `gemm_epilogue`.
"""

import re

from fusescout.templates import gemm_problem
from fusescout.templates.dialect import dialect_for
from fusescout.templates.gemm_configs import clocks
from fusescout.templates.gemm_configs import space
from fusescout.templates.gemm_epilogue import WRITERS
from fusescout.templates.gemm_epilogue import refusal
from fusescout.templates.gemm_small import BULK_BYTES
from fusescout.templates.gemm_source import Writer
from fusescout.templates.source import build

from fusescout import constants
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.shared_input import Shared
from fusescout.shared_input import packed
from fusescout.shared_input import read
from fusescout.template import Kernel
from fusescout.template import Param

NAME = "gemm_shared_input"
FAMILY = "gemm_shared_input"
BY_ELEMENT = ("plain", "vector")
SCHEDULES = (*BY_ELEMENT, "auto", "coop", "pingpong", "split")
"""Those that may branch where they write: TileLang finds no roles in a kernel that branches, so "roles" is not one."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if the kernel covers all of `graph`, else a sentence why not."""
    shared = read(graph)
    if isinstance(shared, str):
        return shared
    if device.kind == "cuda" and any(n * 2 % BULK_BYTES for n in shared.columns):
        return "A result's rows don't start at multiples of 16 bytes, so the copy engine can't write it."
    return refusal(_product(_steady(graph, shared, 1)), device, 1, every=True)


def configs(graph: Subgraph, device: Device) -> list:
    """The space of the one product, ordered by what the gaps between the weights cost as well."""
    shared = read(graph)
    every = space(_problem(graph, shared, 1), device)
    found = [c for c in every if c["schedule"] in SCHEDULES and c.get("join") != "memory"]
    if device.kind == "cpu":
        return found
    widths = {width: _problem(graph, shared, width) for width in {c["BN"] for c in found}}
    return sorted(found, key=lambda c: clocks(widths[c["BN"]], c, device))


def prepared(graph: Subgraph, config: dict) -> constants.Split | None:
    """The weights and biases side by side; None if a weight is no parameter."""
    shared = read(graph)
    return None if isinstance(shared, str) else constants.split(packed(graph, shared, _tile(config)))


def kernel(graph: Subgraph, config: dict, device: Device) -> Kernel:
    """The kernel of a config, from the steady part: one `linear` and the column ranges of its result."""
    product = _product(graph)
    columns = [(op.args[2], op.args[3]) for op in graph.ops if op.name == "slice"]
    dialect = dialect_for(device.kind, (product.output_specs[0].dtype,))
    writer = _writer(config)(gemm_problem.read(product, turned=True), config, dialect)
    writer.ranges = tuple(columns)
    source = writer.source(NAME)
    return Kernel(build(source, NAME), writer.params(), source, writer.pass_configs())


def _tile(config: dict) -> int:
    """A tile that is written element by element may begin anywhere."""
    return 1 if config["schedule"] in BY_ELEMENT else config["BN"]


def _steady(graph: Subgraph, shared: Shared, tile: int) -> Subgraph:
    split = constants.split(packed(graph, shared, tile))
    assert split is not None, "there are weights to put side by side"
    return split.steady


def _problem(graph: Subgraph, shared: Shared, tile: int) -> gemm_problem.Problem:
    return gemm_problem.read(_product(_steady(graph, shared, tile)), turned=True)


def _product(steady: Subgraph) -> Subgraph:
    """The one product alone."""
    assert steady.ops[0].name == "linear"
    return Subgraph(steady.inputs, steady.ops[:1], (len(steady.inputs),))


def _writer(config: dict) -> type:
    """The writer of the config's schedule, with results that lie apart."""
    return type("Parted", (_Parted, WRITERS.get(config["schedule"], Writer)), {})


class _Parted(Writer):
    """Writes each result where it lies; `ranges` are its first and last column in the one product."""

    ranges: tuple

    def params(self) -> tuple:
        given, m = [q for q in super().params() if q.role != "output"], self.p.M
        dtype = self.p.outputs[0].dtype
        widths = [end - start for start, end in self.ranges]
        return (*given, *(Param(f"y{k}", "output", k, (m, n), (n, 1), dtype) for k, n in enumerate(widths)))

    def source(self, name: str) -> str:
        return "\n".join(part for line in super().source(name).splitlines() for part in self._parted(line)) + "\n"

    def _parted(self, line: str) -> list:
        """A statement that writes to the one result, once for each result that its columns may belong to."""
        place = re.search(r"\by0\[(.*?)\]", line)
        if place is None:
            return [line]
        indent = line[: len(line) - len(line.lstrip())]
        column = "bn * BN + j" if self.c["schedule"] in BY_ELEMENT else "col"
        lines = []
        for k, (start, end) in enumerate(self.ranges):
            test = f"{'if' if k == 0 else 'elif'} {column} < {end}:" if k < len(self.ranges) - 1 else "else:"
            own = re.sub(rf"(?<!\w){re.escape(column)}(?!\w)", f"{column} - {start}", place[1]) if start else place[1]
            lines += [indent + test, f"{indent}    {line.strip().replace(place[0], f'y{k}[{own}]')}"]
        return lines
