"""The user's own files: what they define, importing them, and running them as scripts.

Importing behaves like Python: the file's folder is `sys.path[0]`, `sys.argv` is the script's. Whatever the user's code
raises comes out as `UserCodeRaised` with its own traceback; it is never taken for "not found".
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fusescout.errors import FuseScoutError
from fusescout.errors import OutOfMemory
from fusescout.errors import TargetNotFound
from fusescout.errors import UserCodeRaised
from fusescout.room import out_of_memory

PACKAGE = str(Path(__file__).parent)
FRAMELESS = ("<frozen ", PACKAGE)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a file says about itself without being run.

    Attributes:
        names: names its top level binds, also inside `if`, `try` and `with`.
        modules: classes that look like `nn.Module` sub-classes.
        imports_fusescout: it imports FuseScout somewhere.
        open_ended: it may bind more names than these (`import *`, a module `__getattr__`).
    """

    names: frozenset[str]
    modules: tuple[str, ...]
    imports_fusescout: bool
    open_ended: bool


def outline(path: Path) -> Outline:
    """Read a Python file with `ast`, without running it.

    Raises:
        TargetNotFound: no such file, or not a Python file.
        UserCodeRaised: a syntax error in it.
    """
    if path.is_dir():
        raise TargetNotFound(str(path), "It is a folder.")
    if path.suffix != ".py":
        raise TargetNotFound(str(path), "It is not a Python file.")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise TargetNotFound(str(path), f"{error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error))
        raise UserCodeRaised(f"{path} is not valid Python.", error, text, "Repair the file.") from error
    bound = set(_bound(tree.body))
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    return Outline(
        frozenset(bound),
        tuple(n.name for n in tree.body if isinstance(n, ast.ClassDef) and any(_is_module(b) for b in n.bases)),
        any(name.split(".")[0] == "fusescout" for name in imported),
        bool({"*", "__getattr__"} & bound),
    )


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (a.asname or a.name.split(".")[0] for a in names)
            case ast.Assign(targets=targets):
                yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name
            case ast.If(test=test) if ast.unparse(test).replace("'", '"') == '__name__ == "__main__"':
                yield from _bound(node.orelse)
            case ast.If() | ast.For() | ast.While():
                yield from _bound([*node.body, *node.orelse])
            case ast.With():
                yield from _bound(node.body)
            case ast.Try():
                handlers = [s for h in node.handlers for s in h.body]
                yield from _bound([*node.body, *handlers, *node.orelse, *node.finalbody])


def _is_module(base: ast.expr) -> bool:
    return ast.unparse(base).rsplit(".", 1)[-1] in {"Module", "LightningModule", "PreTrainedModel", "Sequential"}


@contextlib.contextmanager
def as_script(folder: str, argv: Sequence[str] | None) -> Iterator[None]:
    """`sys.path[0]` and `sys.argv` as Python sets them for a script; both are restored."""
    path, arguments = list(sys.path), list(sys.argv)
    sys.path.insert(0, folder)
    if argv is not None:
        sys.argv[:] = argv
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, arguments


@contextlib.contextmanager
def user_code(what: str, fix: str = "") -> Iterator[None]:
    """Turn whatever the user's code raises into `UserCodeRaised(what)`; FuseScout's own errors pass.

    Raises:
        OutOfMemory: there was no room for what it does.
        UserCodeRaised: with a traceback that starts at the first frame that isn't FuseScout's.
    """
    try:
        yield
    except FuseScoutError:
        raise
    # An isolation boundary: anything may be raised here, SystemExit too, and all of it is the user's.
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise OutOfMemory(what, error) from error
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(FRAMELESS):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        raise UserCodeRaised(what, error, text, fix) from error


def import_file(path: Path, argv: Sequence[str] = ()) -> ModuleType:
    """Import a file under a name that no other module has, as Python would run it (but not as `__main__`).

    The module stays in `sys.modules`, because pickle, dataclasses and Dynamo look it up there by name.
    """
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetNotFound(str(path), "Python can't import it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with user_code(f"{path.name} raised while it was imported."):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def import_module(name: str) -> ModuleType:
    """Import `pkg.mod`; an ImportError inside of it is the user's error, its own absence is `TargetNotFound`."""
    importlib.invalidate_caches()
    with user_code(f"{name} raised while it was imported."):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise TargetNotFound(name, f"There is no module named {error.name}.") from error
            raise


def run_script(path: Path, argv: Sequence[str]) -> None:
    """Run a file as `python path argv…` does: as `__main__`, with its own `sys.argv` and `sys.path[0]`.

    Raises:
        UserCodeRaised: what the script raised, or a non-zero `sys.exit`.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__, __spec__=None)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        with as_script(str(path.resolve().parent), [str(path), *argv]), user_code(f"{path} raised."):
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise
    finally:
        sys.modules["__main__"] = before
