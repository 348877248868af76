"""Asking the job's store, which may be on a host that is slow, stopped, or cannot be reached.

Each question waits a limited time. One that is not answered in that time goes on by itself on its thread, and until it
is answered little else is asked, as that would take as long. So a store that stands still for a second is asked again
as soon as it answers, and one that never does is not waited for again and again.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from phalanx.system.bounded import keep_spare_thread, on_spare_thread, within

__all__ = ["STORE_S", "Questions", "aside"]

# How long the store may take to answer. Where it can be reached, it answers at once.
STORE_S = 0.7
# How long the end of the process waits for threads that talk to the store. If one of them came back from torch's C++
# while the interpreter finalises, the process would abort.
_LEAVING_S = 0.5

T = TypeVar("T")

# What threads of this process do here, each set when it is done. Each thread adds and removes its own, in one step of
# Python's; one that never comes back keeps the end of the process waiting for ``_LEAVING_S``.
_under_way: set[threading.Event] = set()


class Questions:
    """The questions of one rank of one group. Any thread may ask.

    ``_unanswered`` has those whose time is over. The thread that waited for one adds it, unless it has been answered by
    then; the thread that asks it marks it as answered and removes it; each does so under ``_lock``. If that thread
    never comes back, the store is taken to be late for as long as the group exists.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unanswered: set[threading.Event] = set()
        keep_spare_thread(self)  # a rank says that it leaves also when its interpreter ends

    def ask(self, task: Callable[[], T], patience_s: float = STORE_S, anyway: bool = False) -> T | None:
        """What the store says; None if it cannot be reached, or is late already.

        Args:
            task: asks it.
            patience_s: how long it may take.
            anyway: ask and wait even if it is late; the task is carried out, however late it is.
        """
        if self.are_late and not anyway:
            return None
        answered = threading.Event()

        def asked() -> T:
            _under_way.add(answered)
            try:
                return task()
            finally:
                with self._lock:
                    answered.set()
                    self._unanswered.discard(answered)
                _under_way.discard(answered)

        try:
            return within(patience_s, asked)
        except TimeoutError:
            with self._lock:
                if not answered.is_set():
                    self._unanswered.add(answered)
        except RuntimeError:
            pass  # it has gone with rank 0
        return None

    def say(self, task: Callable[[], T]) -> T | None:
        """:meth:`ask` for what others have to learn: a store that is late is told as well, and not waited for."""
        return self.ask(task, 0.0 if self.are_late else STORE_S, anyway=True)

    @property
    def are_late(self) -> bool:
        """Whether one has not been answered in time, and still is not."""
        return bool(self._unanswered)


def aside(task: Callable[[], object]) -> None:
    """Do something that may have to wait for the store on a thread of its own."""
    done = threading.Event()

    def run() -> None:
        _under_way.add(done)
        try:
            task()
        finally:
            done.set()
            _under_way.discard(done)

    try:
        threading.Thread(target=run, name="phalanx-reason", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        on_spare_thread(run)


def _at_exit() -> None:
    until = time.monotonic() + _LEAVING_S
    for done in list(_under_way):
        done.wait(max(0.0, until - time.monotonic()))


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_under_way.clear)  # those threads are the parent's
