"""The end of the groups' threads, before the interpreter's.

One that is still on its way out of torch's C++ when the interpreter finalises is ended there by Python, and C++ ends
the process for it: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Leaver", "end_before_the_interpreter"]

LEAVING_S = 0.3  # how long a process that ends waits for all of them together


class Leaver(Protocol):
    """An object that owns threads."""

    def leave(self) -> list[threading.Thread]:
        """Ask its threads to end, without waiting for them; return them."""
        ...


_leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()


def end_before_the_interpreter(leaver: Leaver) -> None:
    """Have the threads of ``leaver`` ended when the process exits, should nobody close it before.

    A thread that waits for a lost rank does not hear that it should end; it is left alone after ``LEAVING_S``.
    """
    _leavers.add(leaver)


def _at_exit() -> None:
    threads = [thread for leaver in list(_leavers) for thread in leaver.leave()]
    deadline = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
