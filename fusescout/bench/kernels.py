"""Runs the kernel bench: each case is captured and cut like a model, then raced by the same race an analysis runs.

Besides the contenders of an analysis it races peers that are never put into a plan: Inductor's max-autotune by itself
and liger-kernel. Nothing is taken from earlier races.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from fusescout.bench import chains
from fusescout.bench.ahead import compile_inductor
from fusescout.bench.cases import Case
from fusescout.bench.cases import Tensor
from fusescout.bench.records import OWN
from fusescout.bench.records import YARDSTICKS
from fusescout.bench.records import KernelBench
from fusescout.bench.records import KernelRow
from fusescout.candidates import lower_bound
from fusescout.capture import CapturedGraph
from fusescout.capture import activations
from fusescout.capture import capture
from fusescout.ceilings import ceilings
from fusescout.config import Config
from fusescout.contenders import contender_named
from fusescout.device import Device
from fusescout.environment import describe
from fusescout.errors import ContenderFailed
from fusescout.errors import OutOfTime
from fusescout.flops import op_class
from fusescout.inputs import save
from fusescout.ir import FLOAT8
from fusescout.ir import Graph
from fusescout.ir import Subgraph
from fusescout.prefetch import compiling_ahead
from fusescout.regions import GEMMS
from fusescout.regions import find_regions
from fusescout.regions.rows import SOFTMAXES
from fusescout.session import Interval
from fusescout.stats import ratio
from fusescout.tune import RaceResult
from fusescout.tune import race
from fusescout.workerpool import Spare
from fusescout.workload import Workload

OnEvent = Callable[[str, int, int, str], None]


class _Chain(nn.Module):
    """A chain as a model, so that it is captured like one: its weights are parameters."""

    def __init__(self, case: Case, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.chain = getattr(chains, case.chain)
        self.order = [spec.weight for spec in case.inputs]
        self.weights = nn.ParameterList(a for a, own in zip(arguments, self.order, strict=True) if own)

    def forward(self, *inputs: torch.Tensor) -> object:
        weights, given = iter(self.weights), iter(inputs)
        return self.chain(*(next(weights) if own else next(given) for own in self.order))


def run(
    cases: Sequence[Case],
    config: Config,
    kind: str,
    dtype: str,
    *,
    limit_s: float | None = None,
    on_event: OnEvent = lambda stage, done, total, text: None,
    on_row: Callable[[KernelBench], None] = lambda bench: None,
) -> KernelBench:
    """Measure the cases in order.

    Args:
        cases: what to measure.
        config: effort, jobs, deadline_s, templates, seed and cache_dir (of compiled kernels) count here.
        kind: "cpu" or "cuda".
        dtype: name of the floating dtype of inputs.
        limit_s: seconds after which no further case is begun, and the one that runs is stopped.
        on_event: hears (stage, done, total, detail).
        on_row: gets everything so far after every case.
    """
    start = time.perf_counter()
    on_event("device", 0, 0, "measuring its ceilings")
    narrow = [t.dtype for case in cases for t in case.inputs if t.dtype in FLOAT8]
    device = ceilings(kind, tuple(dict.fromkeys((dtype, "float32", *narrow))), config.cache_dir)
    bench = KernelBench(environment=describe(device), settings=_settings(config, dtype, kind))
    config = config.model_copy(update={"use_cache": False})
    on_event("capture", 0, len(cases), "cutting the chains")
    cut = {case.name: _cut(case, device, dtype, config.seed) for case in cases}
    with (
        TemporaryDirectory(prefix="fusescout-") as scratch,
        Spare() as spare,
        compiling_ahead([c.graph for c in cut.values()], device, config),
    ):
        on_event("compile", 0, len(cases), "Inductor's kernels")
        compile_inductor([c.graph for c in cut.values()], device, config)
        for number, case in enumerate(cases):
            spent = time.perf_counter() - start
            if limit_s is not None and spent > limit_s:
                row = KernelRow(family=case.family, name=case.name, reason=f"Not begun: {spent:.0f} s had passed.")
            else:
                on_event("race", number, len(cases), case.name)
                left = None if limit_s is None else limit_s - spent
                row = _row(case, cut[case.name], device, dtype, config, Path(scratch), spare, on_event, left)
            rows = [*bench.rows, row]
            bench = bench.model_copy(update={"rows": rows, "seconds": time.perf_counter() - start})
            on_row(bench)
    return bench


def contenders(graph: Subgraph, config: Config) -> tuple[str, ...]:
    """Who races: an analysis's contenders and the peers. With max-autotune there, Inductor's two modes are two."""
    inductor = ("inductor-default", "inductor-autotune") if config.effort == "max" else ("inductor",)
    names = {op.name for op in graph.ops}
    has_gemm = bool(names & GEMMS) and not names & SOFTMAXES  # between attention's products there is the rest of it
    return ("eager", "framework", *inductor, "liger", OWN, *(YARDSTICKS if has_gemm and len(graph.ops) > 1 else ()))


def _row(
    case: Case,
    cut: _Cut,
    device: Device,
    dtype: str,
    config: Config,
    scratch: Path,
    spare: Spare,
    on_event: OnEvent,
    limit_s: float | None,
) -> KernelRow:
    start = time.perf_counter()
    graph = cut.graph
    saved = scratch / "inputs.pt"
    save(saved, cut.values(list(_tensors(case, device, dtype, config.seed))))
    try:
        raced = race(
            graph,
            saved,
            device,
            config.model_copy(update={"jobs": 1}),  # the kernels are being compiled already
            names=contenders(graph, config),
            spare=spare,
            limit_s=limit_s,
            on_event=on_event,
        )
    except OutOfTime:
        seconds = time.perf_counter() - start
        return KernelRow(family=case.family, name=case.name, reason=f"Stopped after {seconds:.0f} s: the limit.")
    finally:
        saved.unlink()
    guess, guesses = _guess(graph, device, config, raced)
    return KernelRow(
        family=case.family,
        name=case.name,
        inputs=[str(s) for s in graph.inputs],
        outputs=[str(s) for s in graph.output_specs],
        region=cut.region,
        bound_us=lower_bound(graph, device)[0],
        contenders=list(raced.contenders),
        ratios=_ratios(raced),
        noise=raced.noise,
        guess=guess,
        guesses=guesses,
        policy=raced.policy,
        seconds=time.perf_counter() - start,
    )


def _ratios(raced: RaceResult) -> dict[str, Interval]:
    own = raced.samples.get(OWN)
    return {name: ratio(times, own) for name, times in raced.samples.items() if own and name != OWN}


def _guess(graph: Subgraph, device: Device, config: Config, raced: RaceResult) -> tuple[int, int]:
    """The place of the winning variant among the template's guesses, and how many were tried."""
    won = next((c for c in raced.contenders if c.name == OWN and c.status == "ok"), None)
    if won is None:
        return 0, 0
    made = contender_named(OWN, [str(t) for t in config.templates], cache_dir=config.cache_dir)
    found = made.variants(graph, device, config.effort)
    listed = [] if isinstance(found, str) else [json.dumps(dict(v), sort_keys=True) for v in found]
    wanted = json.dumps(won.variant, sort_keys=True)
    return (listed.index(wanted) + 1 if wanted in listed else 0), won.tried


@dataclass(frozen=True, slots=True)
class _Cut:
    """A captured chain without its values, which are large and can be drawn again.

    Attributes:
        graph: the chain.
        region: family of the region that the finder makes of it, or "".
        captured: what Dynamo gave, without inputs.
        places: which argument of the chain each input of the captured graph is.
        names: nodes that the chain's inputs come from.
    """

    graph: Subgraph
    region: str
    captured: CapturedGraph
    places: tuple[int, ...]
    names: tuple[str, ...]

    def values(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The chain's inputs for these arguments."""
        captured = replace(self.captured, inputs=tuple(arguments[k] for k in self.places))
        found = activations.record(captured, set(self.names))
        return [found[name] for name in self.names]


def _cut(case: Case, device: Device, dtype: str, seed: int) -> _Cut:
    arguments = tuple(_tensors(case, device, dtype, seed))
    given = tuple(a for a, spec in zip(arguments, case.inputs, strict=True) if not spec.weight)
    captured = capture(Workload(_Chain(case, arguments).eval(), given, name=case.name))
    if len(captured.graphs) != 1:
        raise ContenderFailed(f"{case.name} can't be captured as one graph:", "; ".join(captured.warnings))
    found = captured.graphs[0]
    nodes, region = _whole(found.graph)
    graph, names = found.graph.subgraph(nodes)
    places = tuple(next(k for k, a in enumerate(arguments) if _same(a, value)) for value in found.inputs)
    return _Cut(graph, region, replace(found, inputs=()), places, names)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(*(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (a.detach(), b.detach())))


def _whole(graph: Graph) -> tuple[tuple[str, ...], str]:
    """All nodes of the chain. Where the finder makes one region of everything that computes, that region's nodes."""
    nodes = tuple(n.name for n in graph.nodes if n.is_op)
    computing = {n.name for n in graph.nodes if n.is_op and op_class(n.target) != "view"}
    fitting = [r for r in find_regions(graph) if computing <= set(r.nodes)]
    best = max(fitting, key=lambda r: len(r.nodes), default=None)
    return (best.nodes, best.family) if best else (nodes, "")


def _tensors(case: Case, device: Device, dtype: str, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator(device.kind).manual_seed(seed)
    for spec in case.inputs:
        yield _tensor(spec, device.kind, getattr(torch, spec.dtype or dtype), generator)


def _tensor(spec: Tensor, kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    order = spec.order or tuple(range(len(spec.shape)))
    shape = [spec.shape[k] for k in order]
    if spec.high:
        made = torch.randint(0, spec.high, shape, generator=generator, device=kind).to(dtype)
    else:
        made = torch.randn(shape, generator=generator, device=kind) * spec.scale
        made = (made.abs() + 0.5 if spec.positive else made).to(dtype)
    return made.permute([order.index(k) for k in range(len(order))])


def _settings(config: Config, dtype: str, kind: str) -> dict[str, object]:
    return {"effort": config.effort, "dtype": dtype, "device": kind, "jobs": config.jobs, "seed": config.seed}
