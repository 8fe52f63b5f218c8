"""What becomes of planned chains at shapes that the plan doesn't have, while the model runs.

A graph of a new shape is carried out as the framework does it, at once. Under the policies "nearest" and "adaptive" a
background thread then takes its chains one by one, in a child process with deadlines, and puts what has passed
verification in the place of that graph. No fault here breaks a call, and nothing of it holds one up, except that a rest
that is compiled is compiled anew in the call that takes the kernels up.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import Literal
from typing import get_args

import torch

from fusescout.adoption import adopt_nearest
from fusescout.adoption import adopt_winner
from fusescout.config import load
from fusescout.counters import Counters
from fusescout.device import Device
from fusescout.errors import PolicyUnknown
from fusescout.errors import in_a_line
from fusescout.heats import FAILURE
from fusescout.ir import Graph
from fusescout.ir import Subgraph
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.regions import find_regions
from fusescout.shapes import counterparts
from fusescout.workerpool import Spare
from fusescout.workerpool import Worker

Policy = Literal["fallback", "nearest", "adaptive"]
Unknown = tuple[tuple[Entry, Subgraph], ...]
"""Chains that stand where a planned one stood at other sizes, each with the nearest entry."""


class Replaceable:
    """A graph's callable that may be exchanged between two calls: by another thread, or by what is `due` in the next.

    A compiler must not run beside the model: while it traces, torch changes `nn.Module.__call__` for all threads, and a
    call of the model would raise. So what needs one is due, and the next call does it, as the first of a new shape did.
    """

    def __init__(self, current: Callable[..., Any]) -> None:
        self.current = current
        self.due: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        if self.due is not None and not _is_capturing():
            with self._lock:
                due, self.due = self.due, None
            if due is not None:
                due()
        return self.current(*inputs)


def _is_capturing() -> bool:
    """Whether the caller is capturing a CUDA graph, which a compiler would spoil."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class NewShapes:
    """Learns kernels for the chains of a plan at new shapes.

    Attributes:
        entries: what was learned so far, in the order of the plan's.
    """

    def __init__(self, policy: Policy, plan: Plan, device: Device, counters: Counters, cache_dir: Path) -> None:
        if policy not in (known := get_args(Policy)):
            raise PolicyUnknown(policy, known)
        self.policy, self.plan, self.device, self.counters, self.cache_dir = policy, plan, device, counters, cache_dir
        self.entries: tuple[Entry, ...] = ()
        self._settled: set[tuple[str, str]] = set()
        self._jobs: deque[tuple[Unknown, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lender = _Lender()
        self._stopped = False

    def counterparts(self, graph: Graph) -> Unknown:
        """The chains of a graph that there may be something to learn for."""
        if self.policy == "fallback" or self._stopped:
            return ()
        chains = [(region.family, graph.subgraph(region.nodes)[0]) for region in find_regions(graph)]
        return counterparts((*self.plan.entries, *self.entries), chains)

    def submit(self, unknown: Unknown, replace: Callable[[], None]) -> None:
        """Learn in the background; `replace` is called there if anything came of it. It must not compile."""
        with self._changed:
            if self._stopped:
                return
            self._jobs.append((unknown, replace))
            if self._thread is None:
                self._lender = _Lender()
                self._thread = threading.Thread(target=self._work, name="fusescout-new-shapes", daemon=True)
                atexit.register(self.stop)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was submitted is done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def stop(self) -> None:
        """Give up what is being learned; graphs stay as they are."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
        self._lender.end()

    def _work(self) -> None:
        with self._lender as lender:
            while (job := self._next()) is not None:
                self._do(*job, lender)
        with self._changed:
            self._thread = None
            if self._jobs:  # submitted since the last look
                unknown, replace = self._jobs.pop()
                self.submit(unknown, replace)
            else:
                atexit.unregister(self.stop)
            self._changed.notify_all()

    def _next(self) -> tuple[Unknown, Callable[[], None]] | None:
        with self._changed:
            return self._jobs.popleft() if self._jobs else None

    def _do(self, unknown: Unknown, replace: Callable[[], None], lender: Spare) -> None:
        try:
            for entry, subgraph in unknown:
                self._learn(entry, subgraph, lender)
            wanted = {(entry.family, subgraph.key) for entry, subgraph in unknown}
            if not self._stopped and any((e.family, e.key) in wanted for e in self.entries):
                replace()
        except Stopped:
            return
        except Exception as error:  # isolation boundary: the graph stays with the framework, and the model runs on
            self.failed(error)

    def failed(self, error: Exception) -> None:
        self.counters.fallbacks["new shapes"] = in_a_line(error)

    def _learn(self, entry: Entry, subgraph: Subgraph, lender: Spare) -> None:
        """Find a kernel for the chain, once."""
        if (entry.family, subgraph.key) in self._settled:
            return
        config = load().model_copy(
            update={
                "cache_dir": self.cache_dir,
                "templates": tuple(map(Path, self.plan.templates)),
                "effort": "quick",
                "jobs": 1,
            }
        )
        adopt = adopt_winner if self.policy == "adaptive" else adopt_nearest
        try:
            found = adopt(entry, subgraph, self.device, config, self.plan.composition, lender)
        except FAILURE as error:
            found = str(error)
        self._settled.add((entry.family, subgraph.key))
        name = f"{entry.family}-{subgraph.key[:8]}"
        if isinstance(found, str):
            self.counters.fallbacks[name] = found
        else:
            learned, self.counters.adopted[name] = found
            self.entries = _in_order((*self.entries, learned), self.plan.entries)


def _in_order(learned: Sequence[Entry], planned: Sequence[Entry]) -> tuple[Entry, ...]:
    """By the priority of the planned chains of the same operators."""
    places = {(e.family, tuple(e.chain)): k for k, e in reversed(list(enumerate(planned)))}
    return tuple(sorted(learned, key=lambda e: places[e.family, tuple(e.chain)]))


class Stopped(Exception):
    """There is no worker any more: the patch was undone."""


class _Lender(Spare):
    """Lends workers until it is told to end, and then kills the one that is out."""

    def __init__(self) -> None:
        super().__init__()
        self._out: Worker | None = None
        self._ended = threading.Event()

    def take(self) -> Worker:
        if self._ended.is_set():
            raise Stopped
        self._out = super().take()
        if self._ended.is_set():
            self._out.kill()
        return self._out

    def end(self) -> None:
        self._ended.set()
        if self._out is not None and self._out.alive:
            self._out.kill()
