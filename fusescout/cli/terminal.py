"""What reaches the user: reports on stdout, everything else on stderr.

Text of the user's (paths, model names, exception messages) is never read as markup, and control characters in it
are shown, not obeyed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusescout.errors import FuseScoutError
from fusescout.errors import Unwritable
from fusescout.errors import UserCodeRaised

if TYPE_CHECKING:
    from rich.console import Console

OnEvent = Callable[[str, int, int, str], None]
"""Called with stage, steps done, steps in all, detail."""


def _silence(stage: str, done: int, total: int, detail: str) -> None:
    """Takes progress and says nothing."""


def visible(text: str) -> str:
    """The text with control characters spelled out, so that no terminal obeys them."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass
class Terminal:
    """The process's stdout and stderr for one command. `main` makes it; verbs set how much it says."""

    quiet: bool = False
    verbose: bool = False

    def out(self, text: str) -> None:
        """Write a result to stdout.

        Raises:
            Unwritable: the disk behind it is full. A closed pipe raises BrokenPipeError, which `main` takes quietly.
        """
        try:
            # A terminal that can't show a character shows its escape instead of failing the whole report.
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(errors="backslashreplace")
            sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # What is left in the buffer would fail again, unseen, when Python exits.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise Unwritable(
                "result to", "standard output", error.strerror or str(error), "Make room there."
            ) from error

    def note(self, text: str) -> None:
        """Say something on stderr, unless --quiet."""
        if not self.quiet:
            self._say((text, ""))

    def warn(self, text: str) -> None:
        self._say(("warning: ", "bold yellow"), (text, ""))

    def error(self, error: FuseScoutError) -> None:
        """Print what happened, why, and what to do; the user's own traceback goes first."""
        if isinstance(error, UserCodeRaised):
            self._say((error.traceback.rstrip("\n"), "dim"))
        self._say(("error: ", "bold red"), (error.what, "bold"))
        for text in (error.why, error.fix):
            if text:
                self._say((text, ""))

    def internal_error(self, error: BaseException) -> None:
        """Print a bug of FuseScout's: one line, and its traceback only with --verbose."""
        if self.verbose:
            import traceback

            self._say(("".join(traceback.format_exception(error)).rstrip("\n"), "dim"))
        self._say(("internal error: ", "bold red"), (f"{type(error).__name__}: {error}", "bold"))
        self._say(
            ("This is a bug in FuseScout. " + ("" if self.verbose else "Run again with -v for the traceback."), "")
        )

    @contextlib.contextmanager
    def progress(self) -> Iterator[OnEvent]:
        """A progress bar on stderr if it is a terminal; where it isn't, a line a stage, or all with --verbose."""
        silent = self.quiet or os.environ.get("RANK", "0") != "0"
        if silent or not sys.stderr.isatty():
            yield self._log_all() if self.verbose else _silence if silent else self._log_stages()
            return
        from rich.progress import BarColumn
        from rich.progress import MofNCompleteColumn
        from rich.progress import Progress
        from rich.progress import TextColumn
        from rich.progress import TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        with Progress(*columns, console=self._console(), transient=True) as bar:
            tasks: dict[str, object] = {}

            def show(stage: str, done: int, total: int, detail: str) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total or None, detail="")
                text = visible(detail)[:60]
                bar.update(tasks[stage], completed=done, total=total or None, detail=text)  # type: ignore[arg-type]

            yield show

    @contextlib.contextmanager
    def stdout_reserved(self) -> Iterator[None]:
        """Send what others print to stdout (user code, compilers) to stderr, so that stdout is the result alone."""
        sys.stdout.flush()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                kept = os.dup(1)
            except OSError:  # stdout is closed: there is nothing to protect
                yield
                return
            os.dup2(2, 1)
            try:
                yield
            finally:
                os.dup2(kept, 1)
                os.close(kept)

    def width(self) -> int:
        """Columns for a text report: the terminal's, or 100 where there is none."""
        from rich.console import Console

        return Console().width if sys.stdout.isatty() else 100

    def color(self) -> bool:
        """Whether stdout wants colours: a terminal that isn't dumb, and no NO_COLOR."""
        from rich.console import Console

        console = Console()
        return console.is_terminal and not console.no_color and not console.is_dumb_terminal

    def _log_stages(self) -> OnEvent:
        begun: set[str] = set()

        def show(stage: str, done: int, total: int, detail: str) -> None:
            if stage not in begun:
                begun.add(stage)
                self._say((f"{stage}: {detail}" if detail else stage, "dim"))

        return show

    def _log_all(self) -> OnEvent:
        def show(stage: str, done: int, total: int, detail: str) -> None:
            self._say((f"{stage} {done}/{total} {detail}".rstrip(), "dim"))

        return show

    def _say(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        line = Text.assemble(*((visible(text), style) for text, style in parts))
        # soft_wrap: a message stays one line, to be found and copied whole.
        self._console().print(line, soft_wrap=True)

    def _console(self) -> Console:
        from rich.console import Console

        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        # Rich would end the process with 1; messages that nobody reads change neither the result nor the exit code.
        console.on_broken_pipe = lambda: None  # type: ignore[method-assign]
        return console
