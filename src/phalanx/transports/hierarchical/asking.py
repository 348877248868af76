"""Asking the job's store, which may be on a host that is slow, stopped, or cannot be reached.

Each question waits a limited time. One that is not answered in that time goes on by itself on its thread, and until it
is answered little else is asked, as that would take as long. So a store that stands still for a second is asked again
as soon as it answers, and one that never does is not waited for again and again.

A rank that leaves its group says so as the last thing that it writes there (:meth:`Questions.close`): a later request
could recreate a key that another rank has deleted, or wait for one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from phalanx.membership.client import end_calls
from phalanx.system.exit_order import Stage, at_exit
from phalanx.system.threads import on_spare_thread, spare_thread, start, within

__all__ = ["STORE_S", "Questions"]

# How long the store may take to answer. Where it can be reached, it answers at once.
STORE_S = 0.7
# How long the end of the process waits for threads that talk to the store, and then once more for them after it has
# ended their requests, because the store's host is cut off. If one of them came back from torch's C++ while the
# interpreter finalises, as one that waits for an answer does every second, the process would abort.
_LEAVING_S = 0.5

T = TypeVar("T")

# What threads of this process do here, each set when it is done. It is added before the thread asks anything, and the
# thread removes its own, in one step of Python's; one that never comes back keeps the end of the process waiting for
# twice ``_LEAVING_S``.
_under_way: set[threading.Event] = set()


class Questions:
    """The questions of one rank of one group. Any thread may ask.

    ``_unanswered`` has those whose time is over. The thread that waited for one adds it, unless it has been answered by
    then; the thread that asks it marks it as answered and removes it; each does so under ``_lock``. If that thread
    never comes back, the store is taken to be late for as long as the group exists.

    ``_begun`` has all that are not answered: the thread that asks adds it, and the one that has carried it out removes
    it, under ``_lock`` as well. ``_closed`` and ``_last`` are written under it by :meth:`close`, and the thread that
    finds nothing begun any more takes ``_last``. If a question is never answered, that is never carried out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unanswered: set[threading.Event] = set()
        self._begun: set[threading.Event] = set()
        self._closed = False
        self._last: Callable[[], object] | None = None
        self._spare = spare_thread()  # a rank says that it leaves also when its interpreter ends

    def ask(self, task: Callable[[], T], patience_s: float = STORE_S, anyway: bool = False) -> T | None:
        """What the store says; None if it cannot be reached, or is late already, or nothing is asked any more.

        Args:
            task: asks it.
            patience_s: how long it may take.
            anyway: ask and wait even if it is late; the task is carried out, however late it is.
        """
        if self.are_late and not anyway:
            return None
        answered = self._begin()
        if answered is None:
            return None

        def asked() -> T:
            _under_way.add(answered)
            try:
                return task()
            finally:
                self._end(answered)
                _under_way.discard(answered)

        try:
            return within(patience_s, asked)
        except TimeoutError:
            with self._lock:
                if not answered.is_set():
                    self._unanswered.add(answered)
        except RuntimeError:
            self._end(answered)  # it has gone with rank 0, or there is no thread that could ask
        return None

    def say(self, task: Callable[[], T]) -> T | None:
        """:meth:`ask` for what others have to learn: a store that is late is told as well, and not waited for."""
        return self.ask(task, 0.0 if self.are_late else STORE_S, anyway=True)

    def aside(self, task: Callable[[], object]) -> None:
        """Do something that may have to wait for the store on a thread of its own, unless nothing is asked any more."""
        answered = self._begin()
        if answered is None:
            return

        def run() -> None:
            try:
                task()
            finally:
                self._end(answered)

        try:
            _aside(run)
        except RuntimeError:
            self._end(answered)
            raise

    @contextlib.contextmanager
    def asking(self) -> Iterator[bool]:
        """What the body asks the store, it asks on this thread, and waits for the store as long as that takes.

        Yields:
            Whether anything is asked; if not, nothing may be, as this rank has left the group.
        """
        answered = self._begin()
        if answered is None:
            yield False
            return
        _under_way.add(answered)
        try:
            yield True
        finally:
            self._end(answered)
            _under_way.discard(answered)

    def close(self, last: Callable[[], object]) -> None:
        """Ask nothing more, and have ``last`` carried out when all that was asked has been answered. Waits for nothing.

        Only the first call does anything.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._begun:
                self._last = last
                return
        with contextlib.suppress(RuntimeError):  # there is no thread for it
            _aside(last)

    def close_at_exit(self, last: Callable[[Callable[[], bool]], object]) -> None:
        """:meth:`close`, and wait for ``last`` as long as for an answer, unless the store is late.

        Args:
            last: is given whether to go on, which it asks before each rank's keys: a thread that comes back from
                torch's C++ while the interpreter finalises would abort the process.
        """
        if self.are_late:
            return
        done, over = threading.Event(), threading.Event()

        def run() -> None:
            try:
                last(lambda: not over.is_set())
            finally:
                done.set()

        self.close(run)
        done.wait(STORE_S)
        over.set()

    def _begin(self) -> threading.Event | None:
        answered = threading.Event()
        with self._lock:
            if self._closed:
                return None
            self._begun.add(answered)
        return answered

    def _end(self, answered: threading.Event) -> None:
        with self._lock:
            answered.set()
            self._unanswered.discard(answered)
            self._begun.discard(answered)
            last = None
            if not self._begun:
                last, self._last = self._last, None
        if last is not None:
            last()

    @property
    def are_late(self) -> bool:
        """Whether one has not been answered in time, and still is not."""
        return bool(self._unanswered)


def _aside(task: Callable[[], object]) -> None:
    done = threading.Event()

    def run() -> None:
        try:
            task()
        finally:
            done.set()
            _under_way.discard(done)

    _under_way.add(done)  # not on the thread: the process may end before that has come so far
    try:
        start(threading.Thread(target=run, name="phalanx-reason", daemon=True))
    except RuntimeError:  # the interpreter ends
        try:
            on_spare_thread(run)
        except RuntimeError:
            _under_way.discard(done)
            raise


def _at_exit() -> None:
    if not _all_done():
        end_calls()
        _all_done()


def _all_done() -> bool:
    """Wait for what threads do here; return whether all have done it in time."""
    until = time.monotonic() + _LEAVING_S
    return all(done.wait(max(0.0, until - time.monotonic())) for done in list(_under_way))


at_exit(Stage.AWAIT_STORE, _at_exit)
os.register_at_fork(after_in_child=_under_way.clear)  # those threads are the parent's
