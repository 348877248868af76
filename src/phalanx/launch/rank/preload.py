"""Import what every rank needs once, before the ranks are forked, and do not tear it down in each of them.

An interpreter that ends empties every module, which in a rank copies most of the pages that the ranks share. So the
modules that were imported here are taken out of ``sys.modules`` when a rank has run its exit handlers, and torch's own
finalisers do not run. The script's modules are emptied as always: files that it left open are written out, and the
finalisers of its objects run.

A Gloo thread that has just finished an operation needs the interpreter for a moment more, and aborts the process if
that is gone. So modules that may hold a process group are spared only if every other thread of the rank is asleep.
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
from phalanx.system.processes import state_of_thread
from phalanx.words import tell

__all__ = ["import_for_ranks", "preload"]

_HOLD_GROUPS = ("torch.distributed", "phalanx")

_CHECK_S, _MOST_CHECKS = 0.001, 20

_preloaded: list[tuple[str, ModuleType]] = []


def preload() -> None:
    """Import torch and the modules that ``phalanx.init()`` needs. The caller forks afterwards.

    Raises:
        Exception: whatever importing torch raises.
    """
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


def _others_rest() -> bool:
    """Tell whether all other threads sleep, twice in a row, after this one has given them the interpreter."""
    own, rested = str(threading.get_native_id()), 0
    with contextlib.suppress(OSError):  # the script has used up its descriptors
        for _ in range(_MOST_CHECKS):
            others = [task for task in os.listdir("/proc/self/task") if task != own]
            if not others or rested == 2:
                return True
            time.sleep(_CHECK_S)
            rested = rested + 1 if all(map(_sleeps, others)) else 0
    return False


def _sleeps(thread: str) -> bool:
    return state_of_thread(os.getpid(), int(thread)) in ("S", "")  # or has ended since


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
