"""One group's operations, one at a time, in the order they were called.

A synchronous operation runs on the caller's thread when nothing is queued before it, which is the common case
and costs a lock. An asynchronous one is queued, and the first thread that comes runs it: the group's progress thread,
or a thread that waits for it or calls a synchronous operation after it. So ``all_reduce(async_op=True).wait()`` needs
no switch to another thread, and a gradient bucket moves while backward computes.

A small operation is usually waited for at once, and waking a thread for it costs more than the operation: the two
contend for the interpreter. The thread polls for those every millisecond instead, as long as there are any.

One lock, ``running``, is held by the thread that runs operations; ``queue`` is appended to by callers and popped only
by the holder of the lock. Several threads touch the queue: deque's append and popleft are atomic. A closed group's
queue begins with None for ever, so that a caller that only tests whether it is empty finds that it is not. ``_closed``
is set by the holder of the lock and read without it; ``_in_callbacks`` is changed under ``_counting`` and read without
it.

While the core waits, the main thread runs Python's signal handlers, and a handler may call the group. The lock is
therefore reentrant, and its holder sets ``busy`` while an operation runs. A caller that gets the lock and finds
``busy`` set must be a signal handler on the same thread, inside an operation that it interrupted. A handler that runs
after the lock is taken and before ``busy`` is set finds the group idle, and may use it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.c10d.leaving import end_before_the_interpreter
from phalanx.c10d.operation import Operation
from phalanx.errors import PROCESS_LIMIT_HINT, BackendError, ClosedError, ReentryError

__all__ = ["Progress"]

NAP_S = 0.001
# The requests to the group's threads: run one operation now, begin to poll, end.
_NOW, _SOON, _END = "now", "soon", "end"


class Progress:
    """The queue of one group and, from its first asynchronous operation on, its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.RLock()
        self.busy = False
        self.queue: deque[Operation | None] = deque()
        self.inherited = False  # whether it is a parent process's: then this one may neither use it nor close it
        self._closed = False
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._watching = False
        self._in_callbacks = 0
        self._counting = threading.Lock()
        _groups.add(self)
        end_before_the_interpreter(self)

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        """Run ``body(*arguments)`` here and now, after everything queued before it."""
        while True:
            with self.running:
                if self.busy:
                    self._require_idle()
                self.busy = True
                try:
                    if not self.queue:
                        body(*arguments)
                        return
                    operation = self._run_next()
                finally:
                    self.busy = False
            operation.finish()

    def interrupted(self) -> bool:
        """Whether the caller is a signal handler that has interrupted an operation of this group."""
        if not self.running.acquire(blocking=False):
            return False
        try:
            return self.busy
        finally:
            self.running.release()

    def submit(self, body: Callable[[], None], result: list[torch.Tensor], urgent: bool) -> Operation:
        """Queue ``body``; returns at once.

        Args:
            body: what to run.
            result: what the operation's future holds.
            urgent: start it now; else it may take ``NAP_S`` until it begins, unless a thread waits for it.
        """
        if self._closed:
            raise self._closed_error()
        operation = Operation(body, result)
        if len(self._threads) <= self._in_callbacks:
            self._start_thread()
        self.queue.append(operation)
        # Read it again, after the append: the thread that closes the group sets it, and then runs what was queued until
        # then.
        if self._closed:
            self._end_threads()
            raise self._closed_error()
        if urgent or self._in_callbacks:
            self._calls.put(_NOW)
        elif not self._watching:
            self._watching = True
            self._calls.put(_SOON)
        return operation

    def hurry(self) -> None:
        """Have a thread start what is queued now: the caller waits where only another thread can run it."""
        for _ in range(len(self.queue)):
            self._calls.put(_NOW)

    def help(self, operation: Operation) -> None:
        """Run what is queued up to ``operation`` on this thread, unless another thread runs it."""
        while not operation.done:
            # `with`, though it waits for the other thread: between a call of acquire() and a `try` a signal handler
            # may raise, and the lock would stay held.
            with self.running:
                self._require_idle()
                self.busy = True
                try:
                    if operation.done or not self.queue:
                        return
                    done = self._run_next()
                finally:
                    self.busy = False
            done.finish()

    def close(self) -> None:
        """Run what is queued, then end the threads. Later calls raise ``ClosedError``."""
        with contextlib.suppress(ClosedError):
            self.run(setattr, self, "_closed", True)
            self.run(self.queue.appendleft, None)  # at the head: nothing after it runs
        self._end_threads()

    def leave(self) -> list[threading.Thread]:
        """Ask the threads to end after the operation they run, if any; the process exits."""
        if self._threads:
            self._calls.put(_END)
        return list(self._threads)

    def _end_threads(self) -> None:
        while self._threads:  # a thread that is about to end may still have started another
            threads, self._threads = self._threads, []
            self._calls.put(_END)
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join()

    def _run_next(self) -> Operation:
        operation = self.queue[0]
        if operation is None:
            raise self._closed_error()
        self.queue.popleft()
        operation.run()
        return operation

    def _require_idle(self) -> None:
        if self.busy:
            raise ReentryError(
                f"a signal handler called process group {self._name!r} while an operation of it, which the handler had "
                "interrupted, was under way: that one goes on only when the handler returns. Let the handler raise, or "
                "set a flag; it may destroy the group"
            )

    def _closed_error(self) -> ClosedError:
        if self.inherited:
            return ClosedError.of_parent(f"process group {self._name!r}", os.getpid())
        return ClosedError(f"process group {self._name!r} was used after it had been destroyed")

    def _start_thread(self) -> None:
        # A daemon: an interpreter that exits with an operation still waiting for a lost rank must not wait too.
        thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise BackendError(
                f"process group {self._name!r} needs a thread for asynchronous operations, and the system gave none "
                f"({error}): {PROCESS_LIMIT_HINT}"
            ) from error
        self._threads.append(thread)

    def _serve(self) -> None:
        while (call := self._calls.get()) != _END:
            if call == _NOW:
                self._serve_one()
            else:
                self._watch()
        # Pass the request on to the next thread. With one request for each thread, a thread that is started while the
        # group closes would take another's, and that one would never end.
        self._calls.put(_END)

    def _watch(self) -> None:
        """Run what is queued, a nap later, until a nap has brought nothing."""
        while True:
            time.sleep(NAP_S)
            if self._serve_one():
                while self._serve_one():
                    pass
                continue
            # In this order: a caller appends to the queue first and then reads the flag, so one of the two sees the
            # other.
            self._watching = False
            if not self._waits():
                return
            self._watching = True

    def _waits(self) -> bool:
        try:
            return self.queue[0] is not None
        except IndexError:
            return False

    def _serve_one(self) -> bool:
        """Run one operation and its callbacks; False if there was none."""
        with self.running:
            self.busy = True
            try:
                if not self._waits():
                    return False  # a thread that waited for it has run it
                operation = self._run_next()
            finally:
                self.busy = False
        # A callback may wait for a further operation of this group (PowerSGD's do). The thread that submits that one
        # sees from this count that another thread is needed to run it.
        with self._counting:
            self._in_callbacks += 1
        try:
            # An operation that was queued just before woke no thread, since this one was awake.
            if self._waits():
                if len(self._threads) <= self._in_callbacks:
                    with contextlib.suppress(BackendError):  # a callback that waits without a limit runs it itself
                        self._start_thread()
                self.hurry()
            operation.complete()
        finally:
            with self._counting:
                self._in_callbacks -= 1
        return True


_groups: weakref.WeakSet[Progress] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close the groups of the parent in the child: their threads are not here but may hold their locks, and only the
    parent may run what is queued, in memory that it shares with the other ranks.
    """
    for group in list(_groups):
        group.inherited = group._closed = True
        group.running, group.busy = threading.RLock(), False
        group.queue = deque([None])
        group._threads = []


os.register_at_fork(after_in_child=_after_fork_in_child)
