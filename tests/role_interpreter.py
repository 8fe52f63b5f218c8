"""Runs TileLang text with hand-written roles on NumPy: a thread for the loads, one for the warpgroups that compute.

Their barriers count phases as the hardware's do, so a stage that is reused too early, a wait for the wrong phase or for
an arrival that never comes is seen. A copy or product is done when it is asked for, not at some time before its wait.
"""

import re
import threading

import numpy as np
from tile_interpreter import Buffer
from tile_interpreter import Language

PRODUCER, CONSUMER = 0, 128
PATIENCE_S = 10


class Barrier:
    """One arrival ends a phase: in the text each of several warps arrives, here there is one."""

    def __init__(self):
        self.phase, self.changed = 0, threading.Condition()

    def arrive(self):
        with self.changed:
            self.phase += 1
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            arrived = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE_S)
            assert arrived, f"nobody arrived in phase {self.phase}"


class Tile(Buffer):
    """A buffer of which `[stage, :, :]` is a tile."""

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(i, slice) for i in index):
            return self.at(tuple(map(int, index)))
        if any(i.start is not None for i in index if isinstance(i, slice)):
            return self.at(tuple(i.start if isinstance(i, slice) else int(i) for i in index))
        tile = Tile(self.array[index], "")
        tile.half = self.half
        return tile


class Roles(Language):
    """`T` for one block. What is allocated is known by its place in the text, and shared by both roles."""

    get_thread_binding = property(lambda self: lambda: self.own.role)
    set_max_nreg = wait_wgmma = warpgroup_fence_operand = staticmethod(lambda *_, **__: None)
    shuffle_elect = staticmethod(lambda _: True)

    def __init__(self):
        super().__init__()
        self.made, self.lock = {}, threading.Lock()

    def _shared(self, make):
        self.own.place += 1
        with self.lock:
            return self.made.setdefault(self.own.place, make())

    def alloc_shared(self, shape, dtype):
        return self._shared(lambda: Tile(np.full(shape, np.nan, np.float32), dtype))

    alloc_fragment = alloc_shared

    def alloc_barrier(self, counts):
        return self._shared(lambda: [Barrier() for _ in counts])

    def mbarrier_wait_parity(self, barrier, parity):
        barrier.wait(parity)

    def mbarrier_arrive(self, barrier):
        barrier.arrive()

    def tma_copy(self, start, tile, barrier, annotations=None):
        tile.array[...] = np.nan  # it may arrive at any time from now on
        self.copy(start, tile)
        if annotations:
            barrier.arrive()

    wgmma_gemm = Language.gemm

    def Kernel(self, *grid, **_):
        self.blocks = grid[0]
        if self.own.block is not None:
            yield self.own.block


def interpret_roles(source, name, buffers):
    """Run the kernel `name` of `source`, which has one launch of one dimension, on its parameters' buffers."""
    language = Roles()
    text = source.replace("import tilelang.language as T\n", "")
    text = re.sub(r"from tilelang.layout import (\w+)", r"\1 = lambda tile: tile", text)
    space = {"T": language}
    exec(re.sub(r"with (T\.Kernel\(.*\)) as (.*):", r"for \2 in \1:", text), space)
    given = [Tile(b.array, "bfloat16" if b.half else "") for b in buffers]
    failures = []

    def run(block, role):
        language.own.block, language.own.role, language.own.place = block, role, 0
        try:
            with np.errstate(all="ignore"):
                space[name](*given)
        except BaseException as failure:
            failures.append(failure)

    run(None, PRODUCER)
    for block in range(language.blocks):
        language.made.clear()
        running = [threading.Thread(target=run, args=(block, role)) for role in (PRODUCER, CONSUMER)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if failures:
            raise failures[0]
