"""One exit handler runs all that modules have to do, in one order, whatever was imported first."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from enum import IntEnum


class Stage(IntEnum):
    """Stages of the exit, in their order."""

    LEAVE_GROUPS = 0  # compare the last calls, end the threads, and say that this rank leaves
    END_MEMBERSHIP = 1  # say that this rank leaves the job
    END_STORES = 2  # let the store of this process, if it has one, serve those that are connected


_tasks: dict[Stage, Callable[[], object]] = {}


def at_exit(stage: Stage, task: Callable[[], object]) -> None:
    """Have ``task`` run at this stage when the process exits; what fails keeps nothing else from being run."""
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
