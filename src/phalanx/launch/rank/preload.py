"""torch in the ranks: imported once before they are forked, hidden until the script imports it, left alone at the end.

Under ``python script`` a variable such as ``OMP_NUM_THREADS`` is read while torch is imported. So torch is hidden from
the script until its own ``import torch``. Then what has changed since the rank's start is applied where it can be, and
rank 0 says of the rest that it has no effect.

An interpreter that ends empties every module, which in a rank copies most of the pages that the ranks share. So the
modules that were imported here are taken out of ``sys.modules`` when a rank has run its exit handlers, and torch's own
finalisers do not run. The script's modules are emptied as always: files that it left open are written out, and the
finalisers of its objects run. A Gloo thread that has just finished an operation needs the interpreter for a moment
more, and aborts the process if that is gone. So modules that may hold a process group are spared only if every other
thread of the rank is asleep.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType

from phalanx import settings
from phalanx.system.processes import state_of
from phalanx.words import format_list, tell

__all__ = ["apply_threads", "hide_torch", "import_for_ranks", "preload"]

_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # in the order of at::get_num_threads
# Variables that libraries read while they are loaded, and that cannot be changed afterwards.
_TOO_LATE = {
    "ATEN_CPU_CAPABILITY",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_JIT",
    "TORCH_COMPILE_DEBUG",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISABLE_NATIVE_JIT",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS",
    "TORCH_USE_RTLD_GLOBAL",
}
_TOO_LATE_FAMILIES = ("OMP_", "GOMP_", "KMP_", "NPY_", "NUMPY_")
_HOLD_GROUPS = ("torch.distributed", "phalanx")
_CHECK_S, _MOST_CHECKS = 0.001, 20

_preloaded: list[tuple[str, ModuleType]] = []


def preload() -> None:
    """Do :func:`import_for_ranks`, before the caller forks."""
    before, earlier = set(sys.modules), set(_finalisers())
    # Exit handlers run in reverse order, so this one runs after those of all modules that are imported from here on.
    atexit.register(_leave_alone, os.getpid())
    import_for_ranks()
    _preloaded.extend((name, module) for name, module in sys.modules.items() if name not in before)
    for finaliser in set(_finalisers()) - earlier:
        finaliser.atexit = False


def import_for_ranks() -> None:
    """Import torch, if it is installed, and the modules that ``phalanx.init()`` needs, if this torch allows them.

    Raises:
        Exception: whatever importing torch raises.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return  # a script that needs it says so by itself
        raise
    try:
        import phalanx.c10d.create
        import phalanx.topology.launchers
        import phalanx.world  # noqa: F401
    except Exception as error:
        tell(
            f"the backend phalanx and phalanx.init() cannot be used with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}. The script runs on torch's own backends"
        )


def _finalisers() -> list[weakref.finalize[..., object]]:
    return list(getattr(weakref.finalize, "_registry", ()))  # without this attribute they run, which takes longer


# -- until the script imports torch --------------------------------------------------------------------


def hide_torch(quiet: bool, imported: Callable[[], None]) -> None:
    """Have ``imported`` called at the next import of torch, if there is one; ``quiet`` has no note printed."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    if "torch" in modules:
        sys.meta_path.insert(0, _HiddenTorch(modules, quiet, imported))
        for name in modules:
            del sys.modules[name]


class _HiddenTorch(importlib.abc.Loader):
    """Finds torch among the modules that were imported before the fork, and leaves it as it is."""

    def __init__(self, modules: dict[str, ModuleType], quiet: bool, imported: Callable[[], None]) -> None:
        self._modules, self._spec = modules, modules["torch"].__spec__
        self._quiet, self._imported = quiet, imported
        self._before = dict(os.environ)

    def restore(self) -> None:
        """Undo the hiding."""
        with contextlib.suppress(ValueError):  # another thread was quicker
            sys.meta_path.remove(self)
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Torch itself comes first, because a part imports the whole.
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has given it that of this import
        self.restore()
        self._imported()
        _apply(self._before, self._quiet)


def _apply(before: dict[str, str], quiet: bool) -> None:
    """Apply what the script has set since ``before``; say what cannot be applied."""
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    if changed & set(_THREADS):
        apply_threads()
    if "TORCH_DISTRIBUTED_DEBUG" in changed:
        from torch._C._distributed_c10d import set_debug_level_from_env

        set_debug_level_from_env()
    if changed & {"TORCH_LOGS", "TORCH_LOGS_OUT"}:
        from torch._logging import _internal

        _internal._init_logs()
    if settings.REPLACE in changed:
        from phalanx.c10d.register import replace_as_asked

        replace_as_asked()
    families = {name for name in changed if name.startswith(_TOO_LATE_FAMILIES)}
    late = sorted((changed & _TOO_LATE | families) - set(_THREADS))
    if late and not quiet:
        tell(
            f"note: the script sets {format_list(late)} before it imports torch, but phalanx run had imported torch "
            f"before it started the script; set it before phalanx run, or use phalanx run --no-preload"
        )


def apply_threads() -> None:
    """Give a torch that has been imported before the number of threads that the variables of this process ask for."""
    import torch

    for name in _THREADS:
        first = os.environ.get(name, "").partition(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            torch.set_num_threads(int(first))
            return


# -- at the end of a rank ------------------------------------------------------------------------------


def _leave_alone(preloader: int) -> None:
    if os.getpid() == preloader:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # This is the last handler. Ctrl-C has nothing to end any more, and Python would print where it was.
        with contextlib.suppress(ValueError):  # the main thread has ended, and this is another one
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    for finder in list(sys.meta_path):
        if isinstance(finder, _HiddenTorch):
            finder.restore()  # the script has never imported torch
    rest = _others_rest()
    _preloaded[:] = [
        (name, module)
        for name, module in _preloaded
        if sys.modules.get(name) is module and (rest or not name.startswith(_HOLD_GROUPS))
    ]
    for name, _ in _preloaded:
        del sys.modules[name]
    # This module is emptied too. A reference that is never given back keeps the list, and so the modules, alive.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_preloaded))


def _others_rest() -> bool:
    """Tell whether all other threads sleep, twice in a row, after this one has given them the interpreter."""
    own, rested = threading.get_native_id(), 0
    with contextlib.suppress(OSError):  # the script has used up its descriptors
        for _ in range(_MOST_CHECKS):
            others = [thread for thread in map(int, os.listdir("/proc/self/task")) if thread != own]
            if not others or rested == 2:
                return True
            time.sleep(_CHECK_S)
            # A thread without a state has ended since.
            rested = rested + 1 if all(state_of(os.getpid(), each) in ("S", "") for each in others) else 0
    return False
