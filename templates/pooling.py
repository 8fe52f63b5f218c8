"""Pooling with any windows, overlapping, padded or not filling up, and the pointwise operators in front and behind.

One step for each element of the result: over the places of its window the chain in front is computed and taken
together, then the chain behind. Where windows overlap, the chain in front is computed again rather than stored.
"""

from functools import reduce

from fusescout.templates.body import buffer_dtype
from fusescout.templates.body import flat
from fusescout.templates.body import indent
from fusescout.templates.body import loaded
from fusescout.templates.body import signature
from fusescout.templates.body import stored
from fusescout.templates.dialect import Dialect
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import emit
from fusescout.templates.operators import Unsupported
from fusescout.templates.source import build
from fusescout.templates.space import Operand
from fusescout.templates.windows import Pooling
from fusescout.templates.windows import computed
from fusescout.templates.windows import read

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES
from fusescout.ir import Subgraph
from fusescout.template import Config
from fusescout.template import Kernel

NAME = "pooling"
FAMILY = "pooling"


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if it is one pooling operator between pointwise ones."""
    try:
        read(graph)
    except Unsupported as reason:
        return str(reason)
    return None


def configs(graph: Subgraph, device: Device) -> list[Config]:
    """Block sizes, best guess first."""
    problem = read(graph)
    if device.kind == "cpu":
        return [{"block": b} for b in (4096, 1024, 16384)]
    natural = max(2, 16 // max(DTYPE_BYTES[o.dtype] for o in problem.outputs))
    sizes = ((256, 1), (256, natural), (128, 2), (512, 1), (128, natural), (256, 2), (128, 1))
    if any(problem.is_side_by_side(o) for o in problem.inputs):
        sizes = ((256, natural), (128, natural), (256, 2), (512, natural), (256, 1), (128, 2), (512, 2))
    found = [{"threads": t, "items": i} for t, i in dict.fromkeys(sizes)]
    return sorted(found, key=lambda c: problem.numel < c["threads"] * c["items"] * device.cores)


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """The chain as one kernel."""
    dialect = dialect_for(device.kind, tuple(s.dtype for s in graph.output_specs))
    problem = read(graph)
    name = f"fs_pooling_{graph.key[:10]}"
    body = _cpu(problem, config, dialect) if dialect.cpu else _cuda(problem, config, dialect)
    text = dialect.header() + signature(name, problem.parameters, dialect) + body
    return Kernel(build(text, name), tuple(o.param for o in problem.parameters), text, dialect.pass_configs)


def _cpu(problem: Pooling, config: Config, dialect: Dialect) -> str:
    """Blocks of elements over threads."""
    block, numel = config["block"], problem.numel
    extent = str(block) if numel % block == 0 else f"T.min({block}, {numel} - bx * {block})"
    element = _Element(problem, dialect, f"bx * {block} + i", "a[0]", {})
    lines = [
        f"with {dialect.kernel(-(-numel // block))} as bx:",
        f"    a = {dialect.tile((1,))}",
        f"    for i in T.serial({extent}):",
        f"        {element.start}",
        f"        for k in T.serial({problem.window.count}):",
        *("            " + line for line in element.step()),
        *("        " + line for line in element.end()),
    ]
    return indent(lines, 1)


def _cuda(problem: Pooling, config: Config, dialect: Dialect) -> str:
    """Blocks of elements; the last threads of the last block repeat the last element.

    What lies side by side in memory for neighbouring elements goes through registers, in vectors.
    """
    block = config["threads"] * config["items"]
    full, rest = divmod(problem.numel, block)
    loop = f"for j in {dialect.parallel(block)}:"
    held = {o.name: f"{o.name}_r[j]" for o in problem.operands if problem.is_side_by_side(o)}

    def each(lines: list) -> list:
        return [loop, *("    " + line for line in lines)]

    def part(position: str) -> list:
        element = _Element(problem, dialect, position, "a[j]", held)
        lines = each([element.start])
        lines += [f"for k in T.serial({problem.window.count}):"]
        for o in problem.inputs:
            if o.name in held:
                lines += ["    " + line for line in each([*element.where, f"{held[o.name]} = {element.at(o)}"])]
        lines += ["    " + line for line in each(element.step())]
        for o in problem.here:
            if o.name in held:
                lines += each([*element.here, f"{held[o.name]} = {element.at(o)}"])
        lines += each(element.end())
        for o in problem.outputs:
            if o.name in held:
                lines += each([*element.here, f"{element.at(o)} = {held[o.name]}"])
        return lines

    head = [f"with {dialect.kernel(full + (rest > 0), threads=config['threads'])} as bx:"]
    made = [f"a = {dialect.tile((block,))}"]
    made += [
        f"{o.name}_r = {dialect.tile((block,), buffer_dtype(o, dialect))}" for o in problem.operands if o.name in held
    ]
    text = indent(head, 1) + indent([*flat(problem.parameters, dialect), *made], 2)
    main, last = part(f"bx * {block} + j"), part(f"T.min(bx * {block} + j, {problem.numel - 1})")
    if not rest or not full:
        return text + indent(main if full else last, 2)
    return text + indent([f"if bx < {full}:"], 2) + indent(main, 3) + indent(["else:"], 2) + indent(last, 3)


class _Element:
    """Writes what is done for the element of the result at `position`.

    Attributes:
        start: what is done in front of the window.
        where: lines that name places, in the result and, at step `k` of the window, in the source.
        here: those of them in the result.
    """

    def __init__(self, problem: Pooling, dialect: Dialect, position: str, total: str, held: dict) -> None:
        self.problem, self.dialect, self.position, self.total, self.held = problem, dialect, position, total, held
        self.where, self.named, self.inside = _places(problem, position)
        self.here = [line for line in self.where if line.startswith("c")]
        self.nothing = dialect.f32(0.0 if problem.window.average else float("-inf"))
        self.start = f"{total} = {self.nothing}"

    def at(self, o: Operand) -> str:
        """The element of an operand in memory."""
        if o not in self.problem.inputs and o.strides == self.problem.outputs[0].strides:
            return f"{o.buffer}[{self.position}]"
        named = self.named if o in self.problem.inputs else {d: f"c{d}" for d in range(len(o.strides))}
        return f"{o.buffer}[{' + '.join(f'{named[d]} * {s}' for d, s in enumerate(o.strides) if s) or '0'}]"

    def _chain(self, operands: tuple, values: tuple, known: dict) -> tuple:
        """Lines that load `operands` and compute `values`, and all texts."""
        lines = [f"{o.name} = {loaded(self.held.get(o.name) or self.at(o), o, self.dialect)}" for o in operands]
        known = known | {o.index: o.name for o in operands}
        more, texts = emit(self.problem.graph, known, self.dialect, computed(self.problem.graph, values))
        return [*lines, *more], texts

    def step(self) -> list:
        """Lines of one place of the window."""
        lines, values = self._chain(self.problem.inputs, self.problem.front, {})
        value = values[self.problem.source]
        if self.inside:
            value = f"where({reduce('T.And({}, {})'.format, self.inside)}, {value}, {self.nothing})"
        both = f"{self.total} + {value}" if self.problem.window.average else f"maximum({self.total}, {value})"
        return [*self.where, *lines, f"{self.total} = {both}"]

    def end(self) -> list:
        """Lines behind the window."""
        problem = self.problem
        pooled, name = _mean(problem, self.total, self.dialect), f"v{problem.value}"
        lines, values = self._chain(problem.here, problem.behind, {problem.value: name})
        lines = [*self.here, f"{name} = let({pooled if problem.window.average else self.total})", *lines]
        for o, v in zip(problem.outputs, problem.graph.outputs, strict=True):
            lines.append(f"{self.held.get(o.name) or self.at(o)} = {stored(values[v], o, self.dialect)}")
        return lines


def _places(problem: Pooling, position: str) -> tuple:
    """Lines that name places: `c` in the result and `y` in the source; the names of these; tests whether they exist."""
    shape, source = problem.shape, problem.graph.tensor(problem.source).shape
    window, lead = problem.window, len(shape) - len(problem.window.size)
    lines, inner = [], 1
    for k, d in reversed(list(enumerate(problem.order))):
        text = f"({position})" if inner == 1 else f"({position}) // {inner}"
        lines.append(f"c{d} = {text if k == 0 else f'{text} % {shape[d]}'}")
        inner *= shape[d]
    named, inside, inner = {d: f"c{d}" for d in range(lead)}, [], window.count
    for d, size in enumerate(window.size):
        inner //= size
        place = f"c{lead + d} * {window.stride[d]} + k // {inner} % {size} * {window.dilation[d]} - {window.padding[d]}"
        if window.sticks_out(source[lead:], shape[lead:], d):
            inside += [f"y{d} >= 0", f"y{d} < {source[lead + d]}"]
            lines += [f"y{d} = {place}", f"z{d} = T.max(0, T.min(y{d}, {source[lead + d] - 1}))"]
        else:
            lines.append(f"z{d} = {place}")
        named[lead + d] = f"z{d}"
    return lines, named, inside


def _mean(problem: Pooling, total: str, dialect: Dialect) -> str:
    """The sum over the number of elements that count: padding too, if told so, but nothing behind it."""
    window, shape, source = problem.window, problem.shape, problem.graph.tensor(problem.source).shape
    if window.divisor:
        return f"div({total}, {dialect.f32(window.divisor)})"
    lead, fixed, counts = len(shape) - len(window.size), 1, []
    for d, size in enumerate(window.size):
        padding = window.padding[d] if window.counts_padding else 0
        end, start = source[lead + d] + padding, f"c{lead + d} * {window.stride[d]} - {window.padding[d]}"
        reaches = (shape[lead + d] - 1) * window.stride[d] - window.padding[d] + size
        if reaches <= end and padding == window.padding[d]:
            fixed *= size
        else:
            counts.append(f"(T.min({start} + {size}, {end}) - T.max({start}, {-padding}))")
    if not counts:
        return f"div({total}, {dialect.f32(fixed)})"
    return f'div({total}, T.cast({" * ".join([*counts, str(fixed)])}, "float32"))'
