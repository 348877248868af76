"""What a call that is under way will return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

__all__ = ["Future"]

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a call that was started. It can be waited for on any thread, and awaited on any event loop.

    Callbacks run on the thread that completes the future, or at once if it is complete.
    """

    def __init__(self) -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], None]] = []
        self._lock = threading.Lock()
        self._waiters: threading.Condition | None = None
        # Set by the agent: how to receive on the waiting thread, and how to cancel.
        self._help: Callable[[float], None] | None = None
        self._cancel: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether there is a value or an error."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> T:
        """The value of the call.

        Args:
            timeout_s: how long this thread waits. The call itself has its own timeout and goes on. None: as long as it
                takes; the call's own timeout ends it.

        Raises:
            TimeoutError: nothing came in that time.
            Exception: whatever the call raised.
        """
        raise NotImplementedError

    def then(self, function: Callable[[T], Any]) -> Future[Any]:
        """A future of what ``function`` makes of the value. An error is handed on, without a call."""
        raise NotImplementedError

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Have ``callback`` called with this future when it is complete."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """Give up the call: what has not begun will not, and what has begun is told. Whether it was still under way."""
        raise NotImplementedError

    def set_result(self, value: T) -> None:
        """Complete it. Nothing happens if it is complete."""
        raise NotImplementedError

    def set_exception(self, error: BaseException) -> None:
        """Complete it with an error. Nothing happens if it is complete."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, T]:
        raise NotImplementedError
