"""Compiles Inductor's kernels of all cases before the first race, in several processes: serially they take most of it.

The races then find them in the cache; `compile_s` stays what the first compilation took, here beside others. Choosing
kernels by timing (max-autotune) is left to the races, where nothing else runs on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty
from queue import SimpleQueue

from fusescout.config import Config
from fusescout.device import Device
from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout
from fusescout.ir import Subgraph
from fusescout.prefetch import ONE_THREAD
from fusescout.prefetch import opening_to_compile
from fusescout.workerpool import STARTUP_S
from fusescout.workerpool import Worker

MOST_WORKERS = 8
EACH_S = 120.0


def compile_inductor(graphs: Sequence[Subgraph], device: Device, config: Config) -> None:
    """Fill the Inductor cache of `config.cache_dir` for these chains; what fails is left for its race to report.

    On a CPU nothing is done: its few cores compile as fast one after the other.
    """
    count = min(MOST_WORKERS, config.jobs // 2, len(graphs))
    if device.kind != "cuda" or count < 2:
        return
    waiting: SimpleQueue[Subgraph] = SimpleQueue()
    for graph in graphs:
        waiting.put(graph)
    opening = opening_to_compile(device, config)

    def work() -> None:
        worker = Worker(ONE_THREAD)
        with suppress(Empty):  # nothing is left to do
            while True:
                graph = waiting.get_nowait()
                if not worker.alive:
                    worker = Worker(ONE_THREAD)
                with suppress(WorkerDied, WorkerRefused, WorkerTimeout):  # the race meets the same, with a reason
                    worker.call("open", STARTUP_S, subgraph=graph.to_json(), **opening)
                    worker.call("build", EACH_S, contender="inductor", variant={"mode": "default"}, handle=0)
                    worker.call("drop", EACH_S, handles=[0])
        worker.close()

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result()
