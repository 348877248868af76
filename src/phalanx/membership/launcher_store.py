"""The store that ``phalanx run`` keeps at MASTER_PORT: torch's ``TCPStore`` protocol, for this user's processes alone.

Every script that uses ``env://``, and every library that connects to MASTER_ADDR and MASTER_PORT by itself, speaks that
protocol (``TCPStoreBackend.hpp``): a byte for the request, then numbers in the machine's byte order, and strings that
follow their length. As checked on torch 2.13, whose requests are all here.

torch's client cannot prove a key, so this store asks the kernel of each connection whose socket is at its other end
(``system/interfaces.py``), and closes those of other users unread. A connection from another host is another kernel's
to judge: the launcher asks its agent there (:class:`SupervisorLine`), and the connection waits unread meanwhile. The
store's process imports this file, so it imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import socket
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

from phalanx.membership.loop import Connection, Loop
from phalanx.membership.table import Table, Wait
from phalanx.system.interfaces import Address, owner_of
from phalanx.wire.door import Acceptor
from phalanx.wire.framing import LONGEST, Malformed
from phalanx.words import tell

__all__ = [
    "ENDED",
    "EndedRank",
    "SupervisorLine",
    "TorchConversation",
    "TorchStoreServer",
    "is_own",
]

#: Under this key are the ranks that have ended, in that order, as JSON.
ENDED = "phalanx/ended"

# How many refused connections are reported; a port scan makes many of them.
MOST_COMPLAINTS = 4
# How many connections from other hosts may wait for an answer, and for how long.
_MOST_WAITING = 256
_ANSWER_S = 5.0
_MOST_KEYS = 1 << 17  # in one request
_MAGIC = 0x3C85F7CE
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_U32, _U64, _I64 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=q")
_SLASH = b"/"  # what torch's client puts before each key


def is_own(peer: Address, here: Address) -> bool:
    """Return whether the socket at ``peer``, connected to ``here``, belongs to this user or to root, on this host."""
    try:
        return owner_of(peer, here) in (os.geteuid(), 0)
    except OSError:
        return False


class EndedRank(NamedTuple):
    """A rank that is known to have ended.

    ``host`` is empty if the job has one; ``how`` is as ``by signal 9 (SIGKILL)``, and empty if the rank ended in order.
    """

    rank: int
    pid: int
    host: str
    how: str


class SupervisorLine(NamedTuple):
    """The store's line to the supervisor, which tells of ranks that have ended, and of connections from other hosts.

    Each message is JSON. A question is a list of a number and the two ends of a connection. What comes is the number of
    one that is the job's (a stranger's is not answered), or an :class:`EndedRank`.

    Attributes:
        sock: a SOCK_SEQPACKET socket.
        refers: whether the job has other hosts, so that connections from there are asked about.
    """

    sock: socket.socket
    refers: bool


class TorchStoreServer(Loop):
    """The launcher's store.

    Args:
        listener: the bound, listening socket.
        is_welcome: whether a connection may use the store, by its two ends.
        supervisor: the line to it.
        say: takes a line for the user.
    """

    def __init__(
        self,
        listener: socket.socket,
        is_welcome: Callable[[Address, Address], bool] = is_own,
        supervisor: SupervisorLine | None = None,
        say: Callable[[str], None] = tell,
    ) -> None:
        super().__init__("phalanx-store")
        self.table = Table()
        self._is_welcome, self._supervisor = is_welcome, supervisor
        self._say, self._complaints = say, 0
        self._ended: list[EndedRank] = []
        self._referred: dict[int, tuple[socket.socket, str]] = {}  # those that wait for an answer, the oldest first
        self._questions = itertools.count(1)
        self._acceptor = Acceptor(listener, self.selector, self._take)
        self.tend = self._acceptor.tend
        if supervisor is not None:
            supervisor.sock.setblocking(False)
            self.selector.register(supervisor.sock, selectors.EVENT_READ, self._hear_supervisor)

    def serve(self) -> None:
        """Serve until the process is killed."""
        while True:
            self.turn()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for connection in list(self.connections):
            connection.close()
        self._acceptor.close()
        super().close()

    def _take(self, sock: socket.socket, peer: Address, here: Address) -> None:
        if self._is_welcome(peer, here):
            self._admit(sock, peer[0])
        elif self._supervisor is not None and self._supervisor.refers:
            self._refer(self._supervisor, sock, peer, here)
        else:
            self._refuse(sock, peer[0])

    def _refer(self, supervisor: SupervisorLine, sock: socket.socket, peer: Address, here: Address) -> None:
        """Have a connection looked up on the other hosts; without an answer in time it is nobody's."""
        number = next(self._questions)
        self._referred[number] = sock, peer[0]
        with contextlib.suppress(OSError):  # a supervisor that does not keep up with strangers has not been asked
            supervisor.sock.send(json.dumps([number, peer, here]).encode())
        self.later(_ANSWER_S, lambda: self._refuse_referred(number))
        if len(self._referred) > _MOST_WAITING:
            self._refuse_referred(next(iter(self._referred)))

    def _refuse_referred(self, number: int) -> None:
        if (found := self._referred.pop(number, None)) is not None:
            self._refuse(*found)

    def _hear_supervisor(self) -> None:
        assert self._supervisor is not None
        with contextlib.suppress(OSError):
            while data := self._supervisor.sock.recv(4096):
                said = json.loads(data)
                if isinstance(said, list):
                    self._ended.append(EndedRank(*said))
                    self.table.set(_SLASH + ENDED.encode(), json.dumps(self._ended).encode())
                elif (found := self._referred.pop(said, None)) is not None:
                    self._admit(*found)

    def _admit(self, sock: socket.socket, peer: str) -> None:
        with contextlib.suppress(OSError):  # it may have gone already, which is noticed when receiving
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, sock)
        conversation = TorchConversation(self.table, connection.send)

        def ended(why: Exception | None) -> None:
            if isinstance(why, Malformed):
                self._complain(f"closed a connection to the job's store: {why}")
            conversation.end()

        connection.hear, connection.ended = conversation.hear, ended

    def _refuse(self, sock: socket.socket, peer: str) -> None:
        sock.close()
        self._complain(f"refused a connection from {peer} to the job's store: it is not this user's")

    def _complain(self, text: str) -> None:
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            more = "; further ones are not reported" if self._complaints == MOST_COMPLAINTS else ""
            self._say(text + more)


# -- the protocol --------------------------------------------------------------------------------------


class _Incomplete(Exception):
    """The rest of a request has not come yet."""


class _Reader:
    """Reads one request from the bytes that have come so far."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.at = 1  # behind the byte for the request

    def number(self, kind: struct.Struct) -> int:
        end = self.at + kind.size
        if end > len(self._data):
            raise _Incomplete
        (number,) = kind.unpack_from(self._data, self.at)
        self.at = end
        return int(number)

    def text(self) -> bytes:
        nbytes = self.number(_U64)
        if nbytes > LONGEST:
            raise Malformed(f"a string of {nbytes} bytes")
        end = self.at + nbytes
        if end > len(self._data):
            raise _Incomplete
        text = bytes(self._data[self.at : end])
        self.at = end
        return text

    def texts(self, each: int = 1) -> list[bytes]:
        count = self.number(_U64)
        if count > _MOST_KEYS:
            raise Malformed(f"a request with {count} keys")
        return [self.text() for _ in range(count * each)]


class TorchConversation:
    """The requests and answers of one connection. Each request is read whole before it changes anything.

    Args:
        table: the keys.
        send: takes the bytes of each answer.
    """

    def __init__(self, table: Table, send: Callable[[bytes], None]) -> None:
        self._table, self._send = table, send
        self._data = bytearray()
        self._greeted = False
        self._wait: Wait | None = None

    def hear(self, data: bytes) -> None:
        """Carry out the requests that are whole.

        Raises:
            Malformed: the bytes are not a request of torch's; nothing that comes after them can be read.
        """
        self._data += data
        while self._data:
            reader, code = _Reader(self._data), self._data[0]
            try:
                if not self._greeted:
                    if code != 0 or reader.number(_U32) != _MAGIC:
                        raise Malformed("it does not begin as torch's store client does")
                    self._greeted = True
                elif 0 < code <= len(_REQUESTS):
                    _REQUESTS[code - 1](self, reader)
                else:
                    raise Malformed(f"request {code} is not known here; it needs a newer version of Phalanx")
            except _Incomplete:
                return
            except ValueError as error:  # the table's: no number, or too large a one
                raise Malformed(str(error)) from None
            del self._data[: reader.at]

    def end(self) -> None:
        """Forget what this connection waits for: it has gone."""
        if self._wait is not None:
            self._wait.forget()

    def _await(self, keys: Collection[bytes], *, anew: bool = False) -> None:
        self.end()
        self._wait = self._table.wait(keys, lambda: self._send(_STOP_WAITING), anew=anew)

    def _set(self, reader: _Reader) -> None:
        self._table.set(reader.text(), reader.text())

    def _compare_set(self, reader: _Reader) -> None:
        self._send(_string(self._table.compare_set(reader.text(), reader.text(), reader.text())))

    def _get(self, reader: _Reader) -> None:
        self._send(_string(self._table.entries.get(reader.text(), b"")))

    def _add(self, reader: _Reader) -> None:
        key, number = reader.text(), reader.number(_I64)
        self._send(_I64.pack(self._table.add(key, number)))

    def _check(self, reader: _Reader) -> None:
        self._send(_READY if all(map(self._table.has, reader.texts())) else _NOT_READY)

    def _wait_for(self, reader: _Reader) -> None:
        self._await(reader.texts())

    def _count(self, reader: _Reader) -> None:
        self._send(_I64.pack(len(self._table.entries)))

    def _delete(self, reader: _Reader) -> None:
        self._send(_I64.pack(self._table.delete(reader.text())))

    def _append(self, reader: _Reader) -> None:
        self._table.append(reader.text(), reader.text())

    def _multi_get(self, reader: _Reader) -> None:
        self._send(b"".join(_string(self._table.entries.get(key, b"")) for key in reader.texts()))

    def _multi_set(self, reader: _Reader) -> None:
        given = reader.texts(2)
        for key, value in zip(given[::2], given[1::2], strict=True):
            self._table.set(key, value)

    def _cancel_wait(self, reader: _Reader) -> None:
        self.end()
        self._send(_WAIT_CANCELED)

    def _ping(self, reader: _Reader) -> None:
        self._send(_U32.pack(reader.number(_U32)))

    def _queue_push(self, reader: _Reader) -> None:
        self._table.push(reader.text(), reader.text())

    def _queue_pop(self, reader: _Reader) -> None:
        key = reader.text()
        nvalues = len(self._table.queues.get(key, ()))
        self._send(_I64.pack(nvalues) + (_string(self._table.pop(key)) if nvalues else b""))

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
            self._await([key], anew=True)
        else:
            self._table.set(key, b"%d" % count)
            self._send(_STOP_WAITING)


def _string(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


# By torch's number of the request, from 1 on.
_REQUESTS: list[Callable[[TorchConversation, _Reader], None]] = [
    TorchConversation._set,
    TorchConversation._compare_set,
    TorchConversation._get,
    TorchConversation._add,
    TorchConversation._check,
    TorchConversation._wait_for,
    TorchConversation._count,
    TorchConversation._delete,
    TorchConversation._append,
    TorchConversation._multi_get,
    TorchConversation._multi_set,
    TorchConversation._cancel_wait,
    TorchConversation._ping,
    TorchConversation._queue_push,
    TorchConversation._queue_pop,
    TorchConversation._queue_length,
    TorchConversation._list,
    TorchConversation._barrier,
]
