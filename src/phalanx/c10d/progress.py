"""The operations of one group: each with its outcome, and all of them one at a time, in the order they were called.

A synchronous operation runs on the caller's thread if nothing is queued before it. An asynchronous one is queued, and
the first thread that comes runs it: one of the group's own, one that waits for it, or one that calls a synchronous
operation after it. So ``all_reduce(async_op=True).wait()`` needs no switch of threads, and a gradient bucket moves
while backward computes.

A thread of the group is idle, naps (for ``NAP_S`` at most), drains the queue, or is in the callbacks of an operation:

- An urgent operation has a thread drain the queue at once. A small one has a thread nap, and drain what is still queued
  after a nap in which nobody ran an operation: to wake a thread for it costs more than the operation.
- While a thread waits for an operation it runs the queue up to that one, and a draining thread stands back to a nap.
- A callback may wait for a further operation of the group, as PowerSGD's do. So a thread in callbacks counts for
  nothing, and another one is started when all are.

What holds, whatever is queued and whoever waits:

1. While an operation is queued, a thread of the group drains or naps, or ``_calls`` holds a request and a thread is
   free to take it. A caller appends first and then reads the counts. A thread changes the counts first and then reads
   the queue. So one of the two sees the other.
2. After an urgent submission, or ``hurry``, that thread drains at once; if a waiting thread runs the queue, within two
   naps after that one has stopped.
3. ``_calls`` holds at most one request more than there are threads, however many operations are queued.
4. Only the holder of ``running`` runs an operation, and it takes the queue's head.

| field | writer | readers | guard |
|---|---|---|---|
| ``busy``, ``_served``, ``_closed`` | holder of ``running`` | all | ``running`` to write |
| ``queue`` | callers append, the holder of ``running`` pops; None at its head for ever: closed | all | atomic deque |
| ``_draining``, ``_napping``, ``_in_callbacks`` | own threads | all | ``_counting`` to write: no caller takes it |
| ``_wanted``: what a thread waits for last | who waits | the group's threads | a hint, replaced whole |
| ``given_up`` | ``give_up``, once | who runs an operation | one assignment |

While the core waits, the main thread runs signal handlers, and a handler may call the group. So ``running`` is
reentrant, and its holder sets ``busy`` while an operation runs. A caller that gets the lock and finds ``busy`` set is a
handler inside an operation that it interrupted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.diagnosis import call_site
from phalanx.errors import BackendError, ClosedError, PhalanxError, ReentryError
from phalanx.system.threads import TimedQueue, start, wait_awake

__all__ = ["Operation", "Progress", "around"]

NAP_S = 0.001
# The requests to the group's threads: drain the queue, nap first, end.
_DRAIN, _NAP, _END = "drain", "nap", "end"


class Around(threading.local):
    """Wrappers around the operation of this thread's present call, whichever thread runs that.

    Attributes:
        wraps: each takes the operation's body and returns a new one.
    """

    wraps: tuple[Callable[[Callable[[], None]], Callable[[], None]], ...] = ()


around = Around()


class Operation:
    """One queued call: the body to run, whether it has run, and its outcome.

    | field | writer | guard |
    |---|---|---|
    | ``error``, then ``done`` | who runs it | who finds ``done`` may read ``error`` |
    | ``_done_event``, ``_future``, ``_completed`` | any thread, once | ``_lock`` |
    | ``told``: a wait has raised the error | who waits | only ever set |
    | ``waited``: called by every thread that has waited | the caller, before it hands out the operation | |
    """

    __slots__ = (
        "_body",
        "_completed",
        "_done_event",
        "_future",
        "_lock",
        "_site",
        "done",
        "error",
        "result",
        "told",
        "waited",
    )

    def __init__(self, body: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._body = body
        self._site = call_site.capture(3)  # when it runs, perhaps on another thread, the stack of the call is gone
        self.result = result
        self._completed = self.done = self.told = False
        self.error: BaseException | None = None
        self.waited: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._done_event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self, queue: Progress) -> None:
        """Run the body and wake the threads that wait. Called once, by the holder of the group's lock.

        Once the queue is given up the body is not run, and an error of ours that it raises has come of that.
        """
        body, self._body = self._body, _nothing  # the tensors that the body refers to must not outlive it
        call_site.running.site = self._site
        try:
            if queue.given_up is not None:
                raise queue.given_up
            body()
        except BaseException as error:
            of_that = queue.given_up is not None and isinstance(error, PhalanxError)
            self.error = queue.given_up if of_that else error
        finally:
            call_site.running.site = None
        with self._lock:
            self.done = True
            event = self._done_event
        if event is not None:
            event.set()

    def settle(self) -> torch.futures.Future[Any] | None:
        """The future to be completed now, if any was asked for. Called once, after ``run``, without the group's lock.

        To complete it is the caller's part, since that runs the future's callbacks.
        """
        with self._lock:
            self._completed = True
            return self._future

    def finish(self) -> None:
        """Complete the future, on the thread that ran the operation, then raise what interrupted that thread.

        A Ctrl-C belongs to the thread that it interrupted, even if the operation was another thread's.
        """
        future = self.settle()
        if future is not None:
            future.set_result(None)
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error

    def wait_done(self, timeout_s: float | None) -> bool:
        """Block until the operation has run; False when the timeout came first."""
        with self._lock:
            if self.done:
                return True
            if self._done_event is None:
                self._done_event = threading.Event()
        # Without a limit no time is counted, so the wait need not wake up to count it.
        return self._done_event.wait() if timeout_s is None else wait_awake(self._done_event.wait, timeout_s)

    def future(self) -> torch.futures.Future[Any]:
        """A future of the result tensors, or of the error.

        An error is raised in a callback of the future that is completed, not set on it: torch stores an exception that
        is set from Python as a value, which C++ callers (DDP) then take for tensors.
        """
        base: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            if self._future is None:
                self._future = base
                completed = self._completed
            else:
                base, completed = self._future, False
        if completed:
            base.set_result(None)
        return base.then(self._outcome)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.result


class Progress:
    """The queue of one group and, from its first asynchronous operation on, its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.RLock()
        self.state = bytearray(1)  # ``busy``, where native/csrc_entry reads and writes it as well
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

    @property
    def busy(self) -> bool:
        """True while an operation runs."""
        return self.state[0] != 0

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.state[0] = busy

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        """Run ``body(*arguments)`` here and now, after everything queued before it."""
        state = self.state
        while True:
            with self.running:
                if state[0]:
                    self._require_idle()
                if not self.queue:
                    state[0] = True
                    try:
                        body(*arguments)
                    finally:
                        state[0] = False
                    return
                self._wanted = self.queue[-1]
                operation = self._run_next()
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
                    self._require_idle()  # a handler would wait for ever for what it has interrupted
                    if operation.done or not self.queue:
                        return
                    done = self._run_next()
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

    def inherit(self) -> None:
        """Close the queue in a child of the group's process.

        Its threads are not here but may hold its locks, and only the parent may run what is queued, in memory that it
        shares with the other ranks.
        """
        self.inherited = self._closed = True
        self.running, self.busy = threading.RLock(), False
        self.queue = deque([None])
        self._threads = []

    def _end_threads(self) -> None:
        while self._threads:  # a thread that is about to end may still have started another
            threads, self._threads = self._threads, []
            self._calls.put(_END)
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join()

    def _run_next(self) -> Operation:
        """Run the head of the queue; for the holder of ``running``."""
        self._require_idle()
        self.busy = True
        try:
            operation = self.queue[0]
            if operation is None:
                raise self._closed_error()
            self.queue.popleft()
            self._served += 1
            operation.run(self)
            return operation
        finally:
            self.busy = False

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
        with self.running:  # a thread that waited for the last one may have run it
            return self._run_next() if self._waits() else None

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


def _nothing() -> None:
    pass
