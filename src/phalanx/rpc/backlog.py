"""Large answers that a slow receiver has not taken yet: while there are too many, what it asks for next does not begin.

An answer lies in this process's memory until its receiver has taken it. Calls are bounded by their callers, but a small
call may have a large answer, so the callee bounds these: of one receiver, answers with ``MOST_BYTES`` may wait, or a
single larger one. Then its requests are held, in their order, until fewer wait. Those that run already go on, and each
may add one answer. Nothing waits for a held request but its caller: messages are received whatever is held, so answers
are taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Backlog"]

MOST_BYTES = 1 << 30


class Backlog:
    """The answers of one agent that wait to be sent. Safe to use from several threads.

    Attributes:
        full: the receivers for whom too many wait, by incarnation. Only :meth:`hold` is asked further about these, so
            that a request costs one look here.
    """

    def __init__(self) -> None:
        self.full: set[int] = set()
        self._lock = threading.Lock()
        self._waiting: dict[int, list[int]] = {}  # the sizes of the answers
        self._held: dict[int, deque[Callable[[], object]]] = {}

    def add(self, receiver: int, nbytes: int) -> None:
        """An answer waits from now on."""
        with self._lock:
            waiting = self._waiting.setdefault(receiver, [])
            waiting.append(nbytes)
            if len(waiting) > 1 and sum(waiting) > MOST_BYTES:
                self.full.add(receiver)

    def remove(self, receiver: int, nbytes: int) -> None:
        """It waits no more, because it was sent, or cannot be. What was held begins, if there is room now."""
        with self._lock:
            waiting = self._waiting[receiver]
            waiting.remove(nbytes)
            if not waiting:
                del self._waiting[receiver]
            held = self._release(receiver) if len(waiting) < 2 or sum(waiting) <= MOST_BYTES else ()
        for begin in held:
            begin()

    def hold(self, receiver: int, begin: Callable[[], object]) -> bool:
        """Whether a request has to wait; then ``begin`` is called later, by any thread, and may not block."""
        with self._lock:
            if receiver not in self.full:
                return False
            self._held.setdefault(receiver, deque()).append(begin)
            return True

    def forget(self, receiver: int) -> None:
        """A receiver is gone: nothing is held for it any more."""
        with self._lock:
            held = self._release(receiver)
        for begin in held:
            begin()

    def _release(self, receiver: int) -> deque[Callable[[], object]]:
        self.full.discard(receiver)
        return self._held.pop(receiver, deque())
