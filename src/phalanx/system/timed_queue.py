"""A queue between threads whose ``get`` ends when its time is over, and which a signal handler may use."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

__all__ = ["TimedQueue"]

Item = TypeVar("Item")


class TimedQueue(Generic[Item]):
    """First in, first out, without a limit.

    ``queue.SimpleQueue`` is quicker, but up to Python 3.12 its ``get(timeout=...)`` may block for ever: it computes
    what is left of the time after it has taken its lock, and a thread that was off the processor for longer than the
    timeout in between waits for a negative time, which means no limit. ``queue.Queue`` has limits that hold, and a lock
    that a signal handler finds taken by the thread that it interrupted.

    ``_items`` is added to and popped by any thread; deque's append and popleft are atomic. ``_gate`` is a lock that is
    used as a signal: whoever waits acquires it, whoever has added an item releases it, so that while there is an item
    either the gate is free, or a thread has acquired it and is on its way to the item. That thread frees the gate again
    if it leaves items behind.
    """

    __slots__ = ("_gate", "_items")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._gate = threading.Lock()

    def put(self, item: Item) -> None:
        """Add ``item``; a thread that waits gets it. Never blocks."""
        self._items.append(item)
        self._open()

    def get(self, timeout_s: float | None = None) -> Item:
        """Take the oldest item, and wait for one if there is none.

        Args:
            timeout_s: for how long to wait; None means without a limit.

        Raises:
            queue.Empty: there was none in that time.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                pass
            else:
                if self._items:
                    self._open()
                return item
            left_s = -1.0 if until is None else max(0.0, until - time.monotonic())
            if not self._gate.acquire(timeout=left_s):
                raise queue.Empty

    def qsize(self) -> int:
        """How many items wait to be taken."""
        return len(self._items)

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free, and whoever acquires it finds this item too
            self._gate.release()
