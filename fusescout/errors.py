"""Every mistake a user can meet: one class each, saying what happened, why, and what to do.

Stages raise these; only `cli/` prints them and turns `exit_code` into the process's code.
Exit codes: 0 done, 1 ran but a gate failed, 2 usage or configuration, 3 the environment can't do it,
4 the user's model or script raised, 130 interrupted, 141 the output's reader went away, 143 terminated.
"""

from __future__ import annotations

EXIT_OK, EXIT_GATE, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_USER_CODE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


class FuseScoutError(Exception):
    """Base of all user-facing errors. Subclasses set `exit_code`; the message has three parts."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(" ".join(part for part in (what, why, fix) if part))


def in_a_line(error: BaseException, most: int = 200) -> str:
    """A foreign error's type and the first line of what it says, up to so many characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:most]}"


class SessionUnreadable(FuseScoutError):
    """A session file that can't be shown."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"Can't read the session {path}:",
            f"{why}.",
            "Give the session.json (or its folder) that `fusescout analyze` wrote.",
        )


class ContenderFailed(FuseScoutError):
    """A contender could not be built or run; the race goes on without it."""

    exit_code = EXIT_GATE


class UnknownReportFormat(FuseScoutError):
    """A report format or file extension that FuseScout can't write."""

    def __init__(self, given: str, valid: tuple[str, ...]) -> None:
        super().__init__(
            f"Can't write a report as {given!r}:", "there is no such format.", f"Use one of: {', '.join(valid)}."
        )


class PlanUnreadable(FuseScoutError):
    """A plan file that can't be applied."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"Can't read the plan {path}:",
            f"{why}.",
            "Give the plan.json (or its folder) that `fusescout analyze` wrote.",
        )


class PlanMismatch(FuseScoutError):
    """A plan that was measured on another device or mode than the one it is applied to."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, what: str, planned: str, here: str) -> None:
        super().__init__(
            f"The plan does not fit: it was measured for {what} {planned},",
            f"this is {here}.",
            "Run `fusescout analyze` here to make a plan for it.",
        )


class UnknownSetting(FuseScoutError):
    """A setting's name that doesn't exist, in a file, the environment or an argument."""

    def __init__(self, source: str, given: str, valid: list[str], closest: str | None) -> None:
        hint = f"Did you mean {closest}? " if closest else ""
        super().__init__(f"{source}: there is no setting {given}.", "", f"{hint}Valid: {', '.join(valid)}.")


class BadSetting(FuseScoutError):
    """A setting with a value that isn't allowed."""

    def __init__(self, source: str, given: object, why: str) -> None:
        super().__init__(f"{source} can't be {given!r}.", why.rstrip(".") + ".", "")


class ConfigUnreadable(FuseScoutError):
    """A pyproject.toml that can't be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"Can't read the settings in {path}.", why.rstrip(".") + ".", "Repair the file.")


class TargetNotFound(FuseScoutError):
    """The file, module or attribute a target names isn't there."""

    def __init__(self, spec: str, why: str, fix: str = "") -> None:
        super().__init__(
            f"Can't find the target {spec}.",
            why,
            fix or "Give model.py, file.py:attribute or package.module:attribute.",
        )


class NoModelFound(FuseScoutError):
    """A target that exists but gives no model, or a model without inputs."""

    def __init__(self, spec: str, why: str, fix: str) -> None:
        super().__init__(f"No model to analyse in {spec}.", why, fix)


class UserCodeRaised(FuseScoutError):
    """The user's own module, model or script raised. `traceback` is its traceback, without FuseScout's frames."""

    exit_code = EXIT_USER_CODE

    def __init__(self, what: str, error: BaseException, traceback: str, fix: str = "") -> None:
        self.traceback = traceback
        super().__init__(what, f"{type(error).__name__}: {error}", fix)


class ModelHasNaN(FuseScoutError):
    """NaN or inf where finite numbers are needed: nothing could be verified against such a model."""

    def __init__(self, where: str, found: str) -> None:
        super().__init__(
            f"{where} holds {found}.",
            "A result that is compared with NaN proves nothing, so no kernel could be verified.",
            "Load sound weights and inputs (a cast to a narrower --dtype can overflow too).",
        )


class ModelEmpty(FuseScoutError):
    """A model that computes nothing."""

    def __init__(self, spec: str, why: str) -> None:
        super().__init__(
            f"There is nothing to analyse in {spec}.",
            why,
            "Give a model whose forward() runs operators and returns a tensor.",
        )


class DeviceUnavailable(FuseScoutError):
    """The device asked for isn't there."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, device: str, why: str, works: str) -> None:
        super().__init__(f"Device {device} can't be used.", why, works)


class MissingPackage(FuseScoutError):
    """An optional package that the command needs."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} isn't installed.", "This command needs it.", f"Run: pip install 'fusescout[{extra}]'"
        )


class Unwritable(FuseScoutError):
    """A file or folder that FuseScout has to write and can't. Nothing is left half-written."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, what: str, path: str, why: str, fix: str) -> None:
        super().__init__(f"Can't write the {what} {path}.", f"{why}.", fix)


class OutputExists(FuseScoutError):
    """An output that would replace something."""

    def __init__(self, path: str, fix: str) -> None:
        super().__init__(f"{path} exists already.", "It isn't overwritten unasked.", fix)


class UsageProblem(FuseScoutError):
    """Arguments that are each fine but don't go together."""


class CacheUnwritable(FuseScoutError):
    """The folder for stored races is full or can't be written."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"Can't write the cache {path}.",
            f"{why}.",
            "Make room there, or name another folder with --cache-dir or FUSESCOUT_CACHE_DIR.",
        )


class NotCapturable(FuseScoutError):
    """A graph that can't be turned into ATen without changing what it computes. It is left as it is."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__("This graph can't be captured:", f"{reason}.", "It stays as it is; the others are analysed.")


class TraceUnreadable(FuseScoutError):
    """A Chrome trace that can't be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"Can't read the trace {path}:",
            f"{why}.",
            "Give a .json or .json.gz that torch.profiler exported. If a file name or record_function name holds "
            "a quote, torch.profiler writes broken JSON: rename it and profile again.",
        )


class ProfilerBusy(FuseScoutError):
    """Another profiler is active in this process."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self) -> None:
        super().__init__(
            "Can't profile:",
            "a profiler is already active in this process, and a nested one would lose its records.",
            "Leave the torch.profiler or emit_nvtx context first, or take it out of the script.",
        )


class WorkerRefused(FuseScoutError):
    """A child process could not do a request; `kind` is the contender's status that follows."""

    exit_code = EXIT_GATE

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


class WorkerTimeout(FuseScoutError):
    """A child process gave no answer in time and was killed."""

    exit_code = EXIT_GATE
    kind = "timeout"

    def __init__(self, request: str, deadline_s: float) -> None:
        super().__init__(f"No answer to {request} in {deadline_s:.0f} s;", "the process was killed.")


class WorkerDied(FuseScoutError):
    """A child process ended by itself."""

    exit_code = EXIT_GATE
    kind = "crashed"

    def __init__(self, request: str, code: int, tail: str) -> None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        super().__init__(f"The process died at {request} ({how}).", f"Its last words: {tail}" if tail else "")


class BackendOption(FuseScoutError):
    """`torch.compile(backend="fusescout")` with options it can't use."""

    def __init__(self, why: str) -> None:
        super().__init__(
            'The "fusescout" back end can\'t start:',
            f"{why}.",
            'Use torch.compile(model, backend="fusescout", options={"plan": "PLAN.json"}); '
            '"composition" may be given too.',
        )


class NothingSeen(FuseScoutError):
    """`fusescout.profile` ended without having seen a call of the model."""

    def __init__(self, model: str, steps: int, wait: int) -> None:
        super().__init__(
            f"There is nothing to analyse: {model} was not called after step {wait} inside the block.",
            f"scout.step() was called {steps} times.",
            f"Call the model and scout.step() at least {wait + 1} times inside the block, or pass wait=0.",
        )


class NotAnalysed(FuseScoutError):
    """A scout was asked for its result too early."""

    def __init__(self) -> None:
        super().__init__(
            "The analysis has not run yet.", "It runs when the with block ends.", "Read scout.session after the block."
        )


class OperatorMisused(FuseScoutError):
    """An operator in `torch.ops.fusescout` was called on tensors that its kernel was not built for."""

    def __init__(self, name: str, place: int, wanted: str, given: str) -> None:
        super().__init__(
            f"torch.ops.fusescout.{name} can't take argument {place}.",
            f"Its kernel is built for {wanted}; it was given {given}.",
            "Call the patched model, whose guards choose what fits.",
        )


class CompositionUnavailable(FuseScoutError):
    """The rest of a model can't be run in the way that was asked for."""

    def __init__(self, composition: str, why: str) -> None:
        super().__init__(
            f"The rest of the model can't be run by {composition}.", f"{why}.", "Use --with auto, eager or inductor."
        )


class OutOfTime(FuseScoutError):
    """A race was not done in the time it was given."""

    exit_code = EXIT_GATE

    def __init__(self) -> None:
        super().__init__("The time was up before the race was done.", "", "Allow more with --limit-s.")


class PolicyUnknown(FuseScoutError):
    """`fusescout.patch` was given a policy for new shapes that there is not."""

    def __init__(self, given: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"There is no policy {given!r} for new shapes:",
            f"there are {', '.join(known)}.",
            f'Use fusescout.patch(model, plan, policy="{known[0]}").',
        )


class AlreadyCompiled(FuseScoutError):
    """A model that is compiled or patched: its own calls are what everything would be measured against."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is compiled or patched already.",
            "The baseline is eager, and its calls would not be.",
            "Give the model as it was before torch.compile or Module.compile; a patched one after handle.undo().",
        )


class NothingAnalysed(FuseScoutError):
    """A script that was to be held to a speed-up ran to its end without an analysis."""

    exit_code = EXIT_GATE

    def __init__(self, script: str) -> None:
        super().__init__(
            f"--fail-under has nothing to judge: {script} ran and analysed nothing.",
            "Its own process made no call of fusescout.analyze and ended no block of fusescout.profile.",
            "Analyse a model in it, or leave out --fail-under.",
        )


NO_SPACE = "No space left on device"
"""How the system says that a disk is full, wherever a compiler or a library quotes it."""


class DiskFull(FuseScoutError):
    """A contender or a way to run the model could not be built since a disk was full: nothing was compared."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"A disk was full while {what} was built.",
            next(line.strip() for line in [*reason.splitlines(), reason] if NO_SPACE in line),
            "Make room, or let TMPDIR, TORCHINDUCTOR_CACHE_DIR and FUSESCOUT_CACHE_DIR name folders on another disk.",
        )


class OutOfMemory(FuseScoutError):
    """The host or the device has no room for the model, its inputs or what an analysis needs beside them."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            what,
            f"{in_a_line(error, 160).rstrip(': .')}.",
            "End what else uses that memory, or analyse a smaller batch or another dtype.",
        )
