"""Compile a TileLang kernel for the CPU: target `c`, OpenMP over its grid, the system's C++ compiler, ctypes.

TileLang's own CPU path runs the grid on one thread and at `-O0`; this one takes only its C source. Blocks of a
`T.Kernel` grid are independent by definition, so the grid loops become one OpenMP loop. The call releases the GIL and
shares torch's OpenMP threads where torch brings GNU OpenMP.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusescout.errors import ContenderFailed
from fusescout.template import Kernel

FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-D__FAST_MATH__=1", "-fno-math-errno", "-fno-trapping-math", "-std=c++17",
    "-shared", "-fPIC", "-w",
)  # fmt: skip
"""`__FAST_MATH__` opens glibc's vector math functions; the compiler itself keeps NaN and infinity."""

_SIGNATURE = re.compile(r"^int32_t (\w+)\((.*)\) \{$", re.MULTILINE)
_GRID_LOOP = re.compile(r"^( *)for \(int(?:32|64)_t (b[xyz])(?:_\d+)? = 0; .*\{$")
_TEMPLATE_LIBRARY = re.compile(r"\bhalf\b|\btl::|vec_type|\b(?:float|int32_t|half)(?:2|4|8|16)\b")


def compile_cpu(kernel: Kernel, cache_dir: Path, optimise: str = "-O3") -> Callable[..., None]:
    """Compile `kernel`; the result takes its parameters' tensors in order and fills the outputs.

    Args:
        kernel: built for the CPU dialect.
        cache_dir: keeps the shared libraries, by source, flags, compiler and CPU.
        optimise: optimisation flag, for tests that compile many kernels.

    Raises:
        ContenderFailed: no compiler, or it or TileLang refuses the kernel.
    """
    source, name, order = c_source(kernel)
    library = _library(source, cache_dir, tuple(optimise if f == "-O3" else f for f in FLAGS))
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p] * len(order) + [ctypes.c_int32]
    function.restype = ctypes.c_int32
    return _caller(function, order)


def c_source(kernel: Kernel) -> tuple[str, str, tuple[int, ...]]:
    """C++ source of `kernel`, the function's name, and which parameter each of its arguments is."""
    from fusescout.templates.dialect import PRELUDE_CPU

    raw = _lower(kernel)
    found = _SIGNATURE.search(raw)
    if found is None:
        raise ContenderFailed("TileLang's C source has no function that can be recognised.")
    name, arguments = found[1], [a.strip() for a in found[2].split(",")]
    position = {p.name: k for k, p in enumerate(kernel.params)}
    names = [a.split()[-1].lstrip("*") for a in arguments]
    if unknown := [n for n in names if n not in position]:
        raise ContenderFailed(
            "The generated C function has parameters the template didn't declare:", ", ".join(unknown) + "."
        )
    restricted = ", ".join(a.replace("*", "* __restrict__ ") for a in arguments)
    body = _parallel(raw[found.end() :])
    head = re.sub(r"^int32_t \w+\(.*\);$", ";", raw[: found.start()], flags=re.MULTILINE)
    head = head.replace('#ifdef __cplusplus\nextern "C"\n#endif\n;\n', "")
    if not _TEMPLATE_LIBRARY.search(raw):
        head = head.replace("#include <tl_templates/cpp/common.h>\n", "")  # a second of compile time
    definition = f"int32_t {name}({restricted}, int32_t fs_threads) {{{body}"
    return PRELUDE_CPU + head + definition, name, tuple(position[n] for n in names)


def _lower(kernel: Kernel) -> str:
    import tilelang

    target = tilelang.tvm.target.Target("c")
    try:
        with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(kernel.pass_configs)), target:
            return str(tilelang.lower(kernel.func, target=target).kernel_source)
    except Exception as error:  # isolation boundary: whatever the compiler throws becomes this contender's reason
        raise ContenderFailed("TileLang can't lower the kernel for the CPU:", _last_line(error)) from error


def _parallel(body: str) -> str:
    """The function body with its grid loops spread over threads; unchanged (serial) if it has another form."""
    lines = body.split("\n")
    first = next((k for k, line in enumerate(lines) if _GRID_LOOP.match(line)), None)
    if first is None or any(line.startswith("  for ") for line in lines[first + 1 :]):
        return body
    local = lines[1:first]
    if not all(re.fullmatch(r"  [\w ]+ \w+\[\d+\];", line) for line in local):
        return body
    last, indent = first, _GRID_LOOP.match(lines[first])[1]  # type: ignore[index]
    if indent != "  ":
        return body
    while (loop := _GRID_LOOP.match(lines[last + 1])) and _closes(lines, last + 1):
        indent, last = loop[1], last + 1
    pragma = f"  #pragma omp parallel for num_threads(fs_threads) schedule(static) collapse({last - first + 1})"
    return "\n".join(
        [lines[0], pragma, *lines[first : last + 1], *(indent + line for line in local), *lines[last + 1 :]]
    )


def _closes(lines: list[str], start: int) -> bool:
    """Whether the loop that opens at `start` is all there is in the loop around it."""
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    end = next(k for k in range(start + 1, len(lines)) if lines[k] == indent + "}")
    return lines[end + 1].strip() == "}"


def _library(source: str, cache_dir: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler, version = _compiler()
    key = hashlib.sha256("\0".join((source, *flags, version, _cpu())).encode()).hexdigest()
    file = cache_dir / "cpu" / f"{key}.so"
    if file.exists():
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            file.unlink(missing_ok=True)  # damaged: compile it again
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".build") as folder:
        text, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        command = [compiler, *flags, f"-I{_tilelang_include()}", "-o", str(built), str(text), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ContenderFailed("The C++ compiler refuses the generated kernel:", done.stderr.strip()[-800:])
        os.replace(built, file)
    return ctypes.CDLL(str(file))


@functools.cache
def _compiler() -> tuple[str, str]:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise ContenderFailed(
            "No C++ compiler was found:",
            "CPU kernels are compiled with g++.",
            "Install g++, or set CXX to a GNU-compatible one.",
        )
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return found, done.stdout.splitlines()[0] if done.stdout else found


@functools.cache
def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE))))


@functools.cache
def _tilelang_include() -> str:
    import tilelang

    return os.path.join(os.path.dirname(tilelang.__file__), "src")


def _caller(function: Any, order: tuple[int, ...]) -> Callable[..., None]:
    import torch

    from fusescout.contenders.binding import generated

    addresses = "".join(f"a{k}.data_ptr(), " for k in order)
    known = {"function": function, "threads": torch.get_num_threads}
    return generated("launch", len(order), [f"function({addresses}threads())"], known)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]
