"""The child process of the model bench: builds one model of the suite, analyses it and leaves the run folder.

`python -m fusescout.bench.onemodel` reads one JSON request on stdin. What goes wrong ends the process with a message on
stderr, which the parent quotes.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


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
    write(run(workload, config, lambda stage, done, total, text: None, folder), folder)


if __name__ == "__main__":
    main()
