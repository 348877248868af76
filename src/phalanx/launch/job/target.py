"""The target of a job: a Python script, a Python module, or any other program.

The launcher must know which of these it is before it starts anything, for two reasons. A Python target is compiled
once and run inside processes that have already imported torch; any other program has to be exec'd and gains nothing
from torch. And a mistyped name should cost the user one line, not one traceback from each rank.

These count as Python:

- a file named ``.py``, ``.pyw`` or ``.pyc``;
- a directory or a zip archive with a ``__main__.py``;
- a file whose first line names the Python interpreter that is running now, or one that ``env`` is to find. A script
  that names another interpreter, such as that of another environment, is executed with that one.

Everything else that is executable is a program. A name that is not a file is searched on PATH.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import marshal
import os
import re
import shutil
import stat
import sys
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Literal

from phalanx.errors import LaunchError
from phalanx.words import did_you_mean

__all__ = ["Refusal", "Target", "compile_target", "find_target", "prepare_target"]

Kind = Literal["script", "bytecode", "archive", "module", "program", "function"]


class Refusal(Exception):
    """The job cannot be started; the text says why, as it is printed.

    Attributes:
        code: the exit code of ``phalanx run``.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Target:
    """The script, module or program that every rank will run.

    Attributes:
        kind: ``script`` (source file), ``bytecode`` (``.pyc``), ``archive`` (directory or zip with a
            ``__main__.py``), ``module`` (``-m``), ``program`` (anything the kernel can execute) or ``function`` (of a
            running interpreter, by ``phalanx.launch()``).
        name: the name that the user typed.
        path: the absolute path of the file, directory or archive.
        argv: ``sys.argv`` as the target will see it.
        search_path: the first entry of ``sys.path``; empty for a program.
    """

    kind: Kind
    name: str
    path: str
    argv: tuple[str, ...]
    search_path: str = ""

    @property
    def is_python(self) -> bool:
        """Whether the target runs inside the interpreter that imported torch."""
        return self.kind != "program"


def find_target(name: str, arguments: tuple[str, ...] = (), *, module: bool = False) -> Target:
    """Decide what ``name`` is.

    Args:
        name: a file, a directory, a program on PATH; or a module's dotted name.
        arguments: the target's own arguments, untouched.
        module: search for a module, as ``python -m`` does.

    Raises:
        LaunchError: nothing of that name can be run. The message says what was searched, and where.
    """
    if any(word == ":" and after.startswith("-") for word, after in zip((name, *arguments), arguments, strict=False)):
        raise LaunchError("':' begins a second program; a job here has one for all ranks, which may ask for its rank")
    if module:
        return _find_module(name, arguments)
    if re.fullmatch(r"python[\d.]*", os.path.basename(name)) and _is_this_python(shutil.which(name) or "/"):
        # What this Python would run is forked, which is quicker, and more can be said of it.
        own = arguments[1:] if arguments[:1] in (("-m",), ("-u",)) else arguments
        if own and (own[0].endswith(".py") or arguments[0] == "-m"):
            return find_target(own[0], own[1:], module=arguments[0] == "-m")
    target = _find_file(name, arguments)
    if target.is_python:
        current_folder()  # torch cannot be imported without one
    return target


def _find_file(name: str, arguments: tuple[str, ...]) -> Target:
    if not os.path.exists(name):
        found = shutil.which(name) if os.sep not in name else None
        if found is None:
            where = "" if os.path.isabs(name) else f" in {current_folder()}"
            path = "" if os.sep in name else ", and no program of that name on PATH"
            folder, base = os.path.split(name)
            beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
            meant = f"did you mean -n {name}? " if name.isdigit() else did_you_mean(base, beside)
            raise LaunchError(f"{name}: no such file{where}{path}{'; ' if meant else ''}{meant.rstrip()}")
        return _classify(name, found, arguments)
    return _classify(name, name, arguments)


def _classify(name: str, path: str, arguments: tuple[str, ...]) -> Target:
    absolute = os.path.abspath(path)
    argv = (path, *arguments)
    # As with `python script`, a script that is a link imports its neighbours from the folder of the real file.
    beside = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise LaunchError(f"{name}: is a directory without a __main__.py, so there is nothing to run in it")
        return Target("archive", name, absolute, argv, absolute)
    if not os.access(path, os.R_OK) and not os.access(path, os.X_OK):
        raise LaunchError(f"{name}: permission denied; it can be neither read nor executed")
    if path.endswith((".py", ".pyw")):
        return Target("script", name, absolute, argv, beside)
    if path.endswith(".pyc"):
        return Target("bytecode", name, absolute, argv, beside)
    if stat.S_ISREG(os.stat(path).st_mode):
        first_line = _first_line(path)
        if _names_this_python(first_line):
            return Target("script", name, absolute, argv, beside)
        if not first_line.startswith(b"\x7fELF") and _has_main(path):
            return Target("archive", name, absolute, argv, absolute)
    if not os.access(path, os.X_OK):
        raise LaunchError(
            f"{name}: is neither Python (its name does not end in .py) nor executable; "
            f"rename it, or make it executable with: chmod +x {name}"
        )
    return Target("program", name, absolute, (name, *arguments))


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline(512)
    except OSError:
        return b""  # A file that is executable but not readable is a program.


def _names_this_python(first_line: bytes) -> bool:
    if not first_line.startswith(b"#!"):
        return False
    interpreter, *arguments = os.fsdecode(first_line[2:]).split() or [""]
    if os.path.basename(interpreter) == "env":
        names = [name for name in arguments if not name.startswith("-") and "=" not in name]
        return bool(names) and names[0].startswith("python")
    return os.path.basename(interpreter).startswith("python") and _is_this_python(interpreter)


def _is_this_python(interpreter: str) -> bool:
    # Virtual environments are links to one interpreter, so the folders of the links are compared, not their targets.
    directory = os.path.dirname(interpreter)
    return os.path.realpath(directory) == os.path.realpath(os.path.dirname(sys.executable))


def _has_main(path: str) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name in ("__main__.py", "__main__.pyc") for name in archive.namelist())


def _find_module(name: str, arguments: tuple[str, ...]) -> Target:
    here = current_folder()
    spec = _find_spec(name, _module_path(here))
    if spec is None:
        raise LaunchError(f"-m {name}: no module of that name, neither in {here} nor on Python's search path")
    if spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__", _module_path(here))
        if spec is None:
            raise LaunchError(f"-m {name}: is a package without a __main__ module, so it cannot be run")
    return Target("module", name, spec.origin or name, (spec.origin or name, *arguments), here)


def current_folder() -> str:
    """The working directory.

    Raises:
        LaunchError: it has been deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the working directory has been deleted; change to one that exists") from None


def _module_path(here: str) -> list[str]:
    return [here, *sys.path[_launcher_entries() :]]


def _launcher_entries() -> int:
    """The number of entries at the front of ``sys.path`` that belong to the launcher's own script: one, or none."""
    return 0 if getattr(sys.flags, "safe_path", False) or sys.flags.isolated else 1


def _find_spec(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Find a module without importing its parent packages, because only ranks may run the user's code.

    All finders of ``sys.meta_path`` are asked, as by ``python -m``: projects that are installed in editable form are
    found by finders of their own.
    """
    spec: importlib.machinery.ModuleSpec | None = None
    locations: Sequence[str] | None = path
    full = ""
    for part in name.split("."):
        if locations is None or not part:
            return None
        full = f"{full}.{part}" if full else part
        with _standing_in(full.rpartition(".")[0], locations):
            spec = _ask_finders(full, locations, top=full == part)
        if spec is None:
            return None
        locations = _locations(spec)
    return spec


@contextlib.contextmanager
def _standing_in(parent: str, locations: Sequence[str]) -> Iterator[None]:
    """Let finders that look a package's parent up among the imported modules find its path there."""
    if not parent or parent in sys.modules:
        yield
        return
    stand_in = sys.modules[parent] = ModuleType(parent)
    stand_in.__path__ = list(locations)
    try:
        yield
    finally:
        del sys.modules[parent]


def _ask_finders(name: str, path: Sequence[str], *, top: bool) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        # Only this finder searches sys.path, whose first entry is the launcher's folder and not the module's. The
        # others are given no path for a module without a parent.
        searched = None if top and finder is not importlib.machinery.PathFinder else path
        find = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find(name, searched) if find is not None else None
        if spec is not None:
            return spec
    return None


def _locations(spec: importlib.machinery.ModuleSpec) -> Sequence[str] | None:
    """Where the modules of a package are.

    The list of a namespace package looks its parent up among the imported modules whenever it is read, where it is not
    any more. The entries themselves are in the list's attribute ``_path``.
    """
    found = spec.submodule_search_locations
    return None if found is None else list(getattr(found, "_path", found))


def compile_target(target: Target) -> tuple[CodeType | None, importlib.machinery.ModuleSpec | None]:
    """Compile a Python target, once for all ranks.

    Returns:
        The code, and the future ``__main__.__spec__``, which is None for a plain script, as with ``python script``.
        Both are None for a program and for a function.

    Raises:
        SyntaxError: the target is not valid Python.
        OSError: it could not be read.
        LaunchError: it has no code that this Python can run.
    """
    if target.kind in ("program", "function"):
        return None, None
    if target.kind == "script":
        with open(target.path, "rb") as file:
            return compile(file.read(), target.path, "exec", dont_inherit=True), None
    if target.kind == "bytecode":
        with open(target.path, "rb") as file:
            header, body = file.read(16), file.read()
        if header[:4] != importlib.util.MAGIC_NUMBER:
            raise LaunchError(f"{target.name}: was compiled by another version of Python; run its source instead")
        code = marshal.loads(body)
        return code, None
    spec: Any
    if target.kind == "archive":
        spec = _find_spec("__main__", [target.path])
    else:
        spec = _find_spec(target.name, _module_path(target.search_path))
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find_spec(f"{target.name}.__main__", _module_path(target.search_path))
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target.name}: can no longer be found")
    code = spec.loader.get_code(spec.name)
    if code is None:
        raise LaunchError(f"{target.name}: has no Python code to run")
    return code, spec


def prepare_target(target: Target) -> tuple[CodeType | None, importlib.machinery.ModuleSpec | None]:
    """As :func:`compile_target`, for the process that starts the ranks, which reports a mistake once for all of them.

    Raises:
        Refusal: no rank could run the target.
    """
    try:
        return compile_target(target)
    except SyntaxError as error:
        raise Refusal("".join(traceback.format_exception_only(error)), 1) from error
    except (LaunchError, OSError, ValueError, EOFError) as error:
        raise Refusal(f"phalanx: {error}", 2) from error
