"""Runs the model suite: each model is analysed in a child process with a deadline, so that none can end the others.

A row is taken from the session that the analysis leaves, so the bench shows what `fusescout analyze` would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusescout.bench.onemodel import PROGRESS
from fusescout.bench.records import ModelBench
from fusescout.bench.records import ModelRow
from fusescout.bench.suite import Model
from fusescout.config import Config
from fusescout.errors import MissingPackage
from fusescout.session import Rival
from fusescout.session import Session

OnEvent = Callable[[str, int, int, str], None]


def run(
    models: Sequence[Model],
    dtypes: Sequence[str],
    config: Config,
    device: str,
    *,
    small: bool,
    each_s: float = 900.0,
    limit_s: float | None = None,
    output: Path | None = None,
    warm: bool = False,
    on_event: OnEvent = lambda stage, done, total, text: None,
    on_row: Callable[[ModelBench], None] = lambda bench: None,
) -> ModelBench:
    """Analyse every model at every dtype.

    Args:
        models: which, in order.
        dtypes: dtype names.
        config: settings of the analyses.
        device: "cpu", "cuda" or "cuda:N".
        small: CPU sizes instead of the real ones.
        each_s: seconds that one analysis may take.
        limit_s: seconds after which no further one is begun, and the one that runs is stopped.
        output: keeps each analysis' session, plan and report in a folder of its own.
        warm: use the caches of earlier runs; by default each analysis starts with empty ones.
        on_event: hears (stage, done, total, detail).
        on_row: gets everything so far after every model.

    Raises:
        MissingPackage: a model needs transformers.
    """
    if any(m.builder.startswith("hub:") for m in models) and find_spec("transformers") is None:
        raise MissingPackage("transformers", "bench")
    start = time.perf_counter()
    bench = ModelBench(settings=config.model_dump(mode="json", exclude={"cache_dir", "output"}) | {"small": small})
    work = [(model, dtype) for dtype in dtypes for model in models]
    for number, (model, dtype) in enumerate(work):
        on_event("models", number, len(work), f"{model.name} {dtype}")
        spent = time.perf_counter() - start
        if limit_s is not None and spent > limit_s:
            row, session = _empty(model, dtype, f"Not begun: {spent:.0f} s had passed."), None
        else:
            left = each_s if limit_s is None else min(each_s, limit_s - spent)
            row, session = _analysed(model, dtype, config, device, small, left, output, warm)
        bench = bench.model_copy(
            update={
                "environment": bench.environment or (session.environment if session else None),
                "rows": [*bench.rows, row],
                "seconds": time.perf_counter() - start,
            }
        )
        on_row(bench)
    on_event("models", len(work), len(work), "done")
    return bench


def _analysed(
    model: Model, dtype: str, config: Config, device: str, small: bool, each_s: float, output: Path | None, warm: bool
) -> tuple[ModelRow, Session | None]:
    with tempfile.TemporaryDirectory(prefix="fusescout-") as scratch:
        folder = output / f"{model.name}-{dtype}" if output else Path(scratch, "run")
        cache = {} if warm else {"cache_dir": Path(scratch, "cache")}
        settings = config.model_copy(update={"device": device, "dtype": dtype, "output": None, **cache})
        request = {
            "builder": model.builder,
            "arguments": model.arguments(small),
            "name": model.name,
            "config": settings.model_dump(mode="json"),
            "folder": str(folder),
        }
        compilers = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        reason = _child(request, {} if warm else compilers, each_s)
        if reason:
            return _empty(model, dtype, reason), None
        session = Session.load(folder)
        return row_of(model.name, dtype, session), session


def _child(request: Mapping[str, Any], environment: dict[str, str], each_s: float) -> str:
    """Run one analysis to its end; gives the reason why there is no session, or ""."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "fusescout.bench.onemodel"],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            process.communicate(json.dumps(request).encode(), timeout=each_s)
        except subprocess.TimeoutExpired:
            return f"It took more than {each_s:.0f} s and was stopped{_last_event(Path(request['folder']))}."
        finally:
            with suppress(ProcessLookupError):  # it and all it started are gone
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return ""
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
        lines = errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        return f"It ended with {how}: {lines[-1][:300] if lines else 'no message'}"


def _last_event(folder: Path) -> str:
    """What an analysis that was stopped had begun last."""
    with suppress(OSError):
        lines = (folder / PROGRESS).read_text().splitlines()
        return f"; begun last, after {lines[-1]}" if lines else ""
    return ""


def _empty(model: Model, dtype: str, reason: str) -> ModelRow:
    return ModelRow(model=model.name, dtype=dtype, reason=reason)


def row_of(model: str, dtype: str, session: Session) -> ModelRow:
    """What the table shows of one session."""
    end, info = session.end_to_end, session.workload
    sites: Counter[str] = Counter()
    for candidate in session.candidates:
        if candidate.status == "accepted":
            sites[candidate.family] += len(candidate.sites)
    facts: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "inputs": info.inputs,
        "parameters": info.parameters,
        "coverage": session.profile.coverage,
        "raced": len(session.candidates),
        "accepted": dict(sites),
        "rejected": len(session.rejections),
        "analysis_s": sum(session.stages_s.values()),
        "verdict": session.verdict,
    }
    if end is None:
        return ModelRow(**facts)
    eager = Rival(name="eager", time=end.baseline, peak_bytes=end.baseline_peak_bytes)
    return ModelRow(
        **facts,
        ways=[eager, *end.rivals],
        patched=end.left_to or (f"patched, rest {end.composition}" if end.patched else ""),
        speedup=end.speedup,
        speedup_over_rival=end.speedup_over_rival,
        rival=end.rival,
        verified=end.verified,
        compile_s=max((r.compile_s for r in end.rivals if r.name.startswith("compile")), default=0.0),
    )
