"""The analysis as a Python call, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from fusescout.config import Config
from fusescout.config import load

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fusescout.analysis import Outcome
    from fusescout.session import Session

_listeners: list[list[Session]] = []


def analyze(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str | None = None,
    output: str | Path | None = None,
    on_event: Callable[[str, int, int, str], None] | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Outcome:
    """Analyse a live model on the inputs of one call.

    Args:
        model: it is put into eval() or train() as the mode says, and is otherwise left as it was found.
        args, kwargs: what forward() gets.
        loss: in training, makes the scalar to differentiate from the output.
        name: what reports call it; default its class name.
        output: folder for session.json, report.html, plan.json, trace and repro scripts; None writes nothing.
        on_event: hears (stage, done, total, detail).
        config: all settings at once; else `settings` over the environment over `[tool.fusescout]`.
        settings: fields of `Config`, such as effort="quick".

    Returns:
        `.session` (everything a report shows) and `.plan` (what `fusescout.patch` takes).

    Raises:
        FuseScoutError: a setting, the environment or the model itself is at fault; says what to do.
    """
    from fusescout.admission import check_model
    from fusescout.analysis import run
    from fusescout.workload import build

    check_model(model, args)
    config = config or load(settings)
    folder = Path(output) if output is not None else config.output
    flags = [(module, module.training) for module in model.modules()]
    try:
        workload = build(
            model,
            args,
            kwargs,
            device=config.device if config.device != "auto" else None,
            dtype=config.dtype,
            mode=config.mode,
            name=name or type(model).__name__,
            loss=loss,
        )
        outcome = run(workload, config, on_event or _silent, folder)
    finally:
        for module, training in flags:
            module.training = training
    if folder is not None:
        write(outcome, folder)
    for heard in _listeners:
        heard.append(outcome.session)
    return outcome


@contextmanager
def listening() -> Iterator[list[Session]]:
    """The sessions of all calls of `analyze` in this process while the block runs, in the order they end."""
    heard: list[Session] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.pop()


def write(outcome: Outcome, folder: Path) -> None:
    """Put session, plan and the HTML report into a folder; each file appears whole or not at all."""
    from fusescout.report import render
    from fusescout.session import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    outcome.session.save(folder / "session.json")
    outcome.plan.save(folder / "plan.json")
    write_atomic(folder / "report.html", render(outcome.session, "html").encode())


def _silent(_stage: str, _done: int, _total: int, _detail: str) -> None:
    return None
