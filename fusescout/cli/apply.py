"""`fusescout apply`: patch a model from a plan, verify it and measure it end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusescout import environment
from fusescout.cli import options
from fusescout.cli.analyze import TARGET_HELP
from fusescout.cli.analyze import gate
from fusescout.errors import EXIT_GATE


def apply(
    context: typer.Context,
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan.json, or the run folder it is in.", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="For the target's own code, unchanged.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    mode: options.Mode = None,
    rounds: options.Rounds = None,
    min_gain: options.MinGain = None,
    compose: options.Compose = None,
    allow_tf32: options.AllowTf32 = None,
    seed: options.Seed = None,
    fail_under: options.FailUnder = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Patch a model as a plan says, check it against the unpatched one, and measure both.

    Nothing is changed on disk. In your own code the same is `fusescout.patch(model, "plan.json")`.
    """
    terminal = options.terminal(context, quiet, verbose)
    environment.require_torch()
    from fusescout.plan import LAYOUTS
    from fusescout.plan import Plan

    loaded = Plan.load(plan)
    config = options.config(context, {"device": loaded.device_kind, "mode": loaded.mode})
    rest = list(arguments or ())
    with terminal.stdout_reserved(), terminal.progress() as on_event:
        from fusescout.endtoend import compare
        from fusescout.patching import patch
        from fusescout.target import load

        workload = load(
            target,
            argv=rest[rest[:1] == ["--"] :],
            device=config.device,
            dtype=config.dtype,
            mode=config.mode,
            seed=config.seed,
        )
        # Refuses a plan that was measured on another device, before anything is timed.
        patch(workload.model, loaded).undo()
        if loaded.is_empty:  # the whole model is left to one of the framework's ways, or stays as it is
            config = config.model_copy(update={"compose": loaded.composition})
        verdict, kept = compare(workload, loaded, config, on_event, may_leave=loaded.is_empty)
    if as_json:
        terminal.out(verdict.model_dump_json(indent=1))
    else:
        terminal.out(verdict.verdict)
        layout = "" if kept.memory_format == "preserved" else f", {LAYOUTS[kept.memory_format]}"
        layout += ", what no input decides computed once" if kept.computed_once else ""
        hold = f"{len(kept.entries)} of {len(loaded.entries)} plan entries hold"
        terminal.out(f"{hold}, {verdict.sites_patched} sites patched{layout}.")
        for name in verdict.dropped:
            terminal.out(f"dropped: {name}")
        if not kept.is_empty or kept.composition != "eager":
            terminal.note(f'In your code: fusescout.patch(model, "{plan}")')
    if verdict.dropped or (not loaded.is_empty and not verdict.verified):
        return EXIT_GATE
    return gate(terminal, config.fail_under, verdict)
