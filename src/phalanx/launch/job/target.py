"""Find and compile the target of a job: a Python script, a Python module, or any other program.

A Python target is compiled once, and run in processes that have imported torch already; any other program is exec'd. A
mistyped name costs the user one line, not a traceback of each rank. These count as Python:

- a file named ``.py``;
- a directory or a zip archive with a ``__main__.py``;
- a file whose first line names the Python interpreter that is running now, or one that ``env`` is to find. A script
  that names another interpreter, such as that of another environment, is executed with that one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Literal

from phalanx.errors import LaunchError
from phalanx.words import did_you_mean

Kind = Literal["script", "archive", "module", "program", "function"]


class Refusal(Exception):
    """The job cannot be started; the text says why, as it is printed, and ``code`` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Target:
    """The script, module or program that every rank will run.

    Attributes:
        kind: ``archive`` is a directory or zip file with a ``__main__.py``, ``program`` anything the kernel can
            execute, ``function`` one of a running interpreter, by ``phalanx.launch()``.
        name: the name that the user typed; ``path`` is absolute.
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
        """Return whether the target runs inside the interpreter that imported torch."""
        return self.kind != "program"


def find_target(name: str, arguments: tuple[str, ...] = (), *, module: bool = False) -> Target:
    """Decide what ``name`` is: a file, a directory, a program on PATH, or with ``module`` one, as for ``python -m``."""
    if any(word == ":" and after.startswith("-") for word, after in zip((name, *arguments), arguments, strict=False)):
        raise LaunchError("':' begins a second program; a job here has one for all ranks, which may ask for its rank")
    if module:
        here = _current_folder()
        spec = _find_module(name, here)
        if spec is None:
            raise LaunchError(f"-m {name}: no module of that name, neither in {here} nor on Python's search path")
        if spec.submodule_search_locations is not None:
            raise LaunchError(f"-m {name}: is a package without a __main__ module, so it cannot be run")
        path = spec.origin or name
        return Target("module", name, path, (path, *arguments), here)
    if re.fullmatch(r"python[\d.]*", os.path.basename(name)) and _is_this_python(shutil.which(name) or "/"):
        # What this Python would run is forked, which is quicker, and more can be said of it.
        own = arguments[1:] if arguments[:1] in (("-m",), ("-u",)) else arguments
        if own and (own[0].endswith(".py") or arguments[0] == "-m"):
            return find_target(own[0], own[1:], module=arguments[0] == "-m")
    path = name
    if not os.path.exists(name):
        path = (shutil.which(name) if os.sep not in name else None) or ""
        if not path:
            raise LaunchError(_not_found(name))
    target = _classify(name, path, arguments)
    if target.is_python:
        _current_folder()  # torch cannot be imported without one
    return target


def _not_found(name: str) -> str:
    where = "" if os.path.isabs(name) else f" in {_current_folder()}"
    program = "" if os.sep in name else ", and no program of that name on PATH"
    folder, base = os.path.split(name)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    meant = f"did you mean -n {name}? " if name.isdigit() else did_you_mean(base, beside)
    return f"{name}: no such file{where}{program}{'; ' if meant else ''}{meant.rstrip()}"


def _classify(name: str, path: str, arguments: tuple[str, ...]) -> Target:
    absolute = os.path.abspath(path)
    argv = (path, *arguments)
    # As with `python script`, a script that is a link imports its neighbours from the folder of the real file.
    beside = os.path.dirname(os.path.realpath(path))
    if not os.access(path, os.R_OK) and not os.access(path, os.X_OK):
        raise LaunchError(f"{name}: permission denied; it can be neither read nor executed")
    if os.path.isdir(path):
        if PathFinder.find_spec("__main__", [absolute]) is None:
            raise LaunchError(f"{name}: is a directory without a __main__.py, so there is nothing to run in it")
        return Target("archive", name, absolute, argv, absolute)
    if path.endswith(".py"):
        return Target("script", name, absolute, argv, beside)
    # A file that is executable but not readable is a program.
    if os.path.isfile(path) and os.access(path, os.R_OK):
        with open(path, "rb") as file:
            first_line = file.readline(512)
        if _names_this_python(first_line):
            return Target("script", name, absolute, argv, beside)
        if not first_line.startswith(b"\x7fELF") and PathFinder.find_spec("__main__", [absolute]) is not None:
            return Target("archive", name, absolute, argv, absolute)
    if not os.access(path, os.X_OK):
        raise LaunchError(
            f"{name}: is neither Python (its name does not end in .py) nor executable; "
            f"rename it, or make it executable with: chmod +x {name}"
        )
    return Target("program", name, absolute, (name, *arguments))


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


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the working directory has been deleted; change to one that exists") from None


def _find_module(name: str, folder: str) -> ModuleSpec | None:
    """Find what ``python -m name`` would run: a module, the ``__main__`` of a package, or a package that has none.

    Nothing is imported, because only ranks may run the user's code. Empty modules stand in for the parent packages,
    which finders look up among the imported modules.
    """
    before = sys.path
    # The first entry is the folder of the launcher's own script, which is not the target's.
    has_own = not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated)
    sys.path = [folder, *sys.path[has_own:]]
    stand_ins = []
    found: ModuleSpec | None = None
    parts = name.split(".")
    try:
        for full in (".".join(parts[: count + 1]) for count in range(len(parts))):
            found = importlib.util.find_spec(full)
            if found is None:
                return None
            if full not in sys.modules:
                stand_in = sys.modules[full] = ModuleType(full)
                stand_ins.append(full)
                if found.submodule_search_locations is not None:
                    stand_in.__path__ = found.submodule_search_locations
        is_package = found is not None and found.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") or found if is_package else found
    except (ImportError, ValueError):
        return None  # a parent is no package, or a part of the name is empty
    finally:
        sys.path = before
        for stand_in_name in stand_ins:
            del sys.modules[stand_in_name]


def compile_target(target: Target) -> tuple[CodeType | None, ModuleSpec | None]:
    """Compile a Python target, once for all ranks; return its code, and the future ``__main__.__spec__``.

    That is None for a plain script, as with ``python script``. Both are None for a program and for a function.
    """
    if target.kind in ("program", "function"):
        return None, None
    if target.kind == "script":
        with open(target.path, "rb") as file:
            return compile(file.read(), target.path, "exec", dont_inherit=True), None
    if target.kind == "archive":
        spec = PathFinder.find_spec("__main__", [target.path])
    else:
        spec = _find_module(target.name, target.search_path)
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target.name}: can no longer be found")
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if code is None:
        raise LaunchError(f"{target.name}: has no Python code to run")
    return code, spec


def prepare_target(target: Target) -> tuple[CodeType | None, ModuleSpec | None]:
    """As :func:`compile_target`, but what no rank could run is refused, once for all of them."""
    try:
        return compile_target(target)
    except SyntaxError as error:
        raise Refusal("".join(traceback.format_exception_only(error)), 1) from error
    except (LaunchError, OSError, ValueError, EOFError) as error:
        raise Refusal(f"phalanx: {error}", 2) from error
