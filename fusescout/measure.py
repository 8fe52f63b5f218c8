"""Interleaved timing. Every round runs all contenders forwards and then backwards (ABBA), so that clock ramps, heat and
neighbours on the machine fall on all of them alike; a round's value is the mean of its two samples.

CPU: wall time around as many calls as fill `SAMPLE_S`; caches are warm, as a chain's input is in a model.
CUDA: events around one call on the current stream. Before each, the stream waits a little so that the host is ahead and
its launch cost stays out, and a write of `FLUSH_BYTES` clears the L2. Calls shorter than `SHORT_US` are captured in a
CUDA graph that goes round several copies of the inputs, for an event pair costs about as much as they do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from fusescout.candidates import lower_bound
from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.rng import leave_capture

SAMPLE_S = 2e-3
FLUSH_BYTES = 256 << 20
SHORT_US = 20.0
GRAPH_CALLS = 32
DROP_FACTOR = 5.0
"""Who needs this many times eager's time in the first sample is out at once."""
FIRST_CALLS, FIRST_S = 5, 0.03
"""The first sample is the best of so many calls, fewer if they take long: one hiccup must not throw anybody out."""
MIN_ROUNDS = 5
IMPOSSIBLE = 0.9
"""A time under this share of the physical bound is refused: ceilings are measured too, and not to the last percent."""

Call = Callable[[Sequence[Tensor]], Any]


@dataclass(frozen=True, slots=True)
class Timings:
    """Samples in µs a call; `samples[k]` are the rounds of contender k, empty if it was dropped."""

    samples: list[list[float]]
    policy: str
    dropped: dict[int, str] = field(default_factory=dict)


def interleave(
    calls: Sequence[Call],
    inputs: Sequence[Tensor],
    device: str,
    *,
    rounds: int = 30,
    budget_s: float = 5.0,
    graphs: bool = True,
) -> Timings:
    """Time all calls on the same inputs.

    Args:
        calls: what to time; the first one is the baseline the others are dropped against.
        inputs: the inputs all get.
        device: "cpu", "cuda" or "cuda:N".
        rounds: rounds to run at most.
        budget_s: seconds after which no new round is begun, once there are `MIN_ROUNDS`.
        graphs: short CUDA calls may be captured.
    """
    clock = _Cuda(calls, inputs, device) if device.startswith("cuda") else _Cpu(calls, inputs)
    samples: list[list[float]] = [[] for _ in calls]
    dropped: dict[int, str] = {}
    firsts: list[float] = []
    for k in range(len(calls)):
        firsts.append(_first(clock, k))
        if firsts[k] > DROP_FACTOR * firsts[0]:
            dropped[k] = f"it takes {firsts[k] / firsts[0]:.1f} times as long as eager"
    alive = [k for k in range(len(calls)) if k not in dropped]
    clock.settle(alive, firsts, graphs)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.perf_counter() - start > budget_s:
            break
        turn = number % len(alive)  # who comes first, after the clock was read, changes from round to round
        order = [*alive[turn:], *alive[:turn]]
        times = clock.round([*order, *reversed(order)])
        for position, k in enumerate(order):
            samples[k].append((times[position] + times[-1 - position]) / 2)
    return Timings(samples, clock.policy, dropped)


def impossible(time_us: float, graph: Subgraph, device: Device) -> str | None:
    """Why a time can't be true, or None. Bytes that fit the last-level cache count for nothing here."""
    bound_us, flops, nbytes = lower_bound(graph, device)
    if device.copy_bytes_per_s <= 0 or bound_us <= 0:
        return None
    memory_us = nbytes / device.copy_bytes_per_s * 1e6
    in_cache_us = max(0.0, nbytes - 2 * device.cache_bytes) / device.copy_bytes_per_s * 1e6
    floor = bound_us if bound_us > memory_us * 1.001 else in_cache_us
    if time_us >= floor * IMPOSSIBLE:
        return None
    return (
        f"{time_us:.3g} µs is less than the {floor:.3g} µs that {flops:.3g} FLOPs and {nbytes:.3g} bytes need on this"
        " device; the measurement is refused"
    )


def _first(clock: _Cpu | _Cuda, k: int) -> float:
    clock.warm(k)
    start, best = time.perf_counter(), math.inf
    for _ in range(FIRST_CALLS):
        best = min(best, clock.first(k))
        if time.perf_counter() - start > FIRST_S:
            break
    return best


class _Cpu:
    def __init__(self, calls: Sequence[Call], inputs: Sequence[Tensor]) -> None:
        self.calls, self.inputs = calls, inputs
        self.repeats = [1] * len(calls)
        self.policy = f"wall time of enough calls to fill {SAMPLE_S * 1e3:g} ms; caches warm"

    def warm(self, k: int) -> None:
        self.calls[k](self.inputs)

    def first(self, k: int) -> float:
        return self._sample(k)

    def settle(self, alive: Sequence[int], firsts: Sequence[float], graphs: bool) -> None:
        for k in alive:
            self.repeats[k] = max(1, math.ceil(SAMPLE_S * 1e6 / max(firsts[k], 0.01)))
            self._sample(k)

    def round(self, order: Sequence[int]) -> list[float]:
        return [self._sample(k) for k in order]

    def _sample(self, k: int) -> float:
        call, inputs, repeats = self.calls[k], self.inputs, self.repeats[k]
        start = time.perf_counter()
        for _ in range(repeats):
            call(inputs)
        return (time.perf_counter() - start) / repeats * 1e6


class _Cuda:
    def __init__(self, calls: Sequence[Call], inputs: Sequence[Tensor], device: str) -> None:
        self.calls, self.inputs = list(calls), inputs
        self.device = torch.device(device)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.host_us = [0.0] * len(calls)
        self.divide = 1
        self.policy = (
            f"CUDA events around one call; L2 flushed by a {FLUSH_BYTES >> 20} MiB write before each; launches hidden"
        )

    def warm(self, k: int) -> None:
        for _ in range(2):
            self.calls[k](self.inputs)

    def first(self, k: int) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        self.calls[k](self.inputs)
        self.host_us[k] = (time.perf_counter() - start) * 1e6
        return self.round([k])[0]

    def settle(self, alive: Sequence[int], firsts: Sequence[float], graphs: bool) -> None:
        if graphs and min(firsts[k] for k in alive) < SHORT_US:
            self._capture(alive)
        for _ in range(2):
            self.round(alive)

    def round(self, order: Sequence[int]) -> list[float]:
        events = []
        event: Any = torch.cuda.Event
        for k in order:
            pair = event(enable_timing=True), event(enable_timing=True)
            torch.cuda._sleep(int(min(self.host_us[k] * 1.5 + 20, 10_000) * 2000))  # type: ignore[no-untyped-call]
            self.flush.zero_()
            pair[0].record()
            self.calls[k](self.inputs)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) * 1e3 / self.divide for begin, end in events]

    def _capture(self, alive: Sequence[int]) -> None:
        """Replace each call by the replay of a graph of `GRAPH_CALLS` calls; if one can't be captured, none is."""
        nbytes = max(1, sum(t.untyped_storage().nbytes() for t in self.inputs))
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = min(GRAPH_CALLS, max(1, math.ceil(2 * cache / nbytes)))
        sets = [self.inputs, *([_copy(t) for t in self.inputs] for _ in range(copies - 1))]
        replays: dict[int, Call] = {}
        try:
            for k in alive:
                for inputs in sets:  # what a contender prepares of its constants must not be part of the graph
                    self.calls[k](inputs)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for n in range(GRAPH_CALLS):
                        self.calls[k](sets[n % copies])
                replays[k] = _replay(graph)
        except (RuntimeError, NotImplementedError):  # not capturable: the event policy holds for all then
            torch.cuda.synchronize(self.device)
            leave_capture(str(self.device))
            return
        for k, replay in replays.items():
            self.calls[k], self.host_us[k] = replay, 100.0
        self._sets, self.divide = sets, GRAPH_CALLS
        self.policy = (
            f"CUDA graph of {GRAPH_CALLS} calls over {copies} copies of the inputs"
            f" ({copies * nbytes / (1 << 20):.0f} MiB, L2 {cache >> 20} MiB); launches hidden"
        )


def _replay(graph: torch.cuda.CUDAGraph) -> Call:
    return lambda _: graph.replay()


def _copy(tensor: Tensor) -> Tensor:
    storage: Any = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
