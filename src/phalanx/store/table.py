"""The store's content: keys, values, and the requests that wait for a key. No socket, no thread, no clock of its own.

A request is answered by calling back, at once or when the keys it waits for are there. The semantics are those of
torch's ``TCPStore``: ``get`` waits, a counter is kept as decimal digits, and ``compare_set`` enters a new key if the
expected value is empty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count

from phalanx.store import requests

__all__ = ["Answer", "Parked", "Table"]

# Takes the code of the answer, its number, its fields.
Answer = Callable[[int, int, Sequence[bytes]], None]

_PAIRS = (requests.SET, requests.APPEND)


class Parked:
    """A request that waits.

    Attributes:
        missing: the keys that are not there yet.
        over: whether it has been answered, or its connection has gone, so that no answer is needed.
    """

    def __init__(self, code: int, keys: Sequence[bytes], missing: set[bytes], answer: Answer) -> None:
        self.code = code
        self.keys = keys
        self.missing = missing
        self.answer = answer
        self.over = False

    def finish(self, code: int, number: int = 0, fields: Sequence[bytes] = ()) -> None:
        """Answer the request, unless it is over."""
        if not self.over:
            self.over = True
            self.answer(code, number, fields)


class Table:
    """The keys of one job.

    Attributes:
        lost: the fields of the answer LOST, about the rank that has gone before it had set its keys; empty if none has.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, bytes] = {}
        self._parked: dict[bytes, list[Parked]] = {}
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._most_deadlines = 64
        self._order = count()
        self.lost: Sequence[bytes] = ()

    def handle(self, code: int, number: int, fields: Sequence[bytes], answer: Answer, now: float) -> Parked | None:
        """Carry out one request.

        Args:
            code, number, fields: the request, as it came.
            answer: called once; a request that makes no sense is answered too.
            now: the time of a clock that only goes forward, in seconds.

        Returns:
            The request, if it waits; None if it has been answered.
        """
        if code in (requests.READ, requests.WAIT):
            deadline = now + number / 1000 if number > 0 else math.inf
            parked = Parked(code, fields, set(), answer)
            self._settle(parked)
            if self.lost and not parked.over:
                self._leave(parked)
                parked.finish(requests.LOST, 0, self.lost)
            if parked.over:
                return None
            if deadline < math.inf:
                self._remember(deadline, parked)
            return parked
        try:
            answer(requests.DONE, *self._carry_out(code, number, fields))
        except (ValueError, IndexError) as error:
            answer(requests.FAILED, 0, [str(error).encode()])
        return None

    def _remember(self, deadline: float, parked: Parked) -> None:
        # Answered requests stay in the heap until their deadline. Rebuild it when it has doubled, so that they never
        # outnumber the waiting ones.
        if len(self._deadlines) >= self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].over]
            heapq.heapify(self._deadlines)
            self._most_deadlines = max(64, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, next(self._order), parked))

    def forget(self, parked: Parked) -> None:
        """Drop a waiting request without an answer: its connection has gone."""
        parked.over = True
        self._leave(parked)

    def _leave(self, parked: Parked) -> None:
        for key in parked.missing:
            waiting = self._parked.get(key, [])
            if parked in waiting:
                waiting.remove(parked)
                if not waiting:
                    del self._parked[key]

    def expire(self, now: float) -> float:
        """Answer the requests whose deadline has passed; return when to call this again, infinity if none waits."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].over):
            _, _, parked = heapq.heappop(self._deadlines)
            if not parked.over:
                self._leave(parked)
                parked.finish(requests.LATE, 0, sorted(parked.missing))
        return self._deadlines[0][0] if self._deadlines else math.inf

    def end(self, why: str) -> None:
        """Answer every waiting request with the reason why its keys will not come."""
        for waiting in list(self._parked.values()):
            for parked in waiting:
                parked.finish(requests.FAILED, 0, [why.encode()])
        self._parked.clear()

    def lose(self, why: Sequence[bytes]) -> None:
        """Answer every request that waits, now or later, with the rank that went before it had set its keys."""
        self.lost = self.lost or why  # the first to go makes the others give up
        for waiting in list(self._parked.values()):
            for parked in waiting:
                parked.finish(requests.LOST, 0, self.lost)
        self._parked.clear()

    # -- requests --------------------------------------------------------------------------------------

    def _carry_out(self, code: int, number: int, fields: Sequence[bytes]) -> tuple[int, Sequence[bytes]]:
        entries = self._entries
        if code in _PAIRS:
            if len(fields) % 2:
                raise ValueError("a key without a value")
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                entries[key] = value if code == requests.SET else entries.get(key, b"") + value
                self._arrived(key)
            return 0, ()
        if code == requests.ADD:
            key = fields[0]
            total = int(entries.get(key, b"0")) + number
            if not -(1 << 63) <= total < 1 << 63:
                raise ValueError("the counter would not fit into 64 bits")
            entries[key] = b"%d" % total
            self._arrived(key)
            return total, ()
        if code == requests.COMPARE_SET:
            key, expected, desired = fields
            if entries.get(key, b"") == expected and (key in entries or not expected):
                entries[key] = desired
                self._arrived(key)
            return 0, (entries.get(key, expected),)
        if code == requests.DELETE:
            return int(entries.pop(fields[0], None) is not None), ()
        if code == requests.CHECK:
            return int(all(key in entries for key in fields)), ()
        if code == requests.COUNT:
            return len(entries), ()
        if code == requests.LIST:
            return 0, list(entries)
        raise ValueError(f"there is no request with the code {code}")

    def _arrived(self, key: bytes) -> None:
        for parked in self._parked.pop(key, ()):
            parked.missing.discard(key)
            if not parked.missing and not parked.over:
                self._settle(parked)

    def _settle(self, parked: Parked) -> None:
        """Answer the request, or let it wait for the missing keys; a key that came may have been deleted since."""
        parked.missing = {key for key in parked.keys if key not in self._entries}
        for key in parked.missing:
            self._parked.setdefault(key, []).append(parked)
        if not parked.missing:
            parked.finish(
                requests.DONE, 0, [self._entries[key] for key in parked.keys] if parked.code == requests.READ else ()
            )
