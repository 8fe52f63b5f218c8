"""The parent's side of `worker.py`: children with a deadline for each request, killed with all they started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress
from typing import Any

from fusescout.errors import WorkerDied
from fusescout.errors import WorkerRefused
from fusescout.errors import WorkerTimeout

STARTUP_S = 120.0
"""Importing torch and TileLang on a busy machine, and making a CUDA context."""


class Worker:
    """One child process. Use it as a context manager, or call `close`.

    Args:
        environment: variables added to the child's environment.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fusescout.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: str, deadline_s: float, **arguments: Any) -> Any:
        """Send one request and wait for its result.

        Raises:
            WorkerRefused: the child answered that it can't; it lives on, unless its kind is "crashed".
            WorkerTimeout: no answer in `deadline_s` seconds; the child was killed.
            WorkerDied: the child is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"request": request, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._died(request) from error
        answer = json.loads(self._line(request, time.monotonic() + deadline_s, deadline_s))
        if answer["ok"]:
            return answer["result"]
        if answer["kind"] == "crashed":
            self.close()
        raise WorkerRefused(answer["kind"], answer["reason"])

    def kill(self) -> None:
        """Kill the child and everything it started; a call that another thread waits for raises `WorkerDied`."""
        with suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the child and give back its pipes."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):  # unsent bytes to a dead child
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, request: str, until: float, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerTimeout(request, deadline_s)
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise self._died(request)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self, request: str) -> WorkerDied:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        tail = ""
        if not self._errors.closed:
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            tail = lines[-1][:300] if lines else ""
        self.close()
        return WorkerDied(request, code, tail)


class Spare:
    """Keeps an idle worker for the next race, for starting one takes seconds. Use it as a context manager."""

    def __init__(self) -> None:
        self._idle: Worker | None = None

    def start(self) -> None:
        """Start a worker ahead: it imports torch and TileLang, 4 s of one core, while the caller does other things."""
        self._idle = self.take()

    def settle(self) -> None:
        """Wait until a worker that was started ahead no longer needs a core."""
        if self._idle is not None:
            with suppress(WorkerRefused, WorkerTimeout, WorkerDied):  # the race will start another and say why
                self._idle.call("ready", STARTUP_S)

    @contextmanager
    def getting_ready(self, device: str) -> Iterator[None]:
        """Have a worker that was started ahead load the device's libraries while the block runs."""
        idle = self._idle

        def load() -> None:
            if idle is not None:
                with suppress(WorkerRefused, WorkerTimeout, WorkerDied):  # the race will start another and say why
                    idle.call("ready", STARTUP_S, device=device)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def take(self) -> Worker:
        """The idle worker if it lives, else a new one."""
        idle, self._idle = self._idle, None
        return idle if idle is not None and idle.alive else Worker()

    def give(self, worker: Worker) -> None:
        """Keep a worker that has answered all it was asked."""
        if self._idle is not None or not worker.alive:
            worker.close()
        else:
            self._idle = worker

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile_many(
    opening: Mapping[str, Any], jobs: Sequence[tuple[str, Mapping[str, Any]]], workers: int, deadline_s: float
) -> list[dict[str, Any]]:
    """Build variants in extra children that only fill the compilers' disk caches; results come in the order of `jobs`.

    Args:
        opening: arguments of the "open" request.
        jobs: (contender, variant) pairs.
        workers: children at a time.
        deadline_s: for each job; a child that dies or hangs costs that job only.

    Returns:
        For each job `{"compile_s": …}`, or `{"kind": status, "reason": …}`.
    """
    results: list[dict[str, Any]] = [{"kind": "failed", "reason": "It was not compiled."} for _ in jobs]
    waiting = iter(range(len(jobs)))
    lock = threading.Lock()

    def serve() -> None:
        worker: Worker | None = None
        try:
            while True:
                with lock:
                    k = next(waiting, None)
                if k is None:
                    return
                try:
                    if worker is None or not worker.alive:
                        worker = Worker()
                        worker.call("open", STARTUP_S, **{**opening, "compile_only": True})
                    contender, variant = jobs[k]
                    found = worker.call("build", deadline_s, contender=contender, variant=dict(variant), handle=0)
                    results[k] = {"compile_s": found["build_s"]}
                except (WorkerRefused, WorkerTimeout, WorkerDied) as error:
                    results[k] = {"kind": error.kind, "reason": str(error)}
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=serve) for _ in range(max(1, min(workers, len(jobs))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
