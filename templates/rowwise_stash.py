"""Walks whose rows stay in shared memory between passes, on CUDA.

All of a row is asked for at once by copies that run beside the computation and need no registers; each pass then takes
it chunk by chunk, the first one as it arrives. What shared memory has no room for is held in registers. A block reads
its row from memory once, and the blocks of a multiprocessor have nearly all of that memory's size under way.
"""

from fusescout.templates.body import buffer_dtype
from fusescout.templates.dialect import Dialect
from fusescout.templates.rows import Rows
from fusescout.templates.rowwise_spans import Slant
from fusescout.templates.rowwise_spans import Span
from fusescout.templates.rowwise_strips import Strips

from fusescout.ir import DTYPE_BYTES

FETCH = '''
PRELUDE += r"""
FS void fs_fetch(void* to, const void* from, int bytes) {
  if (bytes > 0 && bytes < 16) {  // the copy would read all 16 for it, beyond the tensor's end
    for (int k = 0; k < 8; ++k) ((short*)to)[k] = 2 * k < bytes ? ((const short*)from)[k] : (short)0;
    return;
  }
  unsigned place = (unsigned)__cvta_generic_to_shared(to);
  bytes = bytes > 0 ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(place), "l"(from), "r"(bytes) : "memory");
}
FS void fs_fetched() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int later> FS void fs_arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(later) : "memory"); }
"""


def fetch(to, source, nbytes):
    return T.call_extern("handle", "fs_fetch", T.address_of(to), T.address_of(source), nbytes)
'''
VECTOR_BYTES = 16
SHARED_BYTES, BLOCK_BYTES, THREAD_BYTES = 228 << 10, 1 << 10, 4
"""Shared memory of a multiprocessor; what a block takes for itself, and for each thread where its reductions meet."""


def room(threads: int, blocks: int, chunk_bytes: int) -> int:
    """Chunks that each block can keep if so many share a multiprocessor."""
    return (SHARED_BYTES // blocks - BLOCK_BYTES - threads * THREAD_BYTES) // chunk_bytes


def fetch_header(config: dict, dialect: Dialect) -> str:
    return FETCH if config.get("stash") and not dialect.cpu else ""


def can_stash(rows: Rows, width: int) -> bool:
    """Whether all that a row reads element by element is one tensor's vectors of 16 bytes."""
    space = rows.space
    wide = [o for o in space.inputs if not space.per_row(o)]
    if len(wide) != 1:
        return False
    slant = Slant(space, rows.columns, "0")
    whole = rows.columns % slant.vector == 0 or slant.fits(width)
    return wide[0].name in slant.operands and slant.vector * DTYPE_BYTES[wide[0].dtype] == VECTOR_BYTES and whole


class Stash(Strips):
    """The first `stash` chunks of a row are kept in shared memory, the rest in registers."""

    @property
    def _stashed(self) -> bool:
        return self.chunk < self.config["stash"]

    def _staged(self, o) -> str:
        return f"{o.name}_r" if self._stashed else super()._staged(o)

    def _kept(self, element: str, level: int) -> str:
        return element if self._stashed else super()._kept(element, level)

    def _input_tiles(self) -> list:
        return list(dict.fromkeys(super()._input_tiles()))

    def _tiles(self) -> list:
        count = min(self.config["stash"], self.chunks) * self.width
        stages = [(o, self.dialect.stage((count,), buffer_dtype(o, self.dialect))) for o in self.full_inputs()]
        return [*super()._tiles(), *(f"{o.name}_s = {stage}" for o, stage in stages)]

    def _load(self, o, span: Span) -> list:
        if not self._stashed:
            return super()._load(o, span)
        start = self.chunk * self.width
        if self.dialect.cpu:
            return [self.loop, f"    {o.name}_s[{start} + {self.spot}] = {self._global(o, span)}"]
        strip = self.config["strip"]
        spot = f"({start} + p * {strip})"
        first = self._span(spot, self.chunk == 0, self.chunk == self.chunks - 1)
        nbytes = self._left_bytes(o, first) if self._there(o, first) else VECTOR_BYTES
        place = f"{o.name}_s[{start} + p * {strip}]"
        return [self.lane, f"    fetch({place}, {self._element(o, first)}, {nbytes})", self._call("fetched")]

    def _left_bytes(self, o, first: Span) -> str:
        """Of the row, from a vector's first element; the last row's last vector may reach beyond the tensor."""
        return f"({self.columns} - {first.column}) * {DTYPE_BYTES[o.dtype]}"

    def _bring(self, level: int) -> list:
        if not self._stashed:
            return []
        lines = []
        if level == 0 and not self.dialect.cpu:
            later = min(self.config["stash"], self.chunks) - 1 - self.chunk
            lines += [self._call(f"arrived<{later}>"), "T.sync_threads()"]
        start = self.chunk * self.width
        for o in self.full_inputs():
            lines += [self.loop, f"    {o.name}_r[{self.place}] = {o.name}_s[{start} + {self.spot}]"]
        return lines

    def _call(self, name: str) -> str:
        return f'T.call_extern("handle", "fs_{name}")'
