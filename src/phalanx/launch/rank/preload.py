"""What every rank would import is imported once, before the ranks are forked, and not taken apart in each at its end.

When an interpreter ends it empties every module. In a rank that touches, and so copies, most of the pages that the
ranks share: 22,800 page faults, 0.1 s of each rank's end. What was imported here is therefore taken out of
``sys.modules`` when a rank has run its exit handlers; 12,400 are left. The script's own modules are emptied as always,
so files that it left open are written out and its objects' finalisers run.

What may hold a process group is emptied too. Of what is left, half is torch's own finalisers, which take its operators
out of its tables as exit handlers. A rank in which no other thread does anything when it ends leaves both to the kernel
as well: 5,400 faults are left. Others keep them: a thread of Gloo's that has just ended an operation still needs the
interpreter for a moment, and aborts the process (as it does under torchrun) if it finds that ended.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from types import ModuleType

__all__ = ["preload"]

_HOLD_GROUPS = ("torch.distributed", "phalanx")
# How often, and at what distance in time, other threads are looked at.
LOOKS, LOOK_S = 2, 0.001

_preloaded: list[tuple[str, ModuleType]] = []
_finalisers: list[weakref.finalize[..., object]] = []


def preload() -> None:
    """Import torch and what ``phalanx.init()`` needs. The caller forks afterwards.

    Raises:
        Exception: whatever importing torch raises.
    """
    before, earlier = set(sys.modules), set(_all_finalisers())
    # Handlers run in reverse, so this one comes after those of whatever is imported from here on.
    atexit.register(_leave_alone, os.getpid())
    import torch  # noqa: F401

    import phalanx.c10d.create
    import phalanx.place.launchers
    import phalanx.world  # noqa: F401

    _preloaded.extend((name, module) for name, module in sys.modules.items() if name not in before)
    _finalisers.extend(finaliser for finaliser in _all_finalisers() if finaliser not in earlier)
    # Before the finalisers, which also run as one exit handler; after the script's handlers, which may end threads.
    atexit.register(_spare_finalisers, os.getpid())


def _all_finalisers() -> list[weakref.finalize[..., object]]:
    # The standard library lists them nowhere else; without the list they run, which only takes longer.
    return list(getattr(weakref.finalize, "_registry", ()))


def _spare_finalisers(preloader: int) -> None:
    if os.getpid() != preloader and _others_rest():
        for finaliser in _finalisers:
            finaliser.atexit = False


def _others_rest() -> bool:
    """Whether every other thread of this process sleeps, and went on sleeping while it could have had the interpreter.

    Not, if a script has used up its descriptors: then nobody can tell.
    """
    own = str(threading.get_native_id())
    try:
        for _ in range(LOOKS):
            others = [task for task in os.listdir("/proc/self/task") if task != own]
            if not others:
                return True
            time.sleep(LOOK_S)
            if not all(_sleeps(task) for task in others):
                return False
    except OSError:
        return False
    return True


def _sleeps(task: str) -> bool:
    try:
        with open(f"/proc/self/task/{task}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended since


def _leave_alone(preloader: int) -> None:
    if os.getpid() == preloader:
        return
    rest = _others_rest()
    _preloaded[:] = [
        (name, module)
        for name, module in _preloaded
        if sys.modules.get(name) is module and (rest or not name.startswith(_HOLD_GROUPS))
    ]
    for name, _ in _preloaded:
        del sys.modules[name]
    # One reference that nothing gives back: this module is emptied too.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_preloaded))
