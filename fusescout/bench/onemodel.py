"""The child process of the model bench: builds one model of the suite, analyses it and leaves the run folder.

`python -m fusescout.bench.onemodel` reads one JSON request on stdin. What goes wrong ends the process with a message on
stderr, which the parent quotes.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

PROGRESS = "progress.txt"
"""In the run folder: seconds since the start and what was begun then, a line each."""


def main() -> None:
    import torch

    from fusescout.analysis import run
    from fusescout.api import write
    from fusescout.config import Config
    from fusescout.workload import build

    request = json.load(sys.stdin)
    config = Config.model_validate(request["config"])
    module, _, function = request["builder"].partition(":")
    torch.manual_seed(config.seed)
    model, inputs = getattr(import_module(f"fusescout.bench.{module}"), function)(**request["arguments"])
    workload = build(
        model, (), inputs, device=config.device, dtype=config.dtype, mode=config.mode, name=request["name"]
    )
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with (folder / PROGRESS).open("w", buffering=1) as progress:

        def on_event(stage: str, done: int, total: int, text: str) -> None:
            progress.write(f"{time.perf_counter() - start:.1f} s: {stage} {done}/{total} {text}\n")

        write(run(workload, config, on_event, folder), folder)


if __name__ == "__main__":
    main()
