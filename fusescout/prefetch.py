"""Does what will be needed ahead, while something else runs: compiles kernels, imports compilers.

The TileLang kernels of all candidates are compiled before the races; on CUDA while the first of them already run.

One child does it, in copies of itself: TileLang's lowering holds the interpreter lock. If the child dies, the races
compile what they need themselves.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress

from fusescout.config import Config
from fusescout.device import Device
from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout
from fusescout.ir import Subgraph
from fusescout.workerpool import Worker

DEADLINE_S = 900.0


@contextmanager
def compiling_ahead(subgraphs: Sequence[Subgraph], device: Device, config: Config) -> Iterator[None]:
    """Fill the kernel cache in the background for as long as the block runs.

    On the CPU the block begins when all is compiled: a compiler beside a race on the same cores turned 0.27 ms into
    16 ms, since OpenMP's threads wait for each other.
    """
    if not subgraphs or config.jobs < 2:
        yield
        return
    worker = Worker()

    def compile_all() -> None:
        try:
            worker.call(
                "compile_ahead",
                DEADLINE_S,
                subgraphs=[s.to_json() for s in subgraphs],
                device=dataclasses.asdict(device),
                templates=[str(t) for t in config.templates],
                cache_dir=str(config.cache_dir),
                effort=config.effort,
                jobs=config.jobs,
            )
        except (WorkerDied, WorkerRefused, WorkerTimeout):
            return  # the races will find out themselves, each with its own reason

    thread = threading.Thread(target=compile_all, daemon=True)
    thread.start()
    if device.kind == "cpu":
        thread.join()
    try:
        yield
    finally:
        worker.kill()
        thread.join()
        worker.close()


@contextmanager
def importing_ahead(modules: Sequence[str]) -> Iterator[None]:
    """Import modules in a thread while the block waits for a child: 1.5 s for Inductor and TileLang.

    Not for a block in which something is timed on the CPU. What can't be imported will say so where it is used.
    """

    def import_all() -> None:
        for module in modules:
            with suppress(ImportError):
                importlib.import_module(module)

    thread = threading.Thread(target=import_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
