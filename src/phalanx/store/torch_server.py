"""The launcher's store: torch's ``TCPStore``, for the processes of this user alone.

torch's client cannot prove a key, so this server asks the kernel of each connection whose socket is at its other end
(``system/connection_owner.py``), and closes those of other users unread. No client notices: scripts, libraries and
programs that connect to MASTER_ADDR and MASTER_PORT go on as they are.

One thread serves all connections, and none waits for another. A stranger costs one question to the kernel.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

from phalanx.store.torch_requests import Conversation, TorchTable
from phalanx.system.connection_owner import Address, owner_of
from phalanx.wire.framing import Malformed
from phalanx.words import tell

__all__ = ["TorchStoreServer", "is_own"]

# How many refused connections are reported; a port scan makes many of them.
MOST_COMPLAINTS = 4
# How many connections are accepted in a row before those accepted earlier are served.
_AT_ONCE = 64
# For how long no connection is accepted after the process has run out of file descriptors.
_DEAF_S = 0.2
_BLOCK = 1 << 17
# A client reads each answer before it asks again, so more than this was not asked for by torch.
_MOST_UNREAD = 1 << 28


def is_own(peer: Address, here: Address) -> bool:
    """Whether the socket at ``peer``, connected to ``here``, belongs to this user or to root, on this host."""
    return owner_of(peer, here) in (os.geteuid(), 0)


class TorchStoreServer:
    """Serves one table of keys.

    Args:
        listener: the bound, listening socket.
        is_welcome: whether a connection may use the store, by the addresses and ports of its two ends.
        say: takes a line for the user.
    """

    def __init__(
        self,
        listener: socket.socket,
        is_welcome: Callable[[Address, Address], bool] = is_own,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._listener = listener
        self._is_welcome = is_welcome
        self._say = say
        self._complaints = 0
        self._deaf_until: float | None = None
        self._table = TorchTable()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Serve until the process is killed."""
        while True:
            self.turn()

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait until something can be done, at most that many seconds, and do it."""
        if self._deaf_until is not None:
            timeout_s = max(0.0, self._deaf_until - time.monotonic())
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                key.data.attend(events)
        if self._deaf_until is not None and self._deaf_until <= time.monotonic():
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for key in list((self._selector.get_map() or {}).values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it has gone again
            except OSError:
                # Most likely too many open files. The kernel queues connections until there is room again.
                self._selector.unregister(self._listener)
                self._deaf_until = time.monotonic() + _DEAF_S
                return
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                welcome = self._is_welcome(address[:2], sock.getsockname()[:2])
            except OSError:
                welcome = False
            if welcome:
                _Guest(sock, self._table, self._selector, self.complain)
            else:
                sock.close()
                self.complain(f"refused a connection from {address[0]} to the job's store: it is not this user's")

    def complain(self, text: str) -> None:
        """Tell the user of a connection that was refused, unless that has been done often enough."""
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            more = "; further ones are not reported" if self._complaints == MOST_COMPLAINTS else ""
            self._say(text + more)


class _Guest:
    """A connection of this user's."""

    def __init__(
        self,
        sock: socket.socket,
        table: TorchTable,
        selector: selectors.BaseSelector,
        complain: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._selector = selector
        self._complain = complain
        self._out = bytearray()
        self._conversation = Conversation(table, self._send)
        selector.register(sock, selectors.EVENT_READ, self)

    def attend(self, events: int) -> None:
        if self._sock.fileno() < 0:
            return  # it was closed after the selector had found its socket ready
        if events & selectors.EVENT_WRITE:
            self._push()
        if events & selectors.EVENT_READ:
            self._read()

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._conversation.end()
            self._selector.unregister(self._sock)
            self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._conversation.hear(data)
        except Malformed as error:
            self._complain(f"closed a connection to the job's store: {error}")
            self.close()

    def _send(self, data: bytes) -> None:
        if self._out or self._sock.fileno() < 0:
            self._out += data
            if len(self._out) > _MOST_UNREAD:
                self.close()
            return
        sent = 0
        with contextlib.suppress(OSError):  # a peer that has gone is noticed when receiving
            sent = self._sock.send(data)
        if sent < len(data):
            self._out += data[sent:]
            self._selector.modify(self._sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _push(self) -> None:
        try:
            del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()
        if not self._out:
            self._selector.modify(self._sock, selectors.EVENT_READ, self)
