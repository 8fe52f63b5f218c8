"""Runs the TileLang text of a template on NumPy, block by block: indices, order of sums and epilogue, without a GPU.

Only what the "split" schedule of the GEMM and the copies ahead of it use. The blocks of a cluster are threads, as they
meet and read one another's shared memory; all other blocks run one after the other. Tiles begin as NaN, tile copies end
at a tensor's edge and fill up with 0, and a store outside of a tensor fails.
"""

import itertools
import math
import re
import threading

import numpy as np
import torch


class Element(np.float32):
    """A value that knows its place, for tile copies and addresses."""


class Buffer:
    """A tensor or tile; values are float32, rounded as they are stored where it is bfloat16."""

    def __init__(self, array, dtype):
        self.array, self.half = array, dtype == "bfloat16"

    def at(self, index):
        inside = all(0 <= i < n for i, n in zip(index, self.array.shape, strict=True))
        found = Element(self.array[index] if inside else np.nan)
        found.buffer, found.index, found.inside = self, index, inside
        return found

    def __getitem__(self, index):
        return self.at(tuple(map(int, index if isinstance(index, tuple) else (index,))))

    def __setitem__(self, index, value):
        place = tuple(map(int, index if isinstance(index, tuple) else (index,)))
        assert all(0 <= i < n for i, n in zip(place, self.array.shape, strict=True)), f"a store to {place}"
        self.array[place] = rounded(value) if self.half else np.float32(value)


def rounded(value):
    return np.float32(torch.tensor(float(value)).bfloat16().item())


class Language:
    """What the text calls `T`. A launch runs its body for the one block that is set, if it is the launch's turn."""

    float32, int32 = np.float32, int
    Tensor = StridedTensor = staticmethod(lambda *_: None)
    prim_func = staticmethod(lambda function: function)
    no_set_max_nreg = mbarrier_wait_parity = annotate_layout = staticmethod(lambda *_: None)
    alloc_barrier = staticmethod(lambda counts: counts)
    min = staticmethod(min)
    evaluate = address_of = staticmethod(lambda x: x)
    serial = staticmethod(range)
    Pipelined = staticmethod(lambda n, num_stages: range(n))
    Parallel = staticmethod(lambda *n: itertools.product(*map(range, n)) if len(n) > 1 else range(*n))
    Select = staticmethod(lambda condition, yes, no: yes if condition else no)
    ceildiv = staticmethod(lambda a, b: -(-a // b))
    GemmWarpPolicy = type("Policy", (), {"FullRow": 0})
    cast = staticmethod(lambda x, dtype: rounded(x) if dtype == "bfloat16" else np.float32(x))

    def __init__(self):
        self.grids, self.tiles, self.own = [], {}, threading.local()

    def Kernel(self, *grid, threads, prelude=None, cluster_dims=(1,)):
        launch, self.own.seen = self.own.seen, self.own.seen + 1
        if self.own.launch is None:
            self.grids.append((grid, cluster_dims[0]))
        elif launch == self.own.launch:
            self.tiles[self.own.block] = []
            yield self.own.block if len(grid) > 1 else self.own.block[0]

    def alloc_shared(self, shape, dtype):
        tile = Buffer(np.full(shape, np.nan, np.float32), dtype)
        self.tiles[self.own.block].append(tile)
        return tile

    alloc_fragment = alloc_shared

    def clear(self, tile):
        tile.array[...] = 0

    def fill(self, tile, value):
        tile.array[...] = value

    def copy(self, start, tile):
        if isinstance(start, Buffer):
            self.store(start, tile)
            return
        lead = len(start.index) - tile.array.ndim
        for i in np.ndindex(tile.array.shape):
            moved = tuple(a + b for a, b in zip(start.index[lead:], i, strict=True))
            found = start.buffer.at(start.index[:lead] + moved)
            tile.array[i] = found if found.inside else 0

    def tma_copy(self, start, tile, barrier, annotations=None):
        self.copy(start, tile)

    def store(self, tile, end):
        """To another tile, or to a place in a tensor: what lies outside of it is left out."""
        values = torch.from_numpy(tile.array)
        half = end.half if isinstance(end, Buffer) else end.buffer.half
        values = (values.bfloat16().float() if half else values).numpy()
        if isinstance(end, Buffer):
            end.array[...] = values
            return
        room = end.buffer.array[end.index[: -tile.array.ndim]]
        for d, first in enumerate(end.index[-tile.array.ndim :]):
            room = np.moveaxis(np.moveaxis(room, d, 0)[first : first + tile.array.shape[d]], 0, d)
        room[...] = values[tuple(slice(n) for n in room.shape)]

    def reduce_max(self, tile, out, dim, clear=True):
        found = np.fmax.reduce(tile.array, axis=dim)  # as the device's instruction: it drops NaN
        out.array[...] = found if clear else np.fmax(out.array, found)

    def reduce_sum(self, tile, out, dim):
        out.array[...] = tile.array.sum(dim)

    def gemm(self, a, b, c, transpose_A=False, transpose_B=False, policy=0, clear_accum=False):
        if clear_accum:
            self.clear(c)
        c.array += (a.array.T if transpose_A else a.array) @ (b.array.T if transpose_B else b.array)

    def call_extern(self, dtype, name, *args):
        if name == "fs_meet":
            return self.own.barrier.wait()
        if name == "fs_peer":
            mine, block = args
            there = self.tiles[(block, *self.own.block[1:])]
            return there[self.tiles[self.own.block].index(mine.buffer)].array[mine.index]
        if name == "fs_bits":
            return np.int32(args[0]).view(np.float32)
        return np.float32(FUNCTIONS[name](*map(float, args)))

    call_pure_extern = call_extern


FUNCTIONS = {
    "fs_let_float32": lambda x: x,
    "fs_sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "fs_ex2": np.exp2,
    "fs_rcp": lambda x: np.divide(1, x),
    "fs_tanh": math.tanh,
    "fs_gelu": lambda x: 0.5 * x * (1 + math.erf(x / 2**0.5)),
}


def interpret(source, name, buffers):
    """Run the kernel `name` of `source` on its parameters' buffers, in order."""
    language = Language()
    text = source.replace("import tilelang.language as T\n", "")
    text = re.sub(r"from tilelang.layout import (\w+)", r"\1 = lambda tile: tile", text)
    text = re.sub(r"with (T\.Kernel\(.*\)) as (.*):", r"for \2 in \1:", text)
    space = {"T": language}
    exec(text, space)

    def run(launch, block, barrier):
        language.own.launch, language.own.block, language.own.barrier, language.own.seen = launch, block, barrier, 0
        space[name](*buffers)

    run(None, None, None)
    for launch, (grid, together) in enumerate(language.grids):
        for first in itertools.product(range(0, grid[0], together), *map(range, grid[1:])):
            barrier, failures = threading.Barrier(together), []

            def guarded(block, launch=launch, barrier=barrier, failures=failures):
                try:
                    run(launch, block, barrier)
                except BaseException as failure:
                    failures.append(failure)
                    barrier.abort()

            blocks = [(first[0] + k, *first[1:]) for k in range(together)]
            running = [threading.Thread(target=guarded, args=(b,)) for b in blocks]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            if failures:
                raise failures[0]
