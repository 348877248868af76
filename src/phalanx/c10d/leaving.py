"""Ending the groups' threads before the interpreter ends.

Python ends a thread that returns from torch's C++ while the interpreter finalises, and C++ then ends the whole process:
"terminate called without an active exception".
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


# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_leavers: weakref.WeakValueDictionary[int, Leaver] = weakref.WeakValueDictionary()


def end_before_the_interpreter(leaver: Leaver) -> None:
    """Have the threads of ``leaver`` ended when the process exits, if it has not been closed before.

    A thread that waits for a lost rank cannot see the request; it is left alone after ``LEAVING_S``.
    """
    _leavers[id(leaver)] = leaver


def _at_exit() -> None:
    leavers = [leaver for reference in _leavers.valuerefs() if (leaver := reference()) is not None]
    threads = [thread for leaver in leavers for thread in leaver.leave()]
    deadline = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
