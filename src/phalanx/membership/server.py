"""One loop that serves one table to all connections; doors bring these in and know their protocols.

No connection delays another: a request that has to wait is a ``Wait`` in the table, and bytes that the network does not
take stay with their connection.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

from phalanx.membership.table import Table
from phalanx.wire.framing import Malformed

__all__ = ["Connection", "Conversation", "Server"]

_BLOCK = 1 << 18
# A client reads each answer before it asks again, so more than this was not asked for by anyone of ours.
_MOST_UNREAD = 1 << 28


class Conversation(Protocol):
    """A protocol's side of one connection."""

    def hear(self, data: bytes) -> None:
        """Carry out the requests that have come; raise Malformed if the bytes are none."""

    def end(self) -> None:
        """Forget what this connection waits for: it has gone."""


class Connection:
    """One connection: what it says goes to its conversation, which answers by :meth:`send`.

    Args:
        server: the loop that serves it.
        sock: its socket, non-blocking from here on.
        peer: the address it comes from, for people.
    """

    def __init__(self, server: Server, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer
        self.conversation: Conversation | None = None
        self._server = server
        self._out = bytearray()
        sock.setblocking(False)
        server.connections.add(self)
        server.selector.register(sock, selectors.EVENT_READ, self)

    def attend(self, events: int) -> None:
        """Do what the selector has found possible."""
        if events & selectors.EVENT_WRITE:
            self._push()
        if events & selectors.EVENT_READ and self.sock.fileno() >= 0:
            try:
                data = self.sock.recv(_BLOCK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self.hear(data)
            else:
                self.close()

    def hear(self, data: bytes) -> None:
        """Hand received bytes to the conversation, and close the connection if they are nonsense."""
        try:
            if self.conversation is not None:
                self.conversation.hear(data)
        except Malformed as error:
            self._server.complain(self.peer, error)
            self.close()

    def send(self, data: bytes) -> None:
        """Send bytes, at once as far as the network takes them."""
        if self._out:
            self._out += data
            if len(self._out) > _MOST_UNREAD:
                self.close()
        elif self.sock.fileno() >= 0:
            sent = 0
            with contextlib.suppress(OSError):  # a peer that has gone is noticed when receiving
                sent = self.sock.send(data)
            if sent < len(data):
                self._out += data[sent:]
                self._server.selector.modify(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def close(self) -> None:
        """Close the connection, and forget what it waits for."""
        if self.sock.fileno() >= 0:
            self._out.clear()
            self._server.selector.unregister(self.sock)
            self._server.connections.discard(self)
            self.sock.close()
            if self.conversation is not None:
                self.conversation.end()

    def _push(self) -> None:
        try:
            del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()
        if not self._out:
            self._server.selector.modify(self.sock, selectors.EVENT_READ, self)


class Server:
    """A table, and the selector loop that serves it.

    Args:
        complain: told of a connection that is closed because of what it sent.

    Attributes:
        selector: the data of a registration is a connection, or a function to call when its file is ready.
        tasks: functions that are called at each turn, with the time by ``time.monotonic``; each returns when it has to
            be called again.
    """

    def __init__(self, complain: Callable[[str, Malformed], None]) -> None:
        self.complain = complain
        self.table = Table()
        self.connections: set[Connection] = set()
        self.selector = selectors.DefaultSelector()
        self.tasks: list[Callable[[float], float]] = []

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait until something can be done, at most that many seconds, and do it."""
        self.attend(self.wait(timeout_s))

    def wait(self, timeout_s: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until something can be done, and return what."""
        now = time.monotonic()
        due_s = min((task(now) for task in self.tasks), default=math.inf) - now
        if due_s < math.inf:
            timeout_s = max(0.0, due_s if timeout_s is None else min(due_s, timeout_s))
        return self.selector.select(timeout_s)

    def attend(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Do what can be done."""
        for key, events in ready:
            if isinstance(key.data, Connection):
                key.data.attend(events)
            else:
                key.data()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self.connections):
            connection.close()
        self.selector.close()
