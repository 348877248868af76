"""What every rank would import is imported once, before the ranks are forked, and not taken apart in each at its end.

When an interpreter ends it empties every module. In a rank that touches, and so copies, most of the pages that the
ranks share: 22,800 page faults, 0.1 s of each rank's end. What was imported here is therefore taken out of
``sys.modules`` when a rank has run its exit handlers; 12,400 are left. The script's own modules are emptied as always,
so files that it left open are written out and its objects' finalisers run.

What may hold a process group is emptied too. Of what is left, half is torch's own finalisers, which take its operators
out of its tables as exit handlers. A rank that runs no other thread when it ends, as after ``phalanx.close()``, leaves
both to the kernel as well: 5,400 faults are left. Others keep them: a thread of Gloo's that has just ended an operation
still needs the interpreter for a moment, and aborts the process (as it does under torchrun) if it finds that ended.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from types import ModuleType

__all__ = ["preload"]

_HOLD_GROUPS = ("torch.distributed", "phalanx")

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

    import phalanx.backends.create
    import phalanx.topology.launchers
    import phalanx.world  # noqa: F401

    _preloaded.extend((name, module) for name, module in sys.modules.items() if name not in before)
    _finalisers.extend(finaliser for finaliser in _all_finalisers() if finaliser not in earlier)
    # Before the finalisers, which also run as one exit handler; after the script's handlers, which may end threads.
    atexit.register(_spare_finalisers, os.getpid())


def _all_finalisers() -> list[weakref.finalize[..., object]]:
    # The standard library lists them nowhere else; without the list they run, which only takes longer.
    return list(getattr(weakref.finalize, "_registry", ()))


def _spare_finalisers(preloader: int) -> None:
    if os.getpid() != preloader and _runs_alone():
        for finaliser in _finalisers:
            finaliser.atexit = False


def _runs_alone() -> bool:
    """Whether this is the process's only thread. Not, if a script has used up its descriptors: then nobody can tell."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _leave_alone(preloader: int) -> None:
    if os.getpid() == preloader:
        return
    alone = _runs_alone()
    _preloaded[:] = [
        (name, module)
        for name, module in _preloaded
        if sys.modules.get(name) is module and (alone or not name.startswith(_HOLD_GROUPS))
    ]
    for name, _ in _preloaded:
        del sys.modules[name]
    # One reference that nothing gives back: this module is emptied too.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_preloaded))
