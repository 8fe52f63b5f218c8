"""What a profile says: plain data, times in µs of one step (one call of the model, with its backward in training)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fusescout.session import GraphBreak
from fusescout.session import Interval
from fusescout.session import KernelRow
from fusescout.session import ProfileInfo

if TYPE_CHECKING:
    from fusescout.graph import OpGraph


@dataclass(frozen=True, slots=True)
class NodeTime:
    """Kernel time that one captured node causes in one step."""

    graph: int
    node: str
    time_us: float
    kernels: int
    backward_us: float = 0.0
    backward_kernels: int = 0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All executions of one kernel (on CPU: of one operator) in one step. `nodes` are "graph:node" of its owners."""

    name: str
    calls: int
    time_us: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """One step of the model as the framework runs it.

    Attributes:
        device: "cpu" or "cuda".
        step: unprofiled wall time of one call, and the only time here that a verdict may use.
        nodes: time per captured node, for nodes that ran.
        kernels: time per kernel name, longest first.
        kernel_us: total kernel time: attributed_us + unlinked_us, exactly.
        attributed_us: the part that belongs to captured nodes, forward and backward.
        unlinked_us: the part that doesn't.
        busy_us: union of the kernels' intervals.
        launches: kernel launches (on CPU: operators) of one step.
        idle_host_us, idle_kernel_us, idle_other_us: how the device's idle time splits: it waited for the host to
            launch, for a kernel that was launched in time, or for the end of the step to be noticed.
        host_bound: True if the device mostly waits for launches: then CUDA graphs help, and fusing helps little.
        source: where times come from: "kernels", "operators" (CPU) or "events" (no kernel records to be had).
        trace: the Chrome trace (gzip) of the model as the framework runs it.
    """

    device: str
    step: Interval
    nodes: tuple[NodeTime, ...]
    kernels: tuple[KernelTime, ...]
    kernel_us: float
    attributed_us: float
    unlinked_us: float
    busy_us: float
    launches: int
    idle_host_us: float
    idle_kernel_us: float
    idle_other_us: float
    host_bound: bool
    runs: int
    source: str
    trace: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """Share of kernel time that is attributed to captured nodes; 0 if there was none."""
        return self.attributed_us / self.kernel_us if self.kernel_us else 0.0

    @property
    def idle_us(self) -> float:
        return self.idle_host_us + self.idle_kernel_us + self.idle_other_us

    @property
    def idle_share(self) -> float:
        """Share of the step's wall time in which the device does nothing."""
        return self.idle_us / self.step.mid if self.step.mid else 0.0

    @cached_property
    def _by_node(self) -> dict[tuple[int, str], NodeTime]:
        return {(n.graph, n.node): n for n in self.nodes}

    def node(self, graph: int, node: str) -> NodeTime | None:
        """Times of one captured node, or None if it never ran."""
        return self._by_node.get((graph, node))

    def time_us(self, graph: int, node: str) -> float:
        """Forward time of one captured node in one step; 0 if it never ran."""
        found = self.node(graph, node)
        return found.time_us if found else 0.0

    def info(self, ops: OpGraph, graphs: int, breaks: Sequence[GraphBreak] = ()) -> ProfileInfo:
        """The record a session keeps of this profile."""
        return ProfileInfo(
            step=self.step,
            busy_us=self.busy_us,
            attributed_us=self.attributed_us,
            unlinked_us=self.unlinked_us,
            coverage=self.coverage,
            launches=self.launches,
            host_bound=self.host_bound,
            idle_share=self.idle_share,
            runs=self.runs,
            graphs=graphs,
            breaks=list(breaks),
            ops=ops.rows(),
            kernels=[
                KernelRow(
                    name=k.name,
                    calls=k.calls,
                    time_us=k.time_us,
                    share=k.time_us / self.kernel_us if self.kernel_us else 0.0,
                    nodes=list(k.nodes),
                )
                for k in self.kernels
            ],
            edges=ops.edges(),
            trace=self.trace,
        )
