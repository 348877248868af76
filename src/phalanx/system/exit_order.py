"""What this package does as the process exits, in one order, whatever was imported first.

Exit handlers run in the reverse order of their registration. With one in each module that follows the order of the
imports, which nobody sees, and which once ended the connections that say whether a rank is there before the rank had
said that it leaves: others then took it for one that had died. So one handler runs all that the modules have to do.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from enum import IntEnum

__all__ = ["Stage", "at_exit", "register"]


class Stage(IntEnum):
    """What is done at exit; the stages follow each other in this order."""

    LEAVE_GROUPS = 0  # compare the last calls, end the threads, and say that this rank leaves
    DELIVER_MESSAGES = 1  # wait for what was sent in groups that were destroyed before
    END_LOOKOUT = 2  # from now on the other ranks see that this process ends
    AWAIT_STORE = 3  # wait for what threads have asked the store
    END_STORES = 4  # let the store of this process, if it has one, serve those that are connected


_tasks: dict[Stage, Callable[[], object]] = {}


def at_exit(stage: Stage, task: Callable[[], object]) -> None:
    """Have ``task`` run at this stage when the process exits; a module calls this as it is imported.

    What fails, or is interrupted, keeps nothing else from being run.
    """
    _tasks[stage] = task
    register()


def register() -> None:
    """Register the exit handler anew: it runs before those that were registered until now."""
    atexit.unregister(_run)
    atexit.register(_run)


def _run() -> None:
    with contextlib.ExitStack() as stack:
        for _, task in sorted(_tasks.items(), reverse=True):
            stack.callback(task)
