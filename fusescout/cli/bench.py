"""`fusescout bench`: the kernels of every family on known shapes, and a suite of whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusescout import environment
from fusescout.cli import options
from fusescout.errors import EXIT_GATE
from fusescout.errors import EXIT_OK
from fusescout.errors import UsageProblem

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure kernels, and whole models.")
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="All numbers; written again after every line.")
]

Limit = Annotated[
    float | None,
    typer.Option("--limit-s", metavar="X", help="Stop after so many seconds; what runs then has a row that says so."),
]


@app.command()
def kernels(
    context: typer.Context,
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this family; may be given again.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only cases whose name holds this; may be given again.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="quick|full|all", help="Which sizes. [default: full on a GPU, quick on a CPU]"),
    ] = None,
    limit_s: Limit = None,
    json_file: JsonFile = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    effort: options.Effort = None,
    templates: options.Templates = None,
    cache_dir: options.CacheDir = None,
    deadline_s: options.Deadline = None,
    jobs: options.Jobs = None,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Race every kernel family on known shapes: one table for each.

    Every case is captured, verified and timed exactly as a chain of a model is in an analysis. The dtype is bf16 on a
    GPU and fp32 on a CPU unless --dtype says otherwise.
    """
    terminal = options.terminal(context, quiet, verbose)
    config = options.config(context)
    environment.require_torch()
    from fusescout.bench import cases
    from fusescout.bench import tables
    from fusescout.workload import resolve_device

    kind = (resolve_device(config.device) or "cpu").split(":")[0]
    shapes = shapes or ("full" if kind == "cuda" else "quick")
    _known("--shapes", [shapes], cases.SHAPES)
    _seconds("--limit-s", limit_s)
    _known("--family", family or (), cases.families())
    chosen = [c for c in cases.select(shapes, family or ()) if not only or any(text in c.name for text in only)]
    if not chosen:
        raise UsageProblem(
            "No case is left.",
            "--family, --only and --shapes together choose none.",
            f"Families: {', '.join(cases.families())}.",
        )
    with terminal.stdout_reserved(), terminal.progress() as on_event:
        from fusescout.bench.kernels import run

        found = run(
            chosen,
            config,
            kind,
            config.dtype or ("bfloat16" if kind == "cuda" else "float32"),
            limit_s=limit_s,
            on_event=on_event,
            on_row=lambda bench: bench.save(json_file) if json_file else None,
        )
    terminal.out(tables.kernels(found))
    return EXIT_OK


def _known(option: str, given: list[str] | tuple[str, ...], valid: tuple[str, ...]) -> None:
    for name in given:
        if name not in valid:
            raise UsageProblem(f"{option} can't be {name}.", "", f"Allowed: {', '.join(valid)}.")


def _seconds(option: str, value: float | None) -> None:
    if value is not None and not value > 0:  # NaN neither
        raise UsageProblem(f"{option} can't be {value:g}.", "", "It is a number of seconds above 0.")


@app.command()
def models(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="MODELS", help="Only these models of the suite.")] = None,
    suite: Annotated[str, typer.Option(metavar="full|short", help="Which models, if none is named.")] = "full",
    dtypes: Annotated[
        str | None,
        typer.Option("--dtype", metavar="bf16,fp32", help="Several with commas. [default: bf16 on a GPU]"),
    ] = None,
    small: Annotated[
        bool | None, typer.Option("--small/--real", help="CPU sizes, or the real ones. [default: real on a GPU]")
    ] = None,
    each_s: Annotated[float, typer.Option("--each-s", metavar="X", help="Seconds that one model may take.")] = 900.0,
    limit_s: Limit = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Use what earlier runs cached; otherwise every analysis starts cold.")
    ] = False,
    json_file: JsonFile = None,
    keep: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Keep each model's run folder there.")
    ] = None,
    device: options.Device = None,
    effort: options.Effort = None,
    threshold: options.Threshold = None,
    top: options.Top = None,
    runs: options.Runs = None,
    rounds: options.Rounds = None,
    compose: options.Compose = None,
    allow_tf32: options.AllowTf32 = None,
    templates: options.Templates = None,
    cache_dir: options.CacheDir = None,
    deadline_s: options.Deadline = None,
    jobs: options.Jobs = None,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Analyse a suite of models and compare all ways to run each: one table.

    Each model runs in a process of its own; what fails or is late costs its row only.
    """
    from fusescout.bench import suite as known
    from fusescout.bench import tables
    from fusescout.config import SHORT_DTYPES

    terminal = options.terminal(context, quiet, verbose)
    config = options.config(context)
    environment.require_torch()
    _known("MODELS", names or (), known.names())
    _known("--suite", [suite], ("full", "short"))
    wanted = [SHORT_DTYPES.get(d, d) for d in (dtypes or config.dtype or "").split(",") if d]
    _known("--dtype", wanted, tuple(dict.fromkeys(SHORT_DTYPES.values())))
    _seconds("--each-s", each_s)
    _seconds("--limit-s", limit_s)
    if keep is not None and keep.exists() and not keep.is_dir():
        raise UsageProblem(f"-o can't be {keep}.", "It is a file.", "Name a folder; it is made if it isn't there.")
    with terminal.stdout_reserved(), terminal.progress() as on_event:
        from fusescout.bench.models import run
        from fusescout.workload import resolve_device

        place = resolve_device(config.device) or "cpu"
        gpu = place.startswith("cuda")
        found = run(
            known.select(names or (), suite),
            wanted or ["bfloat16" if gpu else "float32"],
            config,
            place,
            small=not gpu if small is None else small,
            each_s=each_s,
            limit_s=limit_s,
            output=keep,
            warm=warm,
            on_event=on_event,
            on_row=lambda bench: bench.save(json_file) if json_file else None,
        )
    terminal.out(tables.models(found))
    return EXIT_GATE if found.rows and all(row.reason for row in found.rows) else EXIT_OK
