"""Walks of wide softmaxes and their losses on CUDA: each thread keeps one maximum and one sum.

With a maximum for each of its elements a thread rescales a sum with each element: nine instructions and an exponential,
more than a multiprocessor has time for while a byte arrives. Here it takes the maximum of its strip of a chunk first
and rescales once a chunk: five instructions an element. The loop over chunks is unrolled in part, so that the next
chunk is under way while this one is computed; or, where a row fits into registers as it is in memory, all its chunks
are under way at once, and later passes find them there.
"""

from collections.abc import Iterator

from fusescout.templates.dialect import Dialect
from fusescout.templates.rows import Rows
from fusescout.templates.rowwise_cuda import CudaRows
from fusescout.templates.rowwise_spans import Span

PART = '''
PRELUDE += r"""
static __forceinline__ __device__ float fs_part(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
"""


def part(x):  # of a sum, whose rounding is larger
    return T.call_pure_extern("float32", "fs_part", x)
'''
PART_ON_CPU = """
part = exp
"""
AGAIN = '''
PRELUDE += r"""
static __forceinline__ __device__ float fs_again(float x) { asm volatile("" : "+f"(x)); return x; }
template <class T> static __forceinline__ __device__ T fs_again(T x) {
  static_assert(sizeof(T) == 2);
  asm volatile("" : "+h"(reinterpret_cast<unsigned short&>(x)));
  return x;
}
"""


def again(x):
    return T.call_extern(x.dtype, "fs_again", x)
'''
AGAIN_ON_CPU = """
def again(x):
    return x
"""


def is_striped(rows: Rows, config: dict) -> bool:
    """Whether the walk sums up exponentials and reduces nothing else."""
    sums = [r for r in rows.reductions.values() if r.kind == "sumexp"]
    known = {r.value for r in sums} | {r.top for r in sums}
    return bool(config.get("strip") and sums) and set(rows.reductions) <= known


def more_header(config: dict, dialect: Dialect) -> str:
    """What the text of a kernel of strips needs besides the dialect's header.

    Exact exponentials take twice the instructions of all else, and there is no time for them. The compiler would keep
    what the first pass made of a held element for the second, in twice the registers, and spill: `again` hides from it
    that the element is still the same.
    """
    if not config.get("strip"):
        return ""
    held = (AGAIN_ON_CPU if dialect.cpu else AGAIN) if config.get("held") else ""
    return (PART_ON_CPU if dialect.cpu else PART) + held


class Strips(CudaRows):
    """`strip` neighbouring elements of a chunk belong to one thread; `unroll` chunks are in flight, or all are held."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        strip = self.config["strip"]
        self.lanes = (1, self.width // strip)
        self.tile = (*self.lanes, strip)
        self.place, self.spot = "i, p, q", f"(p * {strip} + q)"
        self.loop = f"for {self.place} in {self.dialect.parallel(*self.tile)}:"
        self.lane = f"for i, p in {self.dialect.parallel(*self.lanes)}:"
        self.held = self.config.get("held", False)
        self.chunks = -(-(self.columns + (self.slant.vector - 1 if self.slant else 0)) // self.width)
        self.chunk = 0

    def _staged(self, o) -> str:
        return super()._staged(o) + (str(self.chunk) if self.held else "")

    def _kept(self, element: str, level: int) -> str:
        return f"again({element})" if self.held and level > 0 else element

    def _input_tiles(self) -> list:
        return [tile for _ in self._each_chunk() for tile in super(Strips, self)._input_tiles()]

    def _each_chunk(self) -> Iterator[int]:
        """The chunks whose tiles have names of their own."""
        for chunk in range(self.chunks if self.held else 1):
            self.chunk = chunk
            yield chunk

    def _ahead(self) -> list:
        if not self.held:
            return []
        inputs = self.full_inputs()
        return [line for k in self._each_chunk() for o in inputs for line in self._load(o, self._chunk_span(k))]

    def _walk(self, level: int, known: dict) -> list:
        if not self.held or not self._has_work(level):
            return super()._walk(level, known)
        lines = self._starts(level)
        for k in self._each_chunk():
            lines += [*self._bring(level), *self._step(level, known, self._chunk_span(k), load=False)]
        return lines

    def _chunk_span(self, k: int) -> Span:
        return self._span(f"({k * self.width} + {self.spot})", k == 0, k == self.chunks - 1)

    def _bring(self, level: int) -> list:
        """Lines in front of a chunk of a pass."""
        return []

    def _partial_tiles(self) -> list:
        sums = [r.value for r in self.rows.reductions.values() if r.kind == "sumexp"]
        return [
            *((f"t{r}", self.lanes, "float32") for r in self.rows.reductions),
            *((f"n{r}", self.lanes, "float32") for r in sums),
            *((f"u{r}", self.tile, "float32") for r in sums),
        ]

    def _starts(self, level: int) -> list:
        found = []
        for r in self._later(level):
            found += [self.lane, f"    t{r.value}[i, p] = {self.start(r)}"]
        return found

    def _chunks(self, number: int) -> str:
        factor = self.config.get("unroll", 1)
        return (
            f"T.unroll({number}, unroll_factor={factor})"
            if factor > 1 and not self.dialect.cpu
            else f"T.serial({number})"
        )

    def _accumulate(self, r, value: str, inside: str, first: bool) -> list:
        if r.kind != "sumexp":  # its maximum is kept where exponentials are summed up
            return []
        nothing = self.dialect.f32(float("-inf"))
        return [f"u{r.value}[{self.place}] = " + (f"where({inside}, {value}, {nothing})" if inside else value)]

    def _merge(self, level: int) -> list:
        """The strip's maximum, the sum so far less it, and the strip's exponentials."""
        lines = []
        for r in self._later(level):
            if r.kind != "sumexp":
                continue
            u, n, t, top = f"u{r.value}", f"n{r.value}", f"t{r.value}", f"t{r.top}"
            lines += [
                f"T.reduce_max({u}, {n}, dim=2)",
                self.lane,
                f"    {n}[i, p] = T.max({n}[i, p], {top}[i, p])",  # it may drop NaN: the sum keeps it
                f"    {t}[i, p] = {t}[i, p] * part({top}[i, p] - {n}[i, p])",
                f"    {top}[i, p] = {n}[i, p]",
                self.loop,
                f"    {u}[{self.place}] = part({u}[{self.place}] - {top}[i, p])",
                f"T.reduce_sum({u}, {t}, dim=2, clear=False)",
            ]
        return lines

    def _total(self, r) -> list:
        lines, name = [], "max" if r.kind == "max" else "sum"
        if r.kind == "sumexp":
            lines += [self.lane, f"    t{r.value}[i, p] = t{r.value}[i, p] * part(t{r.top}[i, p] - s{r.top}[i])"]
        return [*lines, f"T.reduce_{name}(t{r.value}, s{r.value}, dim=1)"]
