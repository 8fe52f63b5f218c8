"""Does what will be needed ahead, while something else runs: compiles kernels, imports compilers.

The TileLang kernels of all candidates are compiled before the races; on CUDA while the model's rivals are built and the
first races already run. There Inductor's code for the chains is compiled too until the first race.

One child makes the kernels, in copies of itself: TileLang's lowering holds the interpreter lock. If it dies, the races
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
from queue import Empty
from queue import SimpleQueue
from typing import Any

from fusescout import numerics
from fusescout.config import Config
from fusescout.device import Device
from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.regions import GEMMS
from fusescout.workerpool import STARTUP_S
from fusescout.workerpool import Worker

DEADLINE_S = 900.0
MOST_CHILDREN, CORES_EACH = 4, 4
"""Children that compile with Inductor, and how many cores there must be for each."""
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Each child would start a pool of compilers of its own."""


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
def chains_ahead(subgraphs: Sequence[Subgraph], device: Device, config: Config) -> Iterator[None]:
    """Fill Inductor's caches of the chains for as long as the block runs, in several children.

    They compile and launch nothing but what makes an example of the inputs. What isn't done by the end is left to the
    races: nothing else may be on the device while they time. Chains for which Inductor would time kernels are theirs
    altogether. On a CPU nothing is done: its few cores compile as fast one after the other.
    """
    waiting: SimpleQueue[Subgraph] = SimpleQueue()
    for graph in subgraphs:
        if not times_padding(graph):
            waiting.put(graph)
    count = min(MOST_CHILDREN, config.jobs // CORES_EACH, waiting.qsize())
    if device.kind != "cuda" or count < 1:
        yield
        return
    opening = opening_to_compile(device, config)
    children = [Worker(ONE_THREAD) for _ in range(count)]

    def work(child: Worker) -> None:
        with suppress(Empty, WorkerDied, WorkerTimeout):  # nothing is left to do, or the block has ended
            while True:
                graph = waiting.get_nowait()
                with suppress(WorkerRefused):  # the race meets the same, with a reason
                    child.call("open", STARTUP_S, subgraph=graph.to_json(), **opening)
                    child.call("compile", DEADLINE_S, contender="inductor", variant={"mode": "default"})

    threads = [threading.Thread(target=work, args=(child,), daemon=True) for child in children]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for child in children:
            child.kill()
        for thread, child in zip(threads, children, strict=True):
            thread.join()
            child.close()


def opening_to_compile(device: Device, config: Config) -> dict[str, Any]:
    """How a worker is opened that compiles a chain and never runs it; the sub-graph besides."""
    return {
        "device": dataclasses.asdict(device),
        "inputs": None,
        "seed": config.seed,
        "templates": [],
        "cache_dir": str(config.cache_dir),
        "numerics": numerics.current(),
        "compile_only": True,
    }


def times_padding(graph: Subgraph) -> bool:
    """Whether Inductor would time a matrix product with its operands padded: a size is no multiple of 16 bytes.

    Or of four numbers in float32; all multiples of eight are safe in every dtype.
    """
    products = [op for op in graph.ops if op.name in GEMMS]
    specs = [graph.value(k) for op in products for k in op.inputs]
    specs += [op.out for op in products]
    return any(n % 8 for s in specs if isinstance(s, TensorSpec) for n in s.shape[-2:])


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
