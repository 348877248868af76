"""The operations of one group: each with its outcome, and all of them one at a time, in the order they were called.

A synchronous operation runs on the caller's thread, after what is queued before it. An asynchronous one is queued, and
the first thread that comes runs it: one that waits for it, one that calls a synchronous operation, or one of the
group's own. So ``all_reduce(async_op=True).wait()`` needs no switch of threads, and a gradient bucket moves while
backward computes.

A thread of the group waits for a request, *attends* to the queue, or is in the callbacks of an operation. One that
attends runs the queue at once for an urgent operation. For a small one, which takes less time than waking a thread, it
naps first, and runs what is queued after a nap in which nobody ran an operation. While a thread waits for an operation
it runs the queue up to that one, and the group's threads nap. A callback may wait for a further operation, as
PowerSGD's do, so another thread is started when all are in callbacks. No operation is forgotten: a caller appends and
then reads the count of those that attend, a thread changes the count and then reads the queue.

| field | writer | readers | guard |
|---|---|---|---|
| ``state`` (busy), ``_served``, ``_closed`` | holder of ``running`` | all | ``running`` to write |
| ``queue`` | callers append, the holder of ``running`` pops; None at its head for ever: closed | all | atomic deque |
| ``_attending``, ``_in_callbacks`` | own threads | all | ``_counting`` to write: no caller takes it |
| ``_wanted``: what a thread waits for last | who waits | the group's threads | a hint, replaced whole |
| ``given_up`` | ``give_up``, once | who runs an operation | one assignment |

While the core waits, the main thread runs signal handlers, and a handler may call the group. So ``running`` is
reentrant, and a caller that gets the lock and finds the group busy is a handler inside what it has interrupted.
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

__all__ = ["LateFuture", "Operation", "Progress", "nothing"]

NAP_S = 0.001
# The requests to the group's threads.
_NOW, _NAP, _END = "run the queue", "nap first", "end"


class LateFuture:
    """The future of an operation or a message, made when it is first asked for; ``_lock`` guards both fields.

    It always succeeds, and its outcome, or the error, comes of a callback: torch would store an exception that is set
    from Python as a value, which C++ callers (DDP) take for tensors.
    """

    _lock: threading.Lock
    _future: torch.futures.Future[Any] | None = None
    _completed = False

    def future_of(self, outcome: Callable[[Any], list[torch.Tensor]]) -> torch.futures.Future[Any]:
        """Return a future of what ``outcome`` returns or raises, once :meth:`settle` was called."""
        with self._lock:
            first, base = self._future is None, self._future or torch.futures.Future()
            self._future = base
            completes = first and self._completed
        if completes:
            base.set_result(None)
        return base.then(outcome)

    def settle(self) -> torch.futures.Future[Any] | None:
        """Return the future for the caller to complete, without the group's lock; None if there is none, or it was."""
        with self._lock:
            future, self._completed = None if self._completed else self._future, True
        return future


class Operation(LateFuture):
    """One queued call: the body to run, whether it has run, and its outcome.

    | field | writer | guard |
    |---|---|---|
    | ``error``, then ``done`` | who runs it | who finds ``done`` may read ``error`` |
    | ``_done_event`` | any thread, once | ``_lock`` |
    | ``told``: a wait has raised the error | who waits | only ever set |
    | ``waited``: called by every thread that has waited | the caller, before it hands out the operation | |
    """

    def __init__(self, body: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._lock = threading.Lock()
        self._body = body
        self._site = call_site.capture(3)  # when it runs, perhaps on another thread, the stack of the call is gone
        self.result = result
        self.done = self.told = False
        self.error: BaseException | None = None
        self.waited: Callable[[], None] | None = None
        self._done_event: threading.Event | None = None

    def run(self, owner: Progress) -> None:
        """Run the body and wake the threads that wait. Called once, by the holder of the group's lock.

        Once the queue is given up the body is not run, and an error of ours that it raises has come of that.
        """
        body, self._body = self._body, nothing  # the tensors that the body refers to must not outlive it
        call_site.running.site = self._site
        try:
            if owner.given_up is not None:
                raise owner.given_up
            body()
        except PhalanxError as error:
            self.error = owner.given_up or error
        except BaseException as error:
            self.error = error
        finally:
            call_site.running.site = None
        with self._lock:
            self.done = True
            event = self._done_event
        if event is not None:
            event.set()

    def finish(self) -> None:
        """Complete the future, which runs its callbacks here, then raise what interrupted this thread.

        A Ctrl-C belongs to the thread that it interrupted, even if the operation was another thread's.
        """
        if (future := self.settle()) is not None:
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
        """Return a future of the result tensors."""
        return self.future_of(self._outcome)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.result


class Progress:
    """The queue of one group and, from its first asynchronous operation on, its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.running = threading.RLock()
        self.state = bytearray(1)  # whether an operation runs; native/csrc_entry reads and writes it as well
        self.queue: deque[Operation | None] = deque()
        self.inherited = False  # whether it is a parent process's: then this one may neither use it nor close it
        self._closed = self._leaving = False
        self.given_up: BaseException | None = None
        self._requests: TimedQueue[str] = TimedQueue()
        self._threads: list[threading.Thread] = []
        self._served = 0  # how many operations of the queue have run
        self._wanted: Operation | None = None
        self._attending = self._in_callbacks = 0
        self._counting = threading.Lock()

    @property
    def busy(self) -> bool:
        """True while an operation runs."""
        return self.state[0] != 0

    # -- the callers -------------------------------------------------------------------------------

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
                last = self.queue[-1]
            if last is None:
                raise self._closed_error()
            self.help(last)

    def interrupted(self) -> bool:
        """Return whether the caller is a signal handler that has interrupted an operation of this group."""
        if not self.running.acquire(blocking=False):
            return False
        try:
            return self.busy
        finally:
            self.running.release()

    def submit(self, body: Callable[[], None], result: list[torch.Tensor], urgent: bool) -> Operation:
        """Queue ``body``, whose future has ``result``. Unless it is urgent, it begins within ``NAP_S`` or a wait."""
        operation = Operation(body, result)
        if not self._closed:
            if len(self._threads) <= self._in_callbacks:
                self._start_thread()  # before it is queued, since there may be none to be had
            self.queue.append(operation)
        if self._closed:  # also if it was closed just now: that has run what was queued before
            raise self._closed_error()
        self._ask(_NOW if urgent or self._in_callbacks else _NAP)
        return operation

    def hurry(self) -> None:
        """Have a thread start what is queued now: the caller waits where only another thread can run it."""
        if self.queue:
            self._ask(_NOW)

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

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Run what is queued, then end the threads. Later calls raise ``ClosedError``."""
        with contextlib.suppress(ClosedError):
            self.run(setattr, self, "_closed", True)
            self.run(self.queue.appendleft, None)  # at the head: nothing after it runs
        while self._threads:  # a thread that is about to end may still have started another
            threads, self._threads = self._threads, []
            self._requests.put(_END)
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join()

    def give_up(self, error: BaseException, abort: Callable[[], None]) -> None:
        """End what is queued, and the operation under way, with ``error``; ``abort`` is called if there is any."""
        if self.running.acquire(blocking=False):
            idle = not (self.busy or self.queue)
            self.running.release()
            if idle:
                return
        self.given_up = error  # first: the operation that is ended by `abort` reads it
        abort()
        while (operation := self._run_one()) is not None:
            operation.finish()

    def leave(self) -> list[threading.Thread]:
        """Ask the threads to end after the operation they run, if any; the process exits."""
        self._leaving = True
        if self._threads:
            self._requests.put(_END)
        return list(self._threads)

    def inherit(self) -> None:
        """Close the queue in a child of the group's process: its threads are not here, but may hold its locks."""
        self.inherited = self._closed = True
        self.running, self.state[0] = threading.RLock(), False
        self.queue = deque([None])
        self._threads = []

    # -- the holder of the lock --------------------------------------------------------------------

    def _run_next(self) -> Operation:
        """Run the head of the queue; for the holder of ``running``."""
        self._require_idle()
        self.state[0] = True
        try:
            operation = self.queue[0]
            if operation is None:
                raise self._closed_error()
            self.queue.popleft()
            self._served += 1
            operation.run(self)
            return operation
        finally:
            self.state[0] = False

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

    # -- the group's threads -----------------------------------------------------------------------

    def _ask(self, request: str) -> None:
        """Have a thread attend to the queue. Called after the queue has been added to."""
        if self._attending and (request is _NAP or self._requests.qsize()):
            return
        if len(self._threads) <= self._in_callbacks:
            with contextlib.suppress(BackendError):  # a callback that waits without a limit runs it itself
                self._start_thread()
        # A request that nobody has taken yet serves this operation too. An urgent one may follow one to nap.
        if self._requests.qsize() <= (len(self._threads) if request is _NOW else 0):
            self._requests.put(request)

    def _start_thread(self) -> None:
        # A daemon: an interpreter that exits with an operation still waiting for a lost rank must not wait too.
        thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
        start(thread)
        self._threads.append(thread)

    def _serve(self) -> None:
        request = self._requests.get()
        while request is not _END:
            self._count(attending=1)
            if request is _NAP:
                request = self._nap()
            if request is _NOW:
                self._run_queue()
            self._count(attending=-1)
            if request is not _END:
                request = _NAP if self._waits() and not self._leaving else self._requests.get()
        self._requests.put(_END)  # for the next thread

    def _nap(self) -> str:
        """Nap for as long as other threads run what is queued; returns the request to follow next."""
        while True:
            served = self._served
            try:
                request = self._requests.get(NAP_S)
            except queue.Empty:
                if served == self._served:
                    self._wanted = None  # its wait was interrupted, or is in a long operation
                    return _NOW
            else:
                if request is not _NAP:
                    return request

    def _run_queue(self) -> None:
        while not (self._leaving or self._is_helped()) and (operation := self._run_one()) is not None:
            future = operation.settle()
            if future is not None:
                self._call_back(future)
            del operation, future  # this thread is not to keep tensors while it waits

    def _is_helped(self) -> bool:
        wanted = self._wanted
        return wanted is not None and not wanted.done

    def _run_one(self) -> Operation | None:
        """Run one operation; None if there was none."""
        with self.running:  # a thread that waited for the last one may have run it
            return self._run_next() if self._waits() else None

    def _call_back(self, future: torch.futures.Future[Any]) -> None:
        """Complete a future, which runs its callbacks here."""
        self._count(attending=-1, in_callbacks=1)
        if self._waits():
            self._ask(_NAP)
        try:
            future.set_result(None)
        finally:
            self._count(attending=1, in_callbacks=-1)

    def _waits(self) -> bool:
        try:
            return self.queue[0] is not None
        except IndexError:
            return False

    def _count(self, attending: int = 0, in_callbacks: int = 0) -> None:
        with self._counting:
            self._attending += attending
            self._in_callbacks += in_callbacks


def nothing() -> None:
    """Do nothing: the body of an operation that has run, or of one that only marks a place in the order."""
