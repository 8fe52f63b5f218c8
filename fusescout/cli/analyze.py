"""`fusescout analyze`: load a model, analyse it, write the run folder and print the report."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from fusescout import environment
from fusescout.cli import options
from fusescout.cli.runfolder import place_for
from fusescout.cli.runfolder import run_folder
from fusescout.cli.terminal import Terminal
from fusescout.errors import EXIT_GATE
from fusescout.errors import EXIT_OK
from fusescout.errors import NothingAnalysed
from fusescout.errors import UsageProblem
from fusescout.plan import Plan

if TYPE_CHECKING:
    from fusescout.config import Config
    from fusescout.session import EndToEnd
    from fusescout.session import Session

TARGET_HELP = "model.py, file.py:attribute, package.module:attribute, or a script that calls FuseScout."


def analyze(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="For the target's own code, unchanged.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    mode: options.Mode = None,
    effort: options.Effort = None,
    threshold: options.Threshold = None,
    min_gain: options.MinGain = None,
    fail_under: options.FailUnder = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Run folder. [default: fusescout-runs/<target>]"),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN", dir_okay=False, help="Put the plan into this file too, beside what other shapes put there."
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    runs: options.Runs = None,
    rounds: options.Rounds = None,
    top: options.Top = None,
    compose: options.Compose = None,
    allow_tf32: options.AllowTf32 = None,
    templates: options.Templates = None,
    cache_dir: options.CacheDir = None,
    use_cache: options.UseCache = None,
    deadline_s: options.Deadline = None,
    jobs: options.Jobs = None,
    include_source: options.IncludeSource = None,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Find what is worth fusing in a model, and prove it.

    Options go before TARGET; what follows it belongs to the target's own code. A script that calls fusescout.profile
    or fusescout.analyze itself runs as `python TARGET ARGUMENTS` would; the options reach those calls as settings.
    """
    terminal = options.terminal(context, quiet, verbose)
    config = options.config(context)
    environment.require_torch()
    from fusescout.target import is_script

    rest = list(arguments or ())
    if is_script(target):
        sessions = _run_script(context, target, rest[rest[:1] == ["--"] :], as_json)
        return _gate_script(terminal, config.fail_under, target, sessions)
    _check_order(context, target, rest)
    final = place_for(config.output, target, force)
    if into is not None and into.exists():
        Plan.load(into)  # one that can't be read is told now
    if config.use_cache:
        from fusescout.cache import Cache

        Cache(config.cache_dir).probe()
    text = _analyze(terminal, config, target, rest[rest[:1] == ["--"] :], final, as_json)
    terminal.out(text[0])
    if not as_json:
        terminal.note(f"Full report: {final / 'report.html'}")
    if into is not None:
        plan = Plan.load(into).merged(Plan.load(final)) if into.exists() else Plan.load(final)
        plan.save(into)
        terminal.note(f"{into} has {len(plan.entries)} entries now.")
    return gate(terminal, config.fail_under, text[1])


def _analyze(
    terminal: Terminal, config: Config, target: str, argv: list[str], final: Path, as_json: bool
) -> tuple[str, EndToEnd | None]:
    """Everything up to the finished run folder; gives the text for stdout and the end-to-end verdict."""
    from fusescout.workerpool import Spare

    reserved, bar = terminal.stdout_reserved(), terminal.progress()
    with reserved, run_folder(final) as folder, bar as on_event, Spare() as spare:
        spare.start()  # while torch is imported here and the model is made
        on_event("load", 0, 1, target)
        from fusescout.target import load

        workload = load(target, argv=argv, device=config.device, dtype=config.dtype, mode=config.mode, seed=config.seed)
        on_event("load", 1, 1, target)
        from fusescout.analysis import run
        from fusescout.api import write
        from fusescout.report import render

        outcome = run(workload, config, on_event, folder=folder.staging, spare=spare)
        command = shlex.join(["fusescout", *sys.argv[1:]])
        session = _relocated(outcome.session, folder.staging).model_copy(
            update={
                "settings": {**outcome.session.settings, "run_dir": str(final)},
                "workload": outcome.session.workload.model_copy(update={"command": command}),
            }
        )
        write(dataclasses.replace(outcome, session=session), folder.staging)
    if as_json:
        return render(session, "json"), session.end_to_end
    return render(session, "text", width=terminal.width(), color=terminal.color()), session.end_to_end


def _relocated(session: Session, staging: Path) -> Session:
    """Paths in the run folder become relative to it: it moves to its final place, and perhaps elsewhere later."""
    prefix = json.dumps(f"{staging}/")[1:-1]
    return type(session).model_validate_json(session.model_dump_json().replace(prefix, ""))


def gate(terminal: Terminal, fail_under: float | None, verdict: EndToEnd | None) -> int:
    """`EXIT_GATE` if the speed-up's lower end is below `fail_under`; no patch is a speed-up of 1.

    Nor does a model that is left to `torch.compile` count as faster: that is no gain of a patch's.
    """
    if fail_under is None:
        return EXIT_OK
    reached = verdict.speedup.low if verdict and verdict.speedup and not verdict.left_to else 1.0
    if reached >= fail_under:
        return EXIT_OK
    terminal.warn(f"The end-to-end speed-up is at least {reached:.3f}, below --fail-under {fail_under:g}.")
    return EXIT_GATE


def _gate_script(terminal: Terminal, fail_under: float | None, target: str, sessions: list[Session]) -> int:
    """`gate` for each analysis that a script made."""
    if sessions:
        return max(gate(terminal, fail_under, session.end_to_end) for session in sessions)
    if fail_under is not None:
        raise NothingAnalysed(target)
    terminal.note(f"{target} ran and analysed nothing.")
    return EXIT_OK


def _run_script(context: typer.Context, target: str, argv: list[str], as_json: bool) -> list[Session]:
    """Run a script that calls FuseScout itself; this command's options reach it as environment variables.

    Returns:
        The sessions of its analyses.
    """
    from fusescout.api import listening
    from fusescout.config import to_environment
    from fusescout.target import run_script

    if as_json:
        raise UsageProblem(
            f"--json needs a model, and {target} is a script.",
            "A script that calls FuseScout decides itself what it prints.",
            "Leave out --json and read the session.json that it writes.",
        )
    before = dict(os.environ)
    os.environ.update(to_environment(options.given(context)))
    try:
        with listening() as sessions:
            run_script(Path(target), argv)
        return sessions
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check_order(context: typer.Context, target: str, rest: list[str]) -> None:
    """An option of ours after TARGET would silently go to the model's file; `--` says that it's meant so."""
    known = {name for p in context.command.params for name in getattr(p, "opts", ()) if name.startswith("-")}
    stray = next((a for a in rest if a.partition("=")[0] in known), None) if rest[:1] != ["--"] else None
    if stray:
        raise UsageProblem(
            f"{stray} stands after {target}.",
            "What follows the target is passed to the target's own code.",
            f"Put {stray} before {target}; if it is meant for the target's code, put -- before it.",
        )
