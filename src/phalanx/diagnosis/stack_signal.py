"""A stack on demand: the thread that gets a signal writes where it is, though its interpreter may be held.

``faulthandler`` writes it. But if the signal comes while the interpreter links in the frame of a function that is being
called (Python 3.11 and later), ``faulthandler`` ends the process, or does not end itself: a program that computes by
many short calls died of one question in a hundred. So a copy of the process writes the stack (``stacks.c``). If it
could not, that is noted, and whoever has asked asks again (:func:`was_changed`).

For a copy the process stands still, for some 40 ms for each GiB of its memory, and then loses some 0.2 s for each GiB
that it writes to. So none is made of a thread that is elsewhere than in the interpreter's own code, as in
torch's or in the kernel. Python 3.10 is not affected, and makes no copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import sys

from phalanx.errors import BackendError
from phalanx.native.core import library

__all__ = ["ignore", "was_changed", "write_stacks_on"]

_CHANGED = "  (it was being changed)"  # PHX_STACK_CHANGED
_IGNORE = ctypes.c_void_p(1)  # SIG_IGN
_libc = ctypes.CDLL(None)


def write_stacks_on(number: int, file: int) -> None:
    """From now on whichever thread gets this signal writes its Python stack, the innermost call first.

    Args:
        number: the signal. What this process did with it before is forgotten.
        file: the descriptor to write to.
    """
    faulthandler.unregister(number)
    _libc.signal(number, _IGNORE)  # which faulthandler puts back
    faulthandler.register(number, file=file, all_threads=False)
    if sys.version_info >= (3, 11):
        with contextlib.suppress(BackendError):  # the core was not built
            somewhere = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
            library().phx_stacks_in_copy(number, file, somewhere)


def ignore(number: int) -> None:
    """Write no stacks any more; the signal does nothing, because somebody may be about to send it."""
    faulthandler.unregister(number)


def was_changed(stack: str) -> bool:
    """Whether a stack could not be read, as a rule because its thread was just entering a function; ask again."""
    return _CHANGED in stack
