"""The requests of torch's own ``TCPStore`` client, answered from a table of keys; no socket, no thread.

Every script that uses ``env://``, and every library that connects to MASTER_ADDR and MASTER_PORT by itself, speaks this
protocol. It is torch's (``TCPStoreBackend.hpp``): a byte for the request, then numbers in the machine's byte order, and
strings that follow their length. As checked on torch 2.13, whose requests are all here.

Prior art: torch's two servers. Theirs cannot ask who connects; ``torch_server.py`` does.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable

from phalanx.wire.framing import LONGEST, Malformed

__all__ = ["Conversation", "TorchTable"]

MOST_KEYS = 1 << 17  # in one request
_MAGIC = 0x3C85F7CE
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_U32, _U64, _I64 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=q")


class _Incomplete(Exception):
    """The rest of a request has not come yet."""


class _Reader:
    """Reads one request from the bytes that have come so far."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.at = 0

    def number(self, kind: struct.Struct) -> int:
        end = self.at + kind.size
        if end > len(self.data):
            raise _Incomplete
        (number,) = kind.unpack_from(self.data, self.at)
        self.at = end
        return int(number)

    def text(self) -> bytes:
        nbytes = self.number(_U64)
        if nbytes > LONGEST:
            raise Malformed(f"a string of {nbytes} bytes")
        end = self.at + nbytes
        if end > len(self.data):
            raise _Incomplete
        text = bytes(self.data[self.at : end])
        self.at = end
        return text

    def count(self) -> int:
        count = self.number(_U64)
        if count > MOST_KEYS:
            raise Malformed(f"a request with {count} keys")
        return count


class TorchTable:
    """The keys of one job, its queues, and who waits for which key.

    Attributes:
        entries, queues, waiting: these.
        is_vain: whether nobody should wait for a key any more.
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, list[Conversation]] = {}
        self.is_vain: Callable[[bytes], bool] = lambda key: False

    def has(self, key: bytes) -> bool:
        """Whether a wait for the key is over."""
        return key in self.entries or bool(self.queues.get(key))

    def overdue(self, patience_s: float) -> list[bytes]:
        """The keys for which somebody has waited that long, in seconds, in order."""
        before = time.monotonic() - patience_s
        return sorted(key for key, waiting in self.waiting.items() if any(each.since <= before for each in waiting))

    def end_vain_waits(self) -> None:
        """End the waits for keys for which nobody should wait any more, which fail."""
        for key in [key for key in self.waiting if self.is_vain(key)]:
            for conversation in list(self.waiting.get(key, ())):
                conversation.fail()

    def put(self, key: bytes, value: bytes) -> None:
        """Enter a value, and answer those who wait for nothing else."""
        self.entries[key] = value
        for conversation in self.waiting.pop(key, ()):
            conversation.arrived(key)

    def add(self, key: bytes, number: int) -> int:
        """Add to a counter, which is kept as decimal digits."""
        try:
            total = int(self.entries.get(key, b"0")) + number
        except ValueError:
            raise Malformed("the value of the key is not a number") from None
        if not -(1 << 63) <= total < 1 << 63:
            raise Malformed("the counter would not fit into 64 bits")
        self.put(key, b"%d" % total)
        return total


class Conversation:
    """The requests and answers of one connection.

    Args:
        table: the keys.
        send: takes the bytes of each answer.

    Attributes:
        since: when its latest wait began, in the seconds of ``time.monotonic()``.
    """

    def __init__(self, table: TorchTable, send: Callable[[bytes], None]) -> None:
        self._table = table
        self._send = send
        self._data = bytearray()
        self._greeted = False
        self._missing: set[bytes] = set()
        self._has_failed = False
        self.since = 0.0

    def hear(self, data: bytes) -> None:
        """Carry out the requests that are whole.

        Raises:
            Malformed: the bytes are not a request of torch's; nothing that comes after them can be read.
        """
        self._data += data
        while self._data:
            reader = _Reader(self._data)
            code = reader.data[0]
            reader.at = 1
            try:
                if not self._greeted:
                    if code != 0 or reader.number(_U32) != _MAGIC:
                        raise Malformed("it does not begin as torch's store client does")
                    self._greeted = True
                elif 0 < code < len(_REQUESTS):
                    request = _REQUESTS[code]
                    self._has_failed &= request is Conversation._cancel_wait
                    request(self, reader)
                else:
                    raise Malformed(f"request {code} is not known here; it needs a newer version of Phalanx")
            except _Incomplete:
                return
            del self._data[: reader.at]

    def end(self) -> None:
        """Forget what this connection waits for: it has gone."""
        for key in self._missing:
            waiting = self._table.waiting.get(key)
            if waiting is not None:
                waiting.remove(self)
                if not waiting:
                    del self._table.waiting[key]
        self._missing.clear()

    def arrived(self, key: bytes) -> None:
        """A key is there for which this connection waited."""
        self._missing.discard(key)
        if not self._missing:
            self._send(_STOP_WAITING)

    def fail(self) -> None:
        """End this connection's wait with an error: what it waits for will not come.

        The answer is one that torch's client takes for an error, unless it gives up at this very moment; see
        :meth:`_cancel_wait`.
        """
        self.end()
        self._has_failed = True
        self._send(_WAIT_CANCELED)

    def _await(self, keys: set[bytes]) -> None:
        self.end()
        if any(map(self._table.is_vain, keys)):
            self.fail()
            return
        self._missing = keys
        self.since = time.monotonic()
        for key in keys:
            self._table.waiting.setdefault(key, []).append(self)

    # -- requests: each reads all of its arguments before it changes anything ------------------------

    def _set(self, reader: _Reader) -> None:
        self._table.put(reader.text(), reader.text())

    def _compare_set(self, reader: _Reader) -> None:
        key, expected, desired = reader.text(), reader.text(), reader.text()
        entries = self._table.entries
        if (key in entries and entries[key] == expected) or (key not in entries and not expected):
            self._table.put(key, desired)
        self._send(_string(entries.get(key, expected)))

    def _get(self, reader: _Reader) -> None:
        self._send(_string(self._table.entries.get(reader.text(), b"")))

    def _add(self, reader: _Reader) -> None:
        key, number = reader.text(), reader.number(_I64)
        self._send(_I64.pack(self._table.add(key, number)))

    def _check(self, reader: _Reader) -> None:
        keys = [reader.text() for _ in range(reader.count())]
        self._send(_READY if all(map(self._table.has, keys)) else _NOT_READY)

    def _wait(self, reader: _Reader) -> None:
        missing = {key for key in [reader.text() for _ in range(reader.count())] if not self._table.has(key)}
        if missing:
            self._await(missing)
        else:
            self._send(_STOP_WAITING)

    def _count(self, reader: _Reader) -> None:
        self._send(_I64.pack(len(self._table.entries)))

    def _delete(self, reader: _Reader) -> None:
        self._send(_I64.pack(int(self._table.entries.pop(reader.text(), None) is not None)))

    def _append(self, reader: _Reader) -> None:
        key, more = reader.text(), reader.text()
        self._table.put(key, self._table.entries.get(key, b"") + more)

    def _multi_get(self, reader: _Reader) -> None:
        keys = [reader.text() for _ in range(reader.count())]
        self._send(b"".join(_string(self._table.entries.get(key, b"")) for key in keys))

    def _multi_set(self, reader: _Reader) -> None:
        for key, value in [(reader.text(), reader.text()) for _ in range(reader.count())]:
            self._table.put(key, value)

    def _cancel_wait(self, reader: _Reader) -> None:
        self.end()
        # A client that gave up before it had the answer of a wait that failed takes that one for this one's.
        if not self._has_failed:
            self._send(_WAIT_CANCELED)
        self._has_failed = False

    def _ping(self, reader: _Reader) -> None:
        self._send(_U32.pack(reader.number(_U32)))

    def _queue_push(self, reader: _Reader) -> None:
        key, value = reader.text(), reader.text()
        self._table.queues.setdefault(key, deque()).append(value)
        waiting = self._table.waiting.get(key)
        if waiting:
            first = waiting.pop(0)
            if not waiting:
                del self._table.waiting[key]
            first.arrived(key)

    def _queue_pop(self, reader: _Reader) -> None:
        key = reader.text()
        queue = self._table.queues.get(key, ())
        answer = _I64.pack(len(queue))
        if isinstance(queue, deque):
            answer += _string(queue.popleft())
            if not queue:
                del self._table.queues[key]
        self._send(answer)

    def _queue_length(self, reader: _Reader) -> None:
        self._send(_I64.pack(len(self._table.queues.get(reader.text(), ()))))

    def _list(self, reader: _Reader) -> None:
        entries = self._table.entries
        self._send(b"".join((_I64.pack(len(entries)), *map(_string, entries))))

    def _barrier(self, reader: _Reader) -> None:
        key, size = reader.text(), reader.number(_I64)
        entries = self._table.entries
        if self._table.has(key) and not entries.get(key, b"").isdigit():
            raise Malformed("the key of a barrier is in use for something else")
        count = int(entries.get(key, b"0")) + 1
        if count < size:
            # Those who wait already must not take this for the end, so nobody is told of the new value.
            entries[key] = b"%d" % count
            self._await({key})
        else:
            self._table.put(key, b"%d" % count)
            self._send(_STOP_WAITING)


def _string(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


# By torch's number of the request; 0 is the greeting.
_REQUESTS: list[Callable[[Conversation, _Reader], None]] = [
    lambda conversation, reader: None,
    Conversation._set,
    Conversation._compare_set,
    Conversation._get,
    Conversation._add,
    Conversation._check,
    Conversation._wait,
    Conversation._count,
    Conversation._delete,
    Conversation._append,
    Conversation._multi_get,
    Conversation._multi_set,
    Conversation._cancel_wait,
    Conversation._ping,
    Conversation._queue_push,
    Conversation._queue_pop,
    Conversation._queue_length,
    Conversation._list,
    Conversation._barrier,
]
