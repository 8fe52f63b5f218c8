"""Work shared among forked copies of this process: for pure Python and compilers that hold the interpreter lock.

A copy has all imports at once and shares their memory. Fork only where CUDA and OpenMP have not been used yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import TypeVar

Job = TypeVar("Job")
TOKEN_BYTES = 4


def count_done(work: Callable[[Job], bool], jobs: Sequence[Job], processes: int) -> int:
    """Call `work` on every job in up to `processes` copies; one that dies costs the job it had.

    Returns:
        How many calls returned True.
    """
    tokens, give = os.pipe()
    answers, answer = os.pipe()
    copies = []
    for _ in range(min(processes, len(jobs))):
        if (pid := os.fork()) == 0:
            os.close(give)
            try:
                while token := os.read(tokens, TOKEN_BYTES):
                    os.write(answer, bytes([work(jobs[int.from_bytes(token, "little")])]))
            finally:
                os._exit(0)  # nothing of what this process was doing goes on here
        copies.append(pid)
    os.close(tokens)
    os.close(answer)
    try:
        for number in range(len(jobs)):
            os.write(give, number.to_bytes(TOKEN_BYTES, "little"))
    except BrokenPipeError:
        pass  # every copy has died
    finally:
        os.close(give)
    done = 0
    while found := os.read(answers, 4096):
        done += sum(found)
    os.close(answers)
    for pid in copies:
        os.waitpid(pid, 0)
    return done
