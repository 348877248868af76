"""The launcher's store: torch's ``TCPStore``, for the processes of this user alone.

torch's client cannot prove a key, so this server asks the kernel of each connection whose socket is at its other end
(``system/interfaces.py``), and closes those of other users unread. No client notices: scripts, libraries and
programs that connect to MASTER_ADDR and MASTER_PORT go on as they are.

One thread serves all connections, and none waits for another. A stranger costs one question to the kernel.

A connection from another host is another kernel's to judge. The launcher has a process on each host of the job, with a
proven connection, and asks there (:class:`Referral`); the connection waits unread meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping

from phalanx.store.ended import ENDED, SLASH, EndsChannel, is_vain
from phalanx.store.torch_requests import Conversation, TorchTable
from phalanx.system.interfaces import Address, owner_of
from phalanx.wire.framing import Malformed
from phalanx.words import tell

__all__ = ["LONG_WAIT_S", "Referral", "TorchStoreServer", "is_own"]

# How many refused connections are reported; a port scan makes many of them.
MOST_COMPLAINTS = 4
# How many connections are accepted in a row before those accepted earlier are served.
_AT_ONCE = 64
# For how long no connection is accepted after the process has run out of file descriptors.
_DEAF_S = 0.2
_BLOCK = 1 << 17
# A client reads each answer before it asks again, so more than this was not asked for by torch.
_MOST_UNREAD = 1 << 28
LONG_WAIT_S = 5.0
# How many connections from other hosts may wait for an answer, and for how long.
_MOST_WAITING = 256
_ANSWER_S = 5.0


def is_own(peer: Address, here: Address) -> bool:
    """Whether the socket at ``peer``, connected to ``here``, belongs to this user or to root, on this host."""
    try:
        return owner_of(peer, here) in (os.geteuid(), 0)
    except OSError:
        return False


class Referral:
    """Asks the launcher whether connections from other hosts are the job's; a stranger's is not answered.

    Args:
        sock: a SOCK_SEQPACKET socket to the launcher. Each question on it is a JSON list of a number and the two ends
            of a connection; each answer is the number of one that is the job's.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._waiting: deque[tuple[int, float, socket.socket, str]] = deque()
        self._count = 0

    @property
    def due_at(self) -> float | None:
        """When :meth:`expired` has something to return."""
        return self._waiting[0][1] if self._waiting else None

    def ask(self, sock: socket.socket, peer: Address, here: Address) -> None:
        """Have a connection looked up on the other hosts."""
        self._count += 1
        self._waiting.append((self._count, time.monotonic() + _ANSWER_S, sock, peer[0]))
        with contextlib.suppress(OSError):  # a launcher that does not keep up with strangers has not been asked
            self.sock.send(json.dumps([self._count, peer, here]).encode())

    def answered(self) -> list[socket.socket]:
        """The connections that have been found to be the job's."""
        found = []
        with contextlib.suppress(OSError):
            while data := self.sock.recv(64):
                number = int(data)
                for entry in list(self._waiting):
                    if entry[0] == number:
                        self._waiting.remove(entry)
                        found.append(entry[2])
        return found

    def expired(self) -> list[tuple[socket.socket, str]]:
        """The connections that are nobody's, and the addresses that they come from: the oldest if there are many."""
        now, over = time.monotonic(), []
        while self._waiting and (self._waiting[0][1] <= now or len(self._waiting) > _MOST_WAITING):
            _, _, sock, peer = self._waiting.popleft()
            over.append((sock, peer))
        return over


class TorchStoreServer:
    """Serves one table of keys.

    Args:
        listener: the bound, listening socket.
        is_welcome: whether a connection may use the store, by the addresses and ports of its two ends.
        referral: asks about the connections from other hosts; None if the job is on this host alone.
        ends: says which ranks have ended in order.
        on_long_wait: called about every ``LONG_WAIT_S`` with the keys for which somebody has waited that long, and with
            the ranks that have ended, each with its host.
        say: takes a line for the user.
    """

    def __init__(
        self,
        listener: socket.socket,
        is_welcome: Callable[[Address, Address], bool] = is_own,
        referral: Referral | None = None,
        ends: EndsChannel | None = None,
        on_long_wait: Callable[[list[bytes], Mapping[int, str]], None] | None = None,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._on_long_wait = on_long_wait
        self._look_at: float | None = None
        self._listener = listener
        self._is_welcome = is_welcome
        self._referral = referral
        self._say = say
        self._complaints = 0
        self._deaf_until: float | None = None
        self._table = TorchTable()
        self._ends = ends
        self._ended: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        if ends is not None:
            self._table.is_vain = lambda key: is_vain(key, self._ended, self._table.entries)
            self._selector.register(ends, selectors.EVENT_READ, self._hear_of_ends)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if referral is not None:
            self._selector.register(referral.sock, selectors.EVENT_READ, self._take_answers)

    def serve(self) -> None:
        """Serve until the process is killed."""
        while True:
            self.turn()

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait until something can be done, at most that many seconds, and do it."""
        referral = self._referral
        if self._on_long_wait is not None and self._look_at is None and self._table.waiting:
            self._look_at = time.monotonic() + LONG_WAIT_S
        times = [self._deaf_until, self._look_at, referral.due_at if referral is not None else None]
        due_at = min((when for when in times if when is not None), default=None)
        if due_at is not None:
            timeout_s = max(0.0, due_at - time.monotonic())
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, _Guest):
                key.data.attend(events)
            else:
                key.data()
        if self._deaf_until is not None and self._deaf_until <= time.monotonic():
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self._look_at is not None and self._look_at <= time.monotonic():
            self._look_at = None
            overdue = self._table.overdue(LONG_WAIT_S)
            if overdue and self._on_long_wait is not None:
                self._on_long_wait(overdue, self._ended)
        for sock, peer in referral.expired() if referral is not None else ():
            self._refuse(sock, peer)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, _Guest):
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
            peer, here = address[:2], sock.getsockname()[:2]
            if self._is_welcome(peer, here):
                self._admit(sock)
            elif self._referral is not None:
                self._referral.ask(sock, peer, here)
            else:
                self._refuse(sock, peer[0])

    def _hear_of_ends(self) -> None:
        if self._ends is None:
            return
        news = self._ends.hear()
        if news is None:
            self._selector.unregister(self._ends)
            return
        self._ended |= news
        self._table.put(SLASH + ENDED.encode(), json.dumps(self._ended).encode())
        self._table.end_vain_waits()

    def _take_answers(self) -> None:
        for sock in self._referral.answered() if self._referral is not None else ():
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # it may have gone already, which is noticed when receiving
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Guest(sock, self._table, self._selector, self.complain)

    def _refuse(self, sock: socket.socket, peer: str) -> None:
        sock.close()
        self.complain(f"refused a connection from {peer} to the job's store: it is not this user's")

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
