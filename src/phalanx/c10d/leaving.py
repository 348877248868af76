"""The open groups of a process that exits or forks.

At the exit the last calls of their ranks are compared, since no later call will. Then their threads are ended: Python
ends a thread that returns from torch's C++ while the interpreter finalises, and C++ then ends the whole process:
"terminate called without an active exception". So would threads of C++ that come back to Python, as Gloo's do: their
groups end before, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from phalanx.diagnosis.ends import script_failed
from phalanx.errors import PhalanxError
from phalanx.system.exit_order import Stage, at_exit
from phalanx.words import tell

__all__ = ["LAST_CALLS_S", "track_group"]

LEAVING_S = 0.3  # how long a process that ends waits for all threads together
# How long a rank that closes a group waits for those that have not come to its last call, to compare theirs with it.
LAST_CALLS_S = 1.0


class Group(Protocol):
    """A group that owns threads, and whose last calls can be compared."""

    def compare_at_exit(self, patience_s: float) -> PhalanxError | None: ...

    def leave(self) -> list[threading.Thread]:
        """Ask its threads to end, without waiting for them; return them."""
        ...

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end. The threads have been waited for."""
        ...

    def inherit(self) -> None:
        """Count as closed: this process was forked from the group's own."""
        ...


# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def track_group(group: Group) -> None:
    """Have a group's last calls compared and its threads ended at the exit, and the group closed in forked children.

    A thread that waits for a lost rank cannot see the request; it is left alone after ``LEAVING_S``.
    """
    _groups[id(group)] = group


def _open_groups() -> list[Group]:
    return [group for reference in _groups.valuerefs() if (group := reference()) is not None]


def _at_exit() -> None:
    groups = _open_groups()
    # Ctrl-C has nothing to end any more but this wait; Python would print its traceback, and go on.
    with contextlib.suppress(KeyboardInterrupt):
        if not script_failed():
            _compare_all(groups)
    threads = [thread for group in groups for thread in group.leave()]
    deadline = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for group in groups:
        group.give_back()


def _compare_all(groups: Sequence[Group]) -> None:
    """The exit code is decided by now, so a difference can only be printed; the ranks that wait raise it."""
    deadline = time.monotonic() + LAST_CALLS_S
    for group in groups:
        error = group.compare_at_exit(max(0.0, deadline - time.monotonic()))
        if error is not None:
            tell(f"{type(error).__name__}: {error}")


def _after_fork_in_child() -> None:
    for group in _open_groups():
        group.inherit()


at_exit(Stage.LEAVE_GROUPS, _at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
