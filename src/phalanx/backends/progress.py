"""One group's operations, one at a time, in the order they were called.

A synchronous operation runs on the caller's thread when nothing is queued before it, which is the common case
and costs a lock. An asynchronous one is queued; whoever comes first runs it: the group's progress thread, or a
thread that waits for it or calls a synchronous operation behind it. So ``all_reduce(async_op=True).wait()``
needs no switch to another thread, and a gradient bucket moves while backward computes.

One lock, ``_running``, is held by whoever runs operations; ``_queue`` is appended to by callers and popped
only by its holder. Both are touched by several threads: deque's append and popleft are atomic.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.backends import call_site
from phalanx.errors import ClosedError

__all__ = ["Operation", "Progress"]


class Operation:
    """One queued call: what to run, whether it has run, and what came of it."""

    __slots__ = ("_body", "_done_event", "_future", "_lock", "_site", "done", "error", "result")

    def __init__(self, body: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._body: Callable[[], None] | None = body
        self._site = call_site.capture(3)  # by whoever runs it, the stack of the call is gone
        self.result = result
        self.done = False
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._done_event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self) -> None:
        """Run the body and publish its end. Called once, by the holder of the group's lock."""
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
            event, future = self._done_event, self._future
        if event is not None:
            event.set()
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
                completed = self.done
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
    """The queue of one group and, from its first asynchronous operation on, its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()
        self._queue: deque[Operation] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, body: Callable[..., None], *arguments: Any) -> None:
        """Run ``body(*arguments)`` here and now, after everything queued before it."""
        with self._running:
            if self._closed:
                raise ClosedError(f"process group {self._name!r} was used after it had been destroyed")
            if self._queue:
                self._run_queued(None)
            body(*arguments)

    def submit(self, body: Callable[[], None], result: list[torch.Tensor]) -> Operation:
        """Queue ``body``; returns at once. ``result`` is what the operation's future holds."""
        if self._closed:
            raise ClosedError(f"process group {self._name!r} was used after it had been destroyed")
        operation = Operation(body, result)
        self._queue.append(operation)
        if self._thread is None:
            self._start_thread()
        self._calls.put(True)
        return operation

    def help(self, operation: Operation) -> None:
        """Run what is queued up to ``operation`` on this thread, unless another thread is at it already."""
        if self._running.acquire(blocking=False):
            try:
                self._run_queued(operation)
            finally:
                self._running.release()

    def close(self) -> None:
        """Run what is queued, then end the thread. Later calls raise ``ClosedError``."""
        with self._running:
            self._run_queued(None)
            self._closed = True
        if self._thread is not None:
            self._calls.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _run_queued(self, last: Operation | None) -> None:
        while self._queue and not (last is not None and last.done):
            self._queue.popleft().run()

    def _start_thread(self) -> None:
        with self._running:
            if self._thread is None:
                # A daemon: an interpreter that exits with an operation still waiting for a lost rank must
                # not wait for it too.
                self._thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while self._calls.get():
            with self._running:
                self._run_queued(None)
