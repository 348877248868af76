"""Futures: the results of calls that are under way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from phalanx.words import tell

__all__ = ["Cancelled", "Future"]

T = TypeVar("T")


class Cancelled(Exception):
    """The call was given up with ``cancel()``.

    Only the process that cancelled it gets this. The function on the other worker may still run.

    What to do:
        Catch it where the future is waited for, if the program cancels calls.
    """


class Future(Generic[T]):
    """The result of a call that was started. It can be waited for on any thread, and awaited on any event loop.

    Callbacks of a call run on a thread that may block, so they may make calls themselves; or at once if it is complete.
    What a callback raises is printed, and nobody else learns of it.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_lock", "_short_callbacks", "_value")

    def __init__(self) -> None:
        """A future that is not complete."""
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], None]] | None = None  # like the next one, made when needed
        self._short_callbacks: list[Callable[[Future[T]], None]] | None = None
        self._lock = threading.Lock()

    # For those that say more of how they are completed: a call (``peer.py``), and what follows one.

    def _help(self, timeout_s: float) -> None:
        """Receive messages on this thread, which waits, for so many seconds at most."""

    def _run(self, task: Callable[..., None], *arguments: Any) -> None:
        """Call ``task(*arguments)`` on a thread that may block."""
        task(*arguments)

    def _tell_of_cancel(self) -> None:
        """Say that nobody waits for this any more."""

    def done(self) -> bool:
        """Return whether there is a value or an error."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the value of the call, and return it.

        Args:
            timeout_s: how long this thread waits. The call itself has its own timeout and goes on. None: as long as it
                takes; the call's own timeout ends it.

        Raises:
            TimeoutError: nothing came in that time.
            Cancelled: the call was given up.
            Exception: whatever the call raised.
        """
        if not self._done:
            until = None if timeout_s is None else time.monotonic() + timeout_s
            self._help(threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
            if not self._done and not self._sleep(until):
                raise TimeoutError(f"the call has not returned within {timeout_s:g} s; it goes on")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _sleep(self, until: float | None) -> bool:
        sleeper = threading.Lock()
        sleeper.acquire()

        def wake(_: Future[T]) -> None:
            sleeper.release()

        self.add_done_callback(wake, short=True)
        timeout = -1.0 if until is None else max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        try:
            return sleeper.acquire(timeout=timeout) or self._done
        finally:
            with self._lock:
                if self._short_callbacks is not None and wake in self._short_callbacks:  # the time was over
                    self._short_callbacks.remove(wake)

    def then(self, function: Callable[[T], Any]) -> Future[Any]:
        """Return a future of what ``function`` makes of the value. An error is handed on, without a call."""
        return _Following(self, function)

    def add_done_callback(self, callback: Callable[[Future[T]], None], *, short: bool = False) -> None:
        """Have ``callback`` called with this future when it is complete.

        Args:
            callback: the function.
            short: it never waits, so it may run on the thread that receives messages.
        """
        with self._lock:
            if not self._done:
                if short:
                    self._short_callbacks = [*(self._short_callbacks or ()), callback]
                elif self._callbacks is None:
                    self._callbacks = [callback]
                else:
                    self._callbacks.append(callback)
                return
        callback(self)

    def cancel(self) -> bool:
        """Give up the call: it does not begin once its worker knows, or is told. Return whether that was in time."""
        given_up = self._complete(None, Cancelled("the call was given up with cancel()"))
        if given_up:
            self._tell_of_cancel()
        return given_up

    def set_result(self, value: T) -> bool:
        """Complete it. Return whether it was not complete before; else nothing changes."""
        return self._complete(value, None)

    def set_exception(self, error: BaseException) -> bool:
        """Complete it with an error. Return whether it was not complete before; else nothing changes."""
        return self._complete(None, error)

    def _complete(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value, self._error, self._done = value, error, True
            short, callbacks = self._short_callbacks, self._callbacks
            self._short_callbacks = self._callbacks = None
        if short:
            self._call_back(short)
        if callbacks:
            self._run(self._call_back, callbacks)
        return True

    def _call_back(self, callbacks: list[Callable[[Future[T]], None]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except (Exception, SystemExit) as error:  # the other callbacks and the thread, which has more to do, go on
                tell(f"warning: a callback of a call failed: {error!r}")

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def settle() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake(_: Future[T]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(settle)

            self.add_done_callback(wake, short=True)
            yield from waiter
        return self.wait(0)


class _Following(Future[Any]):
    """Future of what a function makes of another future's value."""

    __slots__ = ("_before",)

    def __init__(self, before: Future[Any], function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._before = before
        before.add_done_callback(partial(self._follow, function))

    def _help(self, timeout_s: float) -> None:
        self._before._help(timeout_s)

    def _run(self, task: Callable[..., None], *arguments: Any) -> None:
        self._before._run(task, *arguments)

    def _tell_of_cancel(self) -> None:
        self._before.cancel()

    def _follow(self, function: Callable[[Any], Any], before: Future[Any]) -> None:
        try:
            if before._error is not None:
                self.set_exception(before._error)
            else:
                self.set_result(function(before._value))
        except BaseException as error:
            self.set_exception(error)
        self._before = _NONE  # whoever keeps this does not keep that value too


_NONE: Future[Any] = Future()
