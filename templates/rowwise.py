"""Row-wise chains: norms, softmaxes and anything spelled out with reductions over the last dimensions.

One pass per level of reductions. On CUDA a block holds its rows in registers from the first load to the last store;
rows too wide for that are read again in each pass, chunk by chunk. On the CPU each thread walks rows of its own, with
32 partial results side by side, so that the compiler vectorises sums without being allowed to reorder them.
"""

from fusescout.templates.body import signature
from fusescout.templates.dialect import dialect_for
from fusescout.templates.expression import compute_dtype
from fusescout.templates.operators import SAME
from fusescout.templates.operators import Unsupported
from fusescout.templates.rows import Rows
from fusescout.templates.rows import read
from fusescout.templates.rowwise_cpu import CpuRows
from fusescout.templates.rowwise_cuda import CudaRows
from fusescout.templates.source import build
from fusescout.templates.space import Space
from fusescout.templates.space import space_of

from fusescout.device import Device
from fusescout.ir import DTYPE_BYTES
from fusescout.ir import Subgraph
from fusescout.template import Config
from fusescout.template import Kernel

NAME = "rowwise"
FAMILY = "rowwise"

CPU_BUFFER_BYTES = 1 << 20
"""Row buffers live on the stacks of threads."""


def supports(graph: Subgraph, device: Device) -> str | None:
    """None if it is pointwise but for reductions over whole rows, which all agree in shape."""
    try:
        for spec in graph.inputs:
            compute_dtype(spec.dtype)
        rows, _ = _parts(graph)
    except Unsupported as reason:
        return str(reason)
    if device.kind == "cpu" and 4 * rows.columns * max(1, len(crossing(rows))) > CPU_BUFFER_BYTES:
        return f"rows of {rows.columns} elements need too large a buffer per thread"
    return None


def _parts(graph: Subgraph) -> tuple[Rows, Space]:
    rows = read(graph)
    return rows, space_of(rows.graph, rows.shape, rows.depth)


def _is_input(graph: Subgraph, value: int) -> bool:
    """Whether a value is an input, perhaps in another dtype: cheaper to read again than to keep."""
    op = graph.op_of(value)
    return op is None or (op.name in SAME and _is_input(graph, op.inputs[0]))


def crossing(rows: Rows) -> list:
    """Computed full-row values that a later pass needs again."""
    first = len(rows.graph.inputs)
    found = []
    for value in range(first, first + len(rows.graph.ops)):
        if _is_input(rows.graph, value):
            continue
        users = [u for u in rows.graph.users(value) if u not in rows.reductions]
        if value not in rows.row_values and any(rows.levels[u] > rows.levels[value] for u in users):
            found.append(value)
    return found


def configs(graph: Subgraph, device: Device) -> list[Config]:
    """Threads and rows per block, best guess first."""
    rows, space = _parts(graph)
    if device.kind == "cpu":
        return [{"block": b} for b in (16384, 65536, 4096)]
    narrow = min(DTYPE_BYTES[o.dtype] for o in space.operands if not space.per_row(o))
    vector = max(2, 16 // max(narrow, 2))
    tiles = 1 + len(crossing(rows)) + sum(not space.per_row(o) for o in space.inputs) / 2
    found = []
    for threads in (32, 64, 128, 256, 512, 1024):
        width = -(-rows.columns // (threads * vector)) * threads * vector
        registers = width / threads * tiles
        if registers <= min(200, 65536 / threads - 32):
            waste = width / rows.columns
            found.append(
                (waste * (1 + abs(width / threads - 16) / 64), {"threads": threads, "width": width, "rows": 1})
            )
    if rows.columns * 2 <= 32 * vector:
        width = 1 << (rows.columns - 1).bit_length()
        width = max(width, vector)
        found += [(0.5, {"threads": t, "width": width, "rows": t * vector // width}) for t in (128, 256)]
    chosen = [c for _, c in sorted(found, key=lambda f: f[0])]
    if rows.columns > 8192 or not chosen:
        chosen += [
            {"threads": t, "width": t * vector * k, "rows": 1} for t, k in ((512, 1), (1024, 1), (256, 2), (512, 2))
        ]
    return chosen


def kernel(graph: Subgraph, config: Config, device: Device) -> Kernel:
    """The chain as one kernel."""
    rows, space = _parts(graph)
    dialect = dialect_for(device.kind, tuple(s.dtype for s in graph.output_specs))
    name = f"fs_rowwise_{graph.key[:10]}"
    writer = (CpuRows if dialect.cpu else CudaRows)(rows, space, crossing(rows), dialect, config)
    text = dialect.header() + signature(name, space.operands, dialect) + writer.body()
    return Kernel(build(text, name), tuple(o.param for o in space.operands), text, dialect.pass_configs)
