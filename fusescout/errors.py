"""Every mistake a user can meet: one class each, saying what happened, why, and what to do.

Stages raise these; only `cli/` prints them and turns `exit_code` into the process's code.
Exit codes: 0 done, 1 ran but a gate failed, 2 usage or configuration, 3 the environment can't do it,
4 the user's model or script raised, 130 interrupted.
"""

from __future__ import annotations

EXIT_OK, EXIT_GATE, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_USER_CODE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


class FuseScoutError(Exception):
    """Base of all user-facing errors. Subclasses set `exit_code`; the message has three parts."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(" ".join(part for part in (what, why, fix) if part))


class SessionUnreadable(FuseScoutError):
    """A session file that can't be shown."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"Can't read the session {path}:", f"{why}.", "Give the session.json (or its folder) that `fusescout analyze` wrote."
        )


class ContenderFailed(FuseScoutError):
    """A contender could not be built or run; the race goes on without it."""

    exit_code = EXIT_GATE
