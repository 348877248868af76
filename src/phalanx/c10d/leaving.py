"""What the groups of a process do when it exits without closing them.

Their ranks' last calls are compared, since no later call will. Then their threads are ended: Python ends a thread that
returns from torch's C++ while the interpreter finalises, and C++ then ends the whole process: "terminate called without
an active exception". So would threads of C++ that come back to Python, as Gloo's do: their groups end before, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Protocol, TypeVar

from phalanx.diagnosis.ends import script_failed
from phalanx.errors import PhalanxError
from phalanx.system.exit_order import Stage, at_exit
from phalanx.words import tell

__all__ = ["LAST_CALLS_S", "Leaver", "compare_at_exit", "end_before_the_interpreter"]

LEAVING_S = 0.3  # how long a process that ends waits for all threads together
# How long a rank that closes a group waits for those that have not come to its last call, to compare theirs with it.
LAST_CALLS_S = 1.0


class Leaver(Protocol):
    """An object that owns threads."""

    def leave(self) -> list[threading.Thread]:
        """Ask its threads to end, without waiting for them; return them."""
        ...

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end. The threads have been waited for."""
        ...


class Comparer(Protocol):
    """A group whose last calls can be compared."""

    def compare_at_exit(self, patience_s: float) -> PhalanxError | None: ...


_Group = TypeVar("_Group")

# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_leavers: weakref.WeakValueDictionary[int, Leaver] = weakref.WeakValueDictionary()
_comparers: weakref.WeakValueDictionary[int, Comparer] = weakref.WeakValueDictionary()


def end_before_the_interpreter(leaver: Leaver) -> None:
    """Have the threads of ``leaver`` ended when the process exits, if it has not been closed before.

    A thread that waits for a lost rank cannot see the request; it is left alone after ``LEAVING_S``.
    """
    _leavers[id(leaver)] = leaver


def compare_at_exit(group: Comparer) -> None:
    """Have the last calls of ``group`` compared when the process exits, if it has not been closed before."""
    _comparers[id(group)] = group


def _at_exit() -> None:
    # Ctrl-C has nothing to end any more but this wait; Python would print its traceback, and go on.
    with contextlib.suppress(KeyboardInterrupt):
        if not script_failed():
            _compare_all()
    leavers = _alive(_leavers)
    threads = [thread for leaver in leavers for thread in leaver.leave()]
    deadline = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for leaver in leavers:
        leaver.give_back()


def _alive(held: weakref.WeakValueDictionary[int, _Group]) -> list[_Group]:
    """The groups that still exist, listed in one step."""
    return [group for reference in held.valuerefs() if (group := reference()) is not None]


def _compare_all() -> None:
    """The exit code is decided by now, so a difference can only be printed; the ranks that wait raise it."""
    deadline = time.monotonic() + LAST_CALLS_S
    for group in _alive(_comparers):
        error = group.compare_at_exit(max(0.0, deadline - time.monotonic()))
        if error is not None:
            tell(f"{type(error).__name__}: {error}")


at_exit(Stage.LEAVE_GROUPS, _at_exit)
