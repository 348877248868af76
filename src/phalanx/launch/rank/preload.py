"""Import what every rank needs once, before the ranks are forked, and do not tear it down in each of them.

An interpreter that ends empties every module. In a rank this copies most of the pages that the ranks share: 22,800 page
faults, 0.1 s of each rank's end. So the modules that were imported here are taken out of ``sys.modules`` when a rank
has run its exit handlers, which leaves 12,400. The script's own modules are emptied as always, so files that it left
open are written out and the finalisers of its objects run.

A Gloo thread that has just finished an operation needs the interpreter for a moment more, and aborts the process (as it
does under torchrun) if that is gone. So modules that may hold a process group, and torch's exit-time finalisers (half
of the remaining faults), are spared only if every other thread of the rank is asleep.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from types import ModuleType

from phalanx.launch.rank.late_variables import restore_torch
from phalanx.words import tell

__all__ = ["import_for_ranks", "preload"]

_HOLD_GROUPS = ("torch.distributed", "phalanx")
_CHECK_S = 0.001

_preloaded: list[tuple[str, ModuleType]] = []
_finalisers: list[weakref.finalize[..., object]] = []


def preload() -> None:
    """Import torch and the modules that ``phalanx.init()`` needs. The caller forks afterwards.

    Raises:
        Exception: whatever importing torch raises.
    """
    before, earlier = set(sys.modules), set(_all_finalisers())
    # Exit handlers run in reverse order, so this one runs after those of all modules that are imported from here on.
    atexit.register(_leave_alone, os.getpid())
    import_for_ranks()
    _preloaded.extend((name, module) for name, module in sys.modules.items() if name not in before)
    _finalisers.extend(finaliser for finaliser in _all_finalisers() if finaliser not in earlier)
    # This runs before the finalisers, which are one exit handler too, and after the script's handlers, which may end
    # threads.
    atexit.register(_spare_finalisers, os.getpid())


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


def _all_finalisers() -> list[weakref.finalize[..., object]]:
    # Without this attribute of the standard library the finalisers run, which only takes longer.
    return list(getattr(weakref.finalize, "_registry", ()))


def _spare_finalisers(preloader: int) -> None:
    if os.getpid() == preloader:
        return
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C has nothing to end here, and would print this module's lines
        if _others_rest():
            for finaliser in _finalisers:
                finaliser.atexit = False


def _others_rest() -> bool:
    """Tell whether all other threads sleep, also after this one has given them the interpreter, twice."""
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):  # the script has used up its descriptors
        for _ in range(2):
            others = [task for task in os.listdir("/proc/self/task") if task != own]
            if others:
                time.sleep(_CHECK_S)
            if not all(map(_sleeps, others)):
                return False
        return True
    return False


def _sleeps(task: str) -> bool:
    try:
        with open(f"/proc/self/task/{task}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended since


def _leave_alone(preloader: int) -> None:
    if os.getpid() == preloader:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # This is the last handler. Ctrl-C has nothing to end any more, and Python would print where it was.
        with contextlib.suppress(ValueError):  # the main thread has ended, and this is another one
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    restore_torch()
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
