"""The races of all candidates: which are run, which are known from an earlier run, which of those are proved again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from fusescout.candidates import Candidate
from fusescout.capture import Capture
from fusescout.capture import activations
from fusescout.config import Config
from fusescout.contenders import NAMES
from fusescout.decide import decide
from fusescout.decide import implausible
from fusescout.decide import select
from fusescout.device import Device
from fusescout.endtoend import OnEvent
from fusescout.errors import NO_SPACE
from fusescout.errors import CacheUnwritable
from fusescout.errors import DiskFull
from fusescout.errors import in_a_line
from fusescout.inputs import save
from fusescout.prefetch import chains_ahead
from fusescout.prefetch import compiling_ahead
from fusescout.prefetch import importing_ahead
from fusescout.session import ContenderResult
from fusescout.tune import RaceResult
from fusescout.tune import forget_race
from fusescout.tune import race
from fusescout.tune import stored_race
from fusescout.workerpool import Spare

COMPILERS = ("tilelang", "torch._inductor.compile_fx")
"""What the patched model will be built with."""
DISTURBED = 0.1
"""Eager's time over its own in the rounds of one race, from which the race is not believed a second time."""


def race_all(
    candidates: Sequence[Candidate],
    captured: Capture,
    device: Device,
    config: Config,
    on_event: OnEvent,
    folder: Path | None,
    spare: Spare,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, RaceResult]:
    """Race every candidate, by id; a stored result stands if its winner would not be patched, or verifies again here.

    Args:
        candidates: best first.
        captured: gives the inputs each chain has in the model.
        device: where it all runs.
        config: all settings.
        on_event: hears of progress.
        folder: where generated sources and repro scripts are kept; None keeps none.
        spare: lends the worker.
        meanwhile: is called before the first race, while its kernels are compiled. It may use the device.
    """
    known = {c.id: _known(c, device, config) for c in candidates}
    settled = _settled(candidates, known, config, device)
    unknown = [c.subgraph for c in candidates if known[c.id] is None]
    races: dict[str, RaceResult] = {}
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fusescout-"))
        stack.enter_context(compiling_ahead(unknown, device, config))
        if meanwhile is not None:
            with chains_ahead(unknown, device, config):
                meanwhile()
        stack.enter_context(importing_ahead(() if unknown and device.kind == "cpu" else COMPILERS))
        for number, candidate in enumerate(candidates):
            on_event("race", number, len(candidates), " ".join(candidate.subgraph.chain))
            raced = settled.get(candidate.id)
            if raced is None:
                inputs = Path(scratch) / f"{candidate.id}.pt"
                try:
                    _save_inputs(candidate, captured, inputs)
                    raced = race(
                        candidate.subgraph,
                        inputs,
                        device,
                        config.model_copy(update={"jobs": 1}),  # the kernels are being compiled already
                        spare=spare,
                        on_event=lambda _s, _d, _t, text, n=number: on_event("race", n, len(candidates), text),  # type: ignore[misc]
                    )
                except (CacheUnwritable, DiskFull):
                    raise
                except Exception as error:  # isolation boundary: this chain stays as it is, others are raced
                    raced = _not_raced(in_a_line(error))
                inputs.unlink(missing_ok=True)
                _forgotten(candidate, raced, device, config)
                if full := _no_space(raced):
                    raise full
            races[candidate.id] = _keep(raced, folder / "kernels" / candidate.id) if folder else raced
    return races


def _not_raced(reason: str) -> RaceResult:
    """The race of a chain that could not be run."""
    return RaceResult(tuple(ContenderResult(name=n, status="failed", reason=reason) for n in NAMES))


def _known(candidate: Candidate, device: Device, config: Config) -> RaceResult | None:
    """The stored race, unless a disturbed machine spoiled it: then it is forgotten, and run again."""
    stored = stored_race(candidate.subgraph, device, config)
    if stored is None:
        return None
    return None if _forgotten(candidate, stored, device, config) else stored


def _forgotten(candidate: Candidate, raced: RaceResult, device: Device, config: Config) -> bool:
    """Whether a disturbed machine or a full disk spoiled a race; then nobody will meet it again."""
    eager = raced.samples.get("eager")
    shaken = raced.noise is not None and abs(raced.noise.mid - 1.0) > DISTURBED
    spoiled = shaken or bool(eager and implausible(candidate, median(eager))) or _no_space(raced) is not None
    if spoiled:
        forget_race(candidate.subgraph, device, config)
    return spoiled


def _no_space(raced: RaceResult) -> DiskFull | None:
    """What to raise if a contender failed for want of room on a disk: its absence says nothing about it."""
    lacking = (c for c in raced.contenders if NO_SPACE in c.reason)
    return next((DiskFull(f"the contender {c.name}", c.reason) for c in lacking), None)


def _settled(
    candidates: Sequence[Candidate], known: Mapping[str, RaceResult | None], config: Config, device: Device
) -> dict[str, RaceResult]:
    """Stored results whose winner will not be patched: there is nothing to verify again.

    Which chains are patched is decided among all of them, so a chain that another one covers is settled only where
    everything is known.
    """
    stored = {name: r for name, r in known.items() if r is not None}
    decisions = {
        c.id: decide(c, stored[c.id].contenders, stored[c.id].samples, config.threshold)
        for c in candidates
        if c.id in stored
    }
    if len(stored) == len(candidates):
        bandwidth = device.copy_bytes_per_s
        ways = [select(candidates, decisions, compiled=c, copy_bytes_per_s=bandwidth) for c in (False, True)]
        patched = {c.id for way in ways for c, _ in way}
    else:
        patched = {name for name, decision in decisions.items() if decision.accepted}
    return {name: r for name, r in stored.items() if name not in patched}


def _save_inputs(candidate: Candidate, captured: Capture, path: Path) -> None:
    """The inputs of the candidate's first site, as its model has them."""
    graph = next(g for g in captured.graphs if g.index == candidate.sites[0].graph)
    values = activations.record(graph, set(candidate.inputs))
    save(path, [values[name] for name in candidate.inputs])


def _keep(raced: RaceResult, folder: Path) -> RaceResult:
    """Write each contender's generated source and its stand-alone script, and note the script's path."""
    results = []
    for result in raced.contenders:
        for suffix, texts in (("repro.py", raced.scripts), ("source.txt", raced.sources)):
            if text := texts.get(result.name):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{result.name}.{suffix}").write_text(text, encoding="utf-8")
        has_script = bool(raced.scripts.get(result.name))
        results.append(
            result.model_copy(update={"repro": str(folder / f"{result.name}.repro.py")}) if has_script else result
        )
    return replace(raced, contenders=tuple(results))
