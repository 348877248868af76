"""One group's operations, one at a time, in the order they were called.

A synchronous operation runs on the caller's thread when nothing is queued before it, which is the common case
and costs a lock. An asynchronous one is queued, and the first thread that comes runs it: one of the group's threads,
or a thread that waits for it or calls a synchronous operation after it. So ``all_reduce(async_op=True).wait()`` needs
no switch to another thread, and a gradient bucket moves while backward computes.

A thread of the group is idle (it blocks in ``_calls.get``), naps (the same, for ``NAP_S`` at most), drains the queue,
or is in the callbacks of an operation that it ran.

- An urgent operation has a thread drain the queue at once. A small one is usually waited for at once, and waking a
  thread for it costs more than the operation: the two contend for the interpreter. So it has a thread nap, and drain
  what is still queued after a nap in which no other thread ran any operation.
- While a thread waits for an operation it runs the queue up to that one, and a draining thread stands back to a nap:
  with hundreds of operations under way, a switch of threads for each would cost more than the operations.
- A callback may wait for a further operation of the group (PowerSGD's do), so a thread in callbacks counts for nothing,
  and another one is started when all are.

What holds, whatever is queued and whoever waits:

1. While an operation is queued, a thread of the group drains or naps, or ``_calls`` holds a request and a thread is
   free to take it. A caller appends the operation first and then reads the counts; a thread that stops draining, ends a
   nap or enters callbacks changes the counts first and then reads the queue: one of the two sees the other.
2. After an urgent submission, or ``hurry``, that thread drains: at once, or, if a waiting thread runs the queue, within
   two naps after that one has stopped.
3. ``_calls`` holds at most one request more than there are threads, however many operations are queued.
4. Only the holder of ``running`` runs an operation, and it takes the queue's head: the order is that of the calls.

One lock, ``running``, is held by the thread that runs operations; ``queue`` is appended to by callers and popped only
by the holder of the lock. Several threads touch the queue: deque's append and popleft are atomic. A closed group's
queue begins with None for ever, so that a caller that only tests whether it is empty finds that it is not. ``_closed``,
``busy`` and ``_served`` are set by the holder of the lock and read without it. ``_draining``, ``_napping`` and
``_in_callbacks`` are changed by the group's threads only, under ``_counting``, and read by all without it: a signal
handler, which may interrupt a caller anywhere, never finds that lock taken by the thread that it interrupted.
``_wanted``, the operation that a thread waits for last, is a hint: it is replaced whole and may be out of date.

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
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.c10d.leaving import end_before_the_interpreter
from phalanx.c10d.operation import Operation
from phalanx.errors import BackendError, ClosedError, ReentryError
from phalanx.system.threads import TimedQueue, start

__all__ = ["Progress"]

NAP_S = 0.001
# The requests to the group's threads: drain the queue, nap first, end.
_DRAIN, _NAP, _END = "drain", "nap", "end"


class Progress:
    """The queue of one group and, from its first asynchronous operation on, its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.RLock()
        self.busy = False
        self.queue: deque[Operation | None] = deque()
        self.inherited = False  # whether it is a parent process's: then this one may neither use it nor close it
        self._closed = False
        self._calls: TimedQueue[str] = TimedQueue()
        self._threads: list[threading.Thread] = []
        self._leaving = False
        self.given_up: BaseException | None = None  # written once, by give_up(), and read by who runs an operation
        self._served = 0  # how many operations of the queue have run
        self._wanted: Operation | None = None
        self._draining = self._napping = self._in_callbacks = 0
        self._counting = threading.Lock()
        _groups[id(self)] = self
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
                    self._wanted = self.queue[-1]
                    operation = self._run_next()
                finally:
                    self.busy = False
            self._wanted = None
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
        self._ask(_DRAIN if urgent or self._in_callbacks else _NAP)
        return operation

    def hurry(self) -> None:
        """Have a thread start what is queued now: the caller waits where only another thread can run it."""
        if self.queue:
            self._ask(_DRAIN)

    def help(self, operation: Operation) -> None:
        """Run what is queued up to ``operation`` on this thread, unless another thread runs it."""
        try:
            while not operation.done:
                self._wanted = operation
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
                self._wanted = None  # a callback may wait for a further operation, which another thread is to run
                done.finish()
        finally:
            self._wanted = None  # else it would keep the operation's tensors

    def close(self) -> None:
        """Run what is queued, then end the threads. Later calls raise ``ClosedError``."""
        with contextlib.suppress(ClosedError):
            self.run(setattr, self, "_closed", True)
            self.run(self.queue.appendleft, None)  # at the head: nothing after it runs
        self._end_threads()

    def give_up(self, error: BaseException, abort: Callable[[], None]) -> None:
        """End what is queued, and the operation under way, with ``error``.

        Args:
            error: what they raise.
            abort: ends the operation under way; not called if there is none, and nothing is queued.
        """
        if self.running.acquire(blocking=False):
            idle = not (self.busy or self.queue)
            self.running.release()
            if idle:
                return
        self.given_up = error  # first: the operation that is ended by `abort` reads it
        abort()
        while True:
            with self.running:
                if not self._waits():
                    return
                operation = self._run_next()
            operation.finish()

    def leave(self) -> list[threading.Thread]:
        """Ask the threads to end after the operation they run, if any; the process exits."""
        self._leaving = True
        if self._threads:
            self._calls.put(_END)
        return list(self._threads)

    def give_back(self) -> None:
        """There is nothing."""

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
        self._served += 1
        operation.run(self)
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

    def _ask(self, request: str) -> None:
        """Have a thread drain the queue or nap, unless one drains it. Called after the queue has been added to."""
        if self._draining or (request is _NAP and self._napping):
            return
        if len(self._threads) <= self._in_callbacks:
            with contextlib.suppress(BackendError):  # a callback that waits without a limit runs it itself
                self._start_thread()
        # A request that nobody has taken yet serves this operation too. One to drain may follow one to nap.
        if self._calls.qsize() <= (len(self._threads) if request is _DRAIN else 0):
            self._calls.put(request)

    def _start_thread(self) -> None:
        # A daemon: an interpreter that exits with an operation still waiting for a lost rank must not wait too.
        thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
        start(thread)
        self._threads.append(thread)

    def _serve(self) -> None:
        request = self._calls.get()
        while request != _END:
            request = self._nap() if request == _NAP else self._drain()
        # Pass the request on to the next thread. With one request for each thread, a thread that is started while the
        # group closes would take another's, and that one would never end.
        self._calls.put(_END)

    def _nap(self) -> str:
        """Nap for as long as other threads run what is queued; returns the request to follow next."""
        self._count(napping=1)
        while True:
            served = self._served
            try:
                request = self._calls.get(NAP_S)
            except queue.Empty:
                request = _NAP
            if request is not _NAP:
                self._count(napping=-1)
                return request
            if served == self._served:
                break
        self._count(napping=-1)
        if self._draining or not self._waits():
            return self._calls.get()
        self._wanted = None  # no operation has begun in a whole nap: a wait was interrupted, or is in a long one
        return _DRAIN

    def _drain(self) -> str:
        """Run what is queued until nothing is, or a waiting thread runs it; returns the request to follow next."""
        self._count(draining=1)
        while not self._leaving:
            wanted = self._wanted
            if wanted is not None and not wanted.done:
                self._count(draining=-1)
                return _NAP
            operation = self._serve_one()
            if operation is None:
                self._count(draining=-1)
                if not self._waits():
                    break
                self._count(draining=1)
            elif (future := operation.settle()) is not None and not self._call_back(future):
                break
        wanted = operation = future = None  # this thread is not to keep tensors while it waits
        return self._calls.get()

    def _serve_one(self) -> Operation | None:
        """Run one operation; None if there was none."""
        with self.running:
            self.busy = True
            try:
                # A thread that waited for the last one may have run it.
                return self._run_next() if self._waits() else None
            finally:
                self.busy = False

    def _call_back(self, future: torch.futures.Future[Any]) -> bool:
        """Complete a future, which runs its callbacks here; whether this thread is to go on draining."""
        self._count(draining=-1, in_callbacks=1)
        if self._waits():
            self._ask(_NAP)
        try:
            future.set_result(None)
        finally:
            go_on = not self._draining
            self._count(draining=int(go_on), in_callbacks=-1)
        return go_on

    def _waits(self) -> bool:
        try:
            return self.queue[0] is not None
        except IndexError:
            return False

    def _count(self, draining: int = 0, napping: int = 0, in_callbacks: int = 0) -> None:
        with self._counting:
            self._in_callbacks += in_callbacks
            self._draining += draining
            self._napping += napping


# By identity: unlike a WeakSet it can be listed in one step, while other threads make groups.
_groups: weakref.WeakValueDictionary[int, Progress] = weakref.WeakValueDictionary()


def _after_fork_in_child() -> None:
    """Close the groups of the parent in the child: their threads are not here but may hold their locks, and only the
    parent may run what is queued, in memory that it shares with the other ranks.
    """
    for reference in _groups.valuerefs():
        group = reference()
        if group is None:
            continue
        group.inherited = group._closed = True
        group.running, group.busy = threading.RLock(), False
        group.queue = deque([None])
        group._threads = []


os.register_at_fork(after_in_child=_after_fork_in_child)
