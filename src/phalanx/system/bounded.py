"""Doing something that may never return, such as asking a host that may be gone, for a limited time.

From Python 3.12 on no thread can be started when the interpreter ends, which is when a process tells others that it
leaves. Who may want something then calls :func:`keep_spare_thread` before: the thread that this starts does it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from phalanx.system.threads import start

__all__ = ["keep_spare_thread", "on_spare_thread", "within"]

T = TypeVar("T")

_SLICE_S = 0.1  # of a wait; more than that does not count of a time in which the process was stopped

# What the spare thread has to do, None to end; and for how many objects it is kept. Any thread reads and writes them
# under ``_changing``, which a finalizer or a signal handler may take again. A task that never returns keeps the thread,
# and no later one is done.
_tasks: SimpleQueue[Callable[[], object] | None] | None = None
_users = 0
_changing = threading.RLock()


def within(timeout_s: float, task: Callable[[], T]) -> T:
    """What ``task`` returns or raises. It runs on a thread of its own, which is left alone if it takes too long.

    Raises:
        TimeoutError: it has not returned in time.
        RuntimeError: no thread can be started, and none was kept.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(task())
        except BaseException as error:
            errors.append(error)
        done.set()

    try:
        start(threading.Thread(target=run, name="phalanx-bounded", daemon=True))
    except RuntimeError:
        on_spare_thread(run)
    left_s = timeout_s
    while left_s > 0 and not done.wait(min(left_s, _SLICE_S)):
        left_s -= _SLICE_S
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"not done within {timeout_s:g} s")
    return outcome[0]


def keep_spare_thread(user: object) -> None:
    """Have a thread ready for when no other can be started any more, as long as ``user`` exists."""
    global _tasks, _users
    with _changing:
        if _tasks is None:
            tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
            start(threading.Thread(target=_work, args=(tasks,), name="phalanx-spare", daemon=True))
            _tasks = tasks
        _users += 1
    weakref.finalize(user, _release, os.getpid()).atexit = False


def on_spare_thread(task: Callable[[], object]) -> None:
    """Have the spare thread do something, after what it was given before.

    Raises:
        RuntimeError: there is none.
    """
    with _changing:
        if _tasks is None:
            raise RuntimeError("no thread can be started any more, and none was kept for that")
        _tasks.put(task)


def _work(tasks: SimpleQueue[Callable[[], object] | None]) -> None:
    while (task := tasks.get()) is not None:
        with contextlib.suppress(Exception):  # what comes next has nobody else to do it
            task()
        del task


def _release(pid: int) -> None:
    global _tasks, _users
    with _changing:
        if pid == os.getpid():  # the thread of a parent is not in this process
            _users -= 1
            if not _users and _tasks is not None:
                _tasks.put(None)
                _tasks = None


def _after_fork() -> None:
    global _tasks, _users, _changing
    _tasks, _users, _changing = None, 0, threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
