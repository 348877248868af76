"""The threads that bring the messages of one group which no thread of the program waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.errors import BackendError
from phalanx.system.threads import start
from phalanx.transports.hierarchical.message_way import Way

__all__ = ["MessageThreads"]


class MessageThreads:
    """All methods are called with the group's lock. A thread ends by itself when it has nothing more to do.

    Args:
        lock: the group's.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._reading: dict[Way, threading.Thread] = {}
        self._finishing: set[threading.Thread] = set()

    def read(self, way: Way, task: Callable[[Way], None]) -> None:
        """Have a thread read a way, unless one does.

        Raises:
            BackendError: the system gives this process no more threads.
        """
        if way not in self._reading:
            thread = threading.Thread(target=task, args=(way,), name="phalanx-hosts-messages", daemon=True)
            self._reading[way] = thread
            try:
                start(thread)
            except BackendError:
                del self._reading[way]
                raise

    def has_read(self, way: Way) -> None:
        """The thread that reads a way ends."""
        del self._reading[way]

    def finish(self, message: Any, task: Callable[[Any], None]) -> None:
        """Have a thread wait for the body of a large message; ``task`` is called with the lock, and may let it go.

        Raises:
            BackendError: the system gives this process no more threads.
        """
        thread = threading.Thread(target=self._finish, args=(message, task), name="phalanx-hosts-large", daemon=True)
        self._finishing.add(thread)
        try:
            start(thread)
        except BackendError:
            self._finishing.discard(thread)
            raise

    def _finish(self, message: Any, task: Callable[[Any], None]) -> None:
        with self._lock:
            task(message)
            self._finishing.discard(threading.current_thread())

    def all(self) -> list[threading.Thread]:
        """Those that have not ended."""
        return [*self._reading.values(), *self._finishing]
