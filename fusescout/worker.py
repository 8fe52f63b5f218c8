"""The child process that builds, checks and times contenders: what crashes or hangs here ends nothing but this process.

`python -m fusescout.worker` serves one JSON request a line on what was stdin and answers on what was stdout; both are
moved away first, so that a stray print of a compiler or a kernel can't corrupt the protocol. A CUDA error that sticks
is answered and then ends the process. Requests and their results are the methods of `Session`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO
from typing import Any

from fusescout.contenders import PEERS
from fusescout.contenders import all_contenders
from fusescout.contenders import contender_named
from fusescout.contenders.base import Built
from fusescout.contenders.base import Contender
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.forks import count_done
from fusescout.ir import Subgraph

FOR_LATER = 10
"""Priority ("nice") of what is compiled ahead."""


class Refused(Exception):
    """A request that could not be done; `kind` is the status it comes to."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(reason)


@dataclass(slots=True)
class _Handle:
    contender: str
    built: Built


class Session:
    """State of one worker: a sub-graph with its inputs, and what was built for it."""

    def __init__(self) -> None:
        self.handles: dict[int, _Handle] = {}

    def ready(self, device: str = "cpu") -> dict[str, Any]:
        """Answer, which says that all imports are done; on a GPU its context and libraries are loaded before."""
        if device != "cpu":
            import torch

            ones = torch.ones(16, 16, device=device)
            (ones @ ones).double().sum().item()
        return {"pid": os.getpid()}

    def open(
        self,
        subgraph: str,
        device: dict[str, Any],
        inputs: str | None,
        seed: int,
        templates: Sequence[str],
        cache_dir: str,
        numerics: dict[str, Any],
        gradients: bool = False,
        compile_only: bool = False,
    ) -> dict[str, Any]:
        """Take a sub-graph. With `compile_only` no inputs are loaded and the device isn't touched."""
        import torch

        from fusescout import numerics as settings

        settings.apply(numerics)
        self.graph, self.device = Subgraph.from_json(subgraph), Device(**device)
        self.gradients, self.handles = gradients, {}
        self._free()
        self.cache_dir = Path(cache_dir)
        self.contenders = all_contenders(templates, cold=True, cache_dir=self.cache_dir)
        if not compile_only:
            from fusescout.verify import Verifier

            captured = torch.load(inputs, map_location=self.device.kind, weights_only=True) if inputs else None
            try:
                self.verifier = Verifier(self.graph, captured, self.device.kind, seed, gradients)
            except ValueError as error:
                raise Refused("unsupported", f"The sub-graph can't be run on its own: {error}.") from error
        return {"pid": os.getpid()}

    def _free(self) -> None:
        """Give back what the sub-graph before this one held on the device."""
        import torch

        self.__dict__.pop("verifier", None)
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no context

    def compile_ahead(
        self, subgraphs: list[str], device: dict[str, Any], templates: list[str], cache_dir: str, effort: str, jobs: int
    ) -> dict[str, Any]:
        """Compile the TileLang variants of many sub-graphs into the disk cache; the race shows failures.

        In copies of this process: lowering holds the interpreter lock, 0.4 to 1.8 s a GEMM; threads gained nothing.
        """
        _stand_back()
        where = Device(**device)
        made = contender_named("tilelang", templates, cache_dir=Path(cache_dir))
        work = []
        for text in subgraphs:
            graph = Subgraph.from_json(text)
            found = made.variants(graph, where, effort)
            work += [] if isinstance(found, str) else [(graph, v) for v in found]

        def build(job: tuple[Subgraph, Mapping[str, Any]]) -> bool:
            try:
                made.build(*job, where)
            except ContenderFailed:
                return False
            return True

        return {"compiled": count_done(build, work, jobs), "of": len(work)}

    def compile(self, contender: str, variant: dict[str, Any]) -> dict[str, Any]:
        """Compile a variant into the disk cache and run nothing."""
        from fusescout.contenders.inductor import Inductor

        _stand_back()
        made = self._contender(contender)
        if not isinstance(made, Inductor):
            raise Refused("unsupported", f"{contender} is not compiled so.")
        return {"compile_s": made.compile(self.graph, variant, self.device)}

    def variants(self, contender: str, effort: str) -> list[dict[str, Any]]:
        found = self._contender(contender).variants(self.graph, self.device, effort)
        if isinstance(found, str):
            raise Refused("unsupported", found)
        return [dict(v) for v in found]

    def build(self, contender: str, variant: dict[str, Any], handle: int) -> dict[str, Any]:
        start = time.perf_counter()
        built = self._contender(contender).build(self.graph, variant, self.device)
        self.handles[handle] = _Handle(contender, built)
        compile_s = built.compile_s + self._preparing_s(built)
        return {"compile_s": compile_s, "build_s": time.perf_counter() - start, "source": built.source}

    def _preparing_s(self, built: Built) -> float:
        """Seconds to make a contender's constants once; they belong to its compile time, not to its samples."""
        if built.parts is None or not hasattr(self, "verifier"):
            return 0.0
        import torch

        inputs = self.verifier.inputs.make("normal")
        start = time.perf_counter()
        built.parts.prepare([inputs[k] for k in built.parts.split.sources])
        if self.device.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def check(self, handle: int, level: str) -> dict[str, Any]:
        outcome = self.verifier.check(self.handles[handle].built.run, level)
        return {"reason": outcome.reason, "status": outcome.status, "stats": outcome.stats.model_dump()}

    def time(self, handles: list[int], case: str, rounds: int, budget_s: float) -> dict[str, Any]:
        """Interleaved samples of the handles; the first is the baseline."""
        from fusescout.measure import interleave

        inputs = self.verifier.inputs.make(case)
        calls = [self._call(self.handles[h].built.run) for h in handles]
        timings = interleave(
            calls, inputs, self.device.kind, rounds=rounds, budget_s=budget_s, graphs=not self.gradients
        )
        return {
            "samples": timings.samples,
            "policy": timings.policy,
            "dropped": {str(handles[k]): why for k, why in timings.dropped.items()},
        }

    def describe(self, contender: str, variant: dict[str, Any]) -> dict[str, Any]:
        """Upkeep and repro script of a variant."""
        made = self._contender(contender)
        upkeep = made.upkeep(self.graph, variant)
        return {
            "lines": upkeep.lines,
            "rests_on": list(upkeep.rests_on),
            "backends": list(upkeep.backends),
            "repro": made.repro(self.graph, variant, self.device),
        }

    def drop(self, handles: list[int]) -> None:
        for handle in handles:
            self.handles.pop(handle, None)

    def _contender(self, name: str) -> Contender:
        if name in PEERS and name not in self.contenders:
            self.contenders[name] = contender_named(name, cold=True, cache_dir=self.cache_dir)
        found = self.contenders[name]
        if isinstance(found, str):
            raise Refused("unsupported", found)
        return found

    def _call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """One call as it is timed: without gradients, or forward and backward."""
        import torch

        if not self.gradients:
            return torch.no_grad()(run)
        from fusescout.verify import gradients

        wanted = [k for k, s in enumerate(self.graph.inputs) if s.requires_grad]
        return lambda inputs: gradients(run, inputs, wanted)


REQUESTS = ("ready", "open", "compile_ahead", "compile", "variants", "build", "check", "time", "describe", "drop")


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the stream ends or the CUDA context is broken."""
    session = Session()
    for line in requests:
        request = json.loads(line)
        name = request.pop("request")
        broken = False
        try:
            if name not in REQUESTS:
                raise Refused("failed", f"There is no request {name}.")
            answer: dict[str, Any] = {"ok": True, "result": getattr(session, name)(**request)}
        except Refused as error:
            answer = {"ok": False, "kind": error.kind, "reason": error.reason}
        except ContenderFailed as error:
            answer = {"ok": False, "kind": "failed", "reason": str(error)}
        except Exception as error:  # isolation boundary: the parent gets the reason and goes on
            answer = {"ok": False, "kind": "failed", "reason": _reason(error)}
        if not answer["ok"]:
            broken = _context_broken()
            answer["kind"] = "crashed" if broken else answer["kind"]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if broken:
            return


def _stand_back() -> None:
    """Leave the cores to whoever needs them now: what this process does is for later."""
    os.setpriority(os.PRIO_PROCESS, 0, FOR_LATER)


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400] if lines else 'no message'}"


def _context_broken() -> bool:
    """Whether CUDA has an error that every later call in this process will repeat."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # isolation boundary: that it raises is the answer
        return True
    return False


def _die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if os.getpgid(0) == os.getpid():
        threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    all_contenders(())  # imports take seconds: a worker that was started ahead does them before it is asked
    for compiler in ("tilelang", "torch._inductor.compile_fx"):
        with suppress(ImportError):  # the contender that needs it says so, with the reason
            import_module(compiler)
    serve(requests, answers)
    sys.stderr.flush()
    os._exit(0)  # atexit hooks of a broken CUDA context can hang


if __name__ == "__main__":
    main()
