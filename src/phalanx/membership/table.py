"""The store's content: keys, queues, and who waits for which key. No socket and no thread.

The semantics are those of torch's ``TCPStore``: a counter is kept as decimal digits, and ``compare_set`` enters a new
key if the expected value is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

__all__ = ["Table", "Wait"]


class Wait:
    """A wait until keys are there.

    Attributes:
        keys: all of them.
        missing: those that are not there yet.
        finish: called once, when all are there.
    """

    __slots__ = ("_waits", "finish", "keys", "missing")

    def __init__(self, keys: Collection[bytes], finish: Callable[[], object], waits: dict[bytes, list[Wait]]) -> None:
        self.keys, self.finish, self._waits = keys, finish, waits
        self.missing: set[bytes] = set()

    def park(self, missing: Iterable[bytes]) -> None:
        """Wait for these keys, or finish if there are none."""
        self.missing = set(missing)
        for key in self.missing:
            self._waits.setdefault(key, []).append(self)
        if not self.missing:
            self.finish()

    def forget(self) -> None:
        """Wait no longer: nobody is there to be told."""
        self.finish = lambda: None
        for key in self.missing:
            waits = self._waits.get(key, [])
            if self in waits:
                waits.remove(self)
                if not waits:
                    del self._waits[key]
        self.keys, self.missing = (), set()


class Table:
    """The keys of one job; a bad request raises ValueError."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self._waits: dict[bytes, list[Wait]] = {}

    def has(self, key: bytes) -> bool:
        """Return whether a wait for the key is over."""
        return key in self.entries or bool(self.queues.get(key))

    def set(self, key: bytes, value: bytes) -> None:
        """Enter a value, and finish the waits that need nothing else."""
        self.entries[key] = value
        self._arrived(key, self._waits.pop(key, ()))

    def append(self, key: bytes, value: bytes) -> None:
        """Add to the end of a value."""
        self.set(key, self.entries.get(key, b"") + value)

    def add(self, key: bytes, number: int) -> int:
        """Add to a counter, and return the sum."""
        total = int(self.entries.get(key, b"0")) + number
        if not -(1 << 63) <= total < 1 << 63:
            raise ValueError("the counter would not fit into 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set a key that has the expected value; return its value afterwards, ``expected`` if it has none."""
        if self.entries.get(key, b"") == expected and (key in self.entries or not expected):
            self.set(key, desired)
        return self.entries.get(key, expected)

    def delete(self, key: bytes) -> bool:
        """Delete a key, and return whether it was there."""
        return self.entries.pop(key, None) is not None

    def push(self, key: bytes, value: bytes) -> None:
        """Add to a queue, and finish the wait of the first that waits for it."""
        self.queues.setdefault(key, deque()).append(value)
        waits = self._waits.get(key)
        if waits:
            first = waits.pop(0)
            if not waits:
                del self._waits[key]
            self._arrived(key, [first])

    def pop(self, key: bytes) -> bytes:
        """Take the oldest value of a queue that has one."""
        queue = self.queues[key]
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def wait(self, keys: Collection[bytes], finish: Callable[[], object], *, anew: bool = False) -> Wait:
        """Call ``finish`` as soon as all keys are there, which may be now; with ``anew`` they have to be set again."""
        wait = Wait(keys, finish, self._waits)
        wait.park(keys if anew else [key for key in keys if not self.has(key)])
        return wait

    def _arrived(self, key: bytes, waits: Iterable[Wait]) -> None:
        for wait in waits:
            wait.missing.discard(key)
            if not wait.missing:
                # One that came before may have been deleted since.
                wait.park([other for other in wait.keys if not self.has(other)])
