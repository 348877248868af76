"""One group's operations, one at a time, in the order they were called.

A synchronous operation runs on the caller's thread when nothing is queued before it, which is the common case
and costs a lock. An asynchronous one is queued; whoever comes first runs it: the group's progress thread, or a
thread that waits for it or calls a synchronous operation behind it. So ``all_reduce(async_op=True).wait()``
needs no switch to another thread, and a gradient bucket moves while backward computes.

A small operation is usually waited for at once, and waking a thread for it costs more than the operation: the two
contend for the interpreter. The thread looks for those every 0.2 ms instead, as long as there are any.

One lock, ``running``, is held by whoever runs operations; ``queue`` is appended to by callers and popped
only by its holder. Both are touched by several threads: deque's append and popleft are atomic. A closed group's
queue holds None for ever, so that a caller who looks only whether it is empty finds that it is not.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.backends import call_site
from phalanx.errors import ClosedError

__all__ = ["Operation", "Progress"]

NAP_S = 0.0002
_NOW, _SOON, _END = "now", "soon", "end"  # what the thread is told


class Operation:
    """One queued call: what to run, whether it has run, and what came of it."""

    __slots__ = ("_body", "_completed", "_done_event", "_future", "_lock", "_site", "done", "error", "result")

    def __init__(self, body: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._body: Callable[[], None] | None = body
        self._site = call_site.capture(3)  # by whoever runs it, the stack of the call is gone
        self.result = result
        self._completed = False
        self.done = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._done_event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self) -> None:
        """Run the body and wake who waits. Called once, by the holder of the group's lock."""
        body, self._body = self._body, None  # what the body holds on to must not outlive it
        assert body is not None
        call_site.running.site = self._site
        try:
            body()
        except BaseException as error:
            self.error = error
        finally:
            call_site.running.site = None
        with self._lock:
            self.done = True
            event = self._done_event
        if event is not None:
            event.set()

    def complete(self) -> None:
        """Complete the future, which runs its callbacks here. Called once, after ``run``, without the lock."""
        with self._lock:
            future, self._completed = self._future, True
        if future is not None:
            future.set_result(None)

    def wait_done(self, timeout_s: float | None) -> bool:
        """Block until the operation has run; False when the timeout came first."""
        with self._lock:
            if self.done:
                return True
            if self._done_event is None:
                self._done_event = threading.Event()
        return self._done_event.wait(timeout_s)

    def future(self) -> torch.futures.Future[Any]:
        """A future of the result tensors, or of the error.

        An error is raised in a callback behind the future that is completed, not set on it: torch stores an
        exception set from Python as a value, which C++ callers (DDP) then take for tensors.
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
        self.running = threading.Lock()
        self.queue: deque[Operation | None] = deque()
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._watching = False
        self._in_callbacks = 0
        self._counting = threading.Lock()

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        """Run ``body(*arguments)`` here and now, after everything queued before it."""
        while True:
            with self.running:
                if not self.queue:
                    body(*arguments)
                    return
                operation = self._run_next()
            operation.complete()

    def submit(self, body: Callable[[], None], result: list[torch.Tensor], urgent: bool) -> Operation:
        """Queue ``body``; returns at once.

        Args:
            body: what to run.
            result: what the operation's future holds.
            urgent: start it now; else it may take ``NAP_S`` until it begins, unless somebody waits for it.
        """
        if self.queue and self.queue[0] is None:
            raise self._closed()
        operation = Operation(body, result)
        self.queue.append(operation)
        if len(self._threads) <= self._in_callbacks:
            self._start_thread()
        if urgent or self._in_callbacks:
            self._calls.put(_NOW)
        elif not self._watching:
            self._watching = True
            self._calls.put(_SOON)
        return operation

    def hurry(self) -> None:
        """Start what is queued now: somebody waits for it where only the thread can help."""
        for _ in range(len(self.queue)):
            self._calls.put(_NOW)

    def help(self, operation: Operation) -> None:
        """Run what is queued up to ``operation`` on this thread, as long as no other thread is at it."""
        while not operation.done and self.running.acquire(blocking=False):
            try:
                if not self.queue:
                    return
                done = self._run_next()
            finally:
                self.running.release()
            done.complete()

    def close(self) -> None:
        """Run what is queued, then end the threads. Later calls raise ``ClosedError``."""
        with contextlib.suppress(ClosedError):
            self.run(self.queue.append, None)
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(_END)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run_next(self) -> Operation:
        operation = self.queue.popleft()
        if operation is None:
            self.queue.append(None)
            raise self._closed()
        operation.run()
        return operation

    def _closed(self) -> ClosedError:
        return ClosedError(f"process group {self._name!r} was used after it had been destroyed")

    def _start_thread(self) -> None:
        # A daemon: an interpreter that exits with an operation still waiting for a lost rank must not wait too.
        thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (call := self._calls.get()) != _END:
            if call == _NOW:
                self._serve_one()
            else:
                self._watch()

    def _watch(self) -> None:
        """Run what is queued, a nap later, until a nap has brought nothing."""
        while True:
            time.sleep(NAP_S)
            if self._serve_one():
                while self._serve_one():
                    pass
                continue
            # In this order: whoever queues an operation looks at the flag afterwards, so one of the two sees the other.
            self._watching = False
            if not self._waits():
                return
            self._watching = True

    def _waits(self) -> bool:
        return bool(self.queue) and self.queue[0] is not None

    def _serve_one(self) -> bool:
        """Run one operation and its callbacks; False if there was none."""
        with self.running:
            if not self._waits():
                return False  # somebody who waited for it has run it
            operation = self._run_next()
        # A callback may wait for a further operation of this group (PowerSGD's do). Whoever submits that one
        # sees from this count that another thread is needed to run it.
        with self._counting:
            self._in_callbacks += 1
        if self._waits() and len(self._threads) <= self._in_callbacks:
            self._start_thread()
            self.hurry()
        try:
            operation.complete()
        finally:
            with self._counting:
                self._in_callbacks -= 1
        return True
