"""The open groups of a process that exits or forks.

At the exit the last calls of their ranks are compared, since no later call will. Then their threads are ended: Python
ends a thread that returns from torch's C++ while the interpreter finalises, and C++ then ends the whole process:
"terminate called without an active exception". So would threads of C++ that come back to Python, as Gloo's do: their
groups end before, too.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import Any

from phalanx.diagnosis.ends import script_failed
from phalanx.system.exit_order import Stage, at_exit
from phalanx.words import tell

__all__ = ["LAST_CALLS_S", "track_group"]

LEAVING_S = 0.3  # how long a process that ends waits for all threads together
# How long a rank that closes a group waits for those that have not come to its last call, to compare theirs with it.
LAST_CALLS_S = 1.0

# Each is a PhalanxProcessGroup. By identity: unlike a WeakSet it can be listed in one step, while other threads make
# groups.
_groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def track_group(group: Any) -> None:
    """Have a group's last calls compared and its threads ended at the exit, and the group closed in forked children.

    A thread that waits for a lost rank cannot see the request; it is left alone after ``LEAVING_S``.
    """
    _groups[id(group)] = group


def _open_groups() -> list[Any]:
    return [group for reference in _groups.valuerefs() if (group := reference()) is not None]


def _at_exit() -> None:
    groups = _open_groups()
    deadline = time.monotonic() + LAST_CALLS_S
    # Ctrl-C has nothing to end any more but this wait; Python would print its traceback, and go on.
    with contextlib.suppress(KeyboardInterrupt):
        for group in groups if not script_failed() else ():
            error = group.compare_at_exit(max(0.0, deadline - time.monotonic()))
            if error is not None:  # the exit code is decided by now; the ranks that wait raise it
                tell(f"{type(error).__name__}: {error}")
    threads = [thread for group in groups for thread in group.leave()]
    deadline = time.monotonic() + LEAVING_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for group in groups:
        group.give_back()


def _after_fork_in_child() -> None:
    for group in _open_groups():
        group.inherit()


at_exit(Stage.LEAVE_GROUPS, _at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
