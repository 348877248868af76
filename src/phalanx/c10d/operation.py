"""One queued call of a process group, and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from phalanx.diagnosis import call_site
from phalanx.errors import PhalanxError
from phalanx.system.threads import AwakeClock, wait_awake

__all__ = ["Operation"]


class Queue(Protocol):
    """The queue of a group.

    Attributes:
        given_up: what its operations raise from now on, if they are given up.
    """

    given_up: BaseException | None


class Operation:
    """One queued call: the body to run, whether it has run, and its outcome.

    ``error`` is written before ``done``: a thread that finds ``done`` True may read ``error`` without the lock.
    ``_done_event``, ``_future`` and ``_completed`` are written under ``_lock``, each at most once. ``waited`` is called
    by every thread that has waited for it; the thread that made the call sets it, before it hands the operation out.
    """

    __slots__ = ("_body", "_completed", "_done_event", "_future", "_lock", "_site", "done", "error", "result", "waited")

    def __init__(self, body: Callable[[], None], result: list[torch.Tensor]) -> None:
        self._body = body
        self._site = call_site.capture(3)  # when it runs, perhaps on another thread, the stack of the call is gone
        self.result = result
        self._completed = False
        self.done = False
        self.error: BaseException | None = None
        self.waited: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._done_event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self, queue: Queue | None = None) -> None:
        """Run the body and wake the threads that wait. Called once, by the holder of the group's lock.

        Args:
            queue: the one that it is taken from, if any. Once that is given up, the body is not run, and an error of
                ours that it raises has come of that.
        """
        body, self._body = self._body, _nothing  # the tensors that the body refers to must not outlive it
        call_site.running.site = self._site
        try:
            if queue is not None and queue.given_up is not None:
                raise queue.given_up
            body()
        except BaseException as error:
            given_up = None if queue is None else queue.given_up
            self.error = given_up if given_up is not None and isinstance(error, PhalanxError) else error
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

    def wait_done(self, timeout_s: float | None, clock: AwakeClock | None = None) -> bool:
        """Block until the operation has run; False when the timeout came first. A ``clock`` of the caller goes on."""
        with self._lock:
            if self.done:
                return True
            if self._done_event is None:
                self._done_event = threading.Event()
        # Without a limit no time is counted, so the wait need not wake up to count it.
        return self._done_event.wait() if timeout_s is None else wait_awake(self._done_event.wait, timeout_s, clock)

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


def _nothing() -> None:
    pass
