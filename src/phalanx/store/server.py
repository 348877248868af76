"""Rank 0's side of the store: one listening socket, one thread, and a table of keys.

Whoever connects is a stranger until he has proven the key (``proof.py``): he gets a challenge and a deadline, and of
what he sends only the digest is looked at. Then his place is looked at: a rank that is there already, another world
size, an attempt that is over are refused in words, here and there. Only then are his bytes requests. One selector
serves all connections; a request that has to wait is parked in the table, so no connection ever holds up another.

Rank 0 itself uses the table directly, under the same lock: its requests cost no socket and no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.store import requests as wire
from phalanx.store.seats import Seats
from phalanx.store.table import Parked, Table
from phalanx.wire.key import Key
from phalanx.wire.proof import CHALLENGE_BYTES, Claim, NoProof, Verdict, WrongKey, claimed, greeting, verdict
from phalanx.words import tell

__all__ = ["StoreServer"]

# A rank answers at once, unless its machine is very busy.
PATIENCE_S = 10.0
MOST_STRANGERS = 512
# Strangers are told of one by one up to this number: whoever scans a port does it often.
MOST_COMPLAINTS = 16
_BLOCK = 1 << 18
DEAF_S = 0.2
# A host that has gone without a word: after 10 s of silence, six probes. Its kernel answers them, however busy it is.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
# How long a process that ends waits for those who still read what it has answered.
LINGER_S = 0.3


@dataclass(eq=False)
class _Guest:
    """A connection.

    Attributes:
        sock: the socket.
        peer: its other end's address, for people.
        greeted: the greeting that it was given.
        deadline: when a stranger is sent away.
        claim: who it is, once that is proven and accepted.
        data: what came and is not a whole message yet.
        out: what the network has not taken yet.
        waits: whether a request of this connection is not answered yet.
        parked: that request, if it waits for keys.
        stuck: whether something is in ``out``, so that nothing more is heard.
    """

    sock: socket.socket
    peer: str
    greeted: bytes
    deadline: float
    claim: Claim | None = None
    data: bytearray = field(default_factory=bytearray)
    out: bytearray = field(default_factory=bytearray)
    waits: bool = False
    parked: Parked | None = None
    stuck: bool = False


class StoreServer:
    """The store of one world, served until :meth:`retire` or :meth:`end`.

    Args:
        listener: the bound, listening socket; the server closes it.
        key: the job's key.
        seats: who may come, and who has.
        say: takes a line for rank 0's console.
    """

    def __init__(self, listener: socket.socket, key: Key, seats: Seats, say: Callable[[str], None] = tell) -> None:
        self._listener: socket.socket | None = listener
        self._key = key
        self._seats = seats
        self._say = say
        self._table = Table()
        self._complaints = 0
        self._over = ""
        self._retired = self._stopped = False
        # Guards all of the above and the guests. Nobody waits for anything while holding it.
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._waiting_for_all: list[tuple[float, _Guest]] = []
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[int, _Guest] = {}
        self._guests: dict[int, _Guest] = {}
        self._deaf_until = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        _servers.add(self)
        self._thread = threading.Thread(target=self._serve, name="phalanx-store", daemon=True)
        self._thread.start()

    # -- rank 0's own ------------------------------------------------------------------------------

    def call(
        self, code: int, number: int = 0, fields: Sequence[bytes] = (), timeout_s: float | None = None
    ) -> tuple[int, int, Sequence[bytes]]:
        """Carry out a request of this very process; the answer's code, number and fields.

        Args:
            code, number, fields: the request.
            timeout_s: how long it may wait, in seconds; None for as long as it takes.
        """
        answers: list[tuple[int, int, Sequence[bytes]]] = []
        done = threading.Event()

        def take(*answer: object) -> None:
            answers.append(answer)  # type: ignore[arg-type]
            done.set()

        with self._lock:
            if self._over:
                return wire.FAILED, 0, [self._over.encode()]
            parked = self._table.handle(code, number if timeout_s is None else 0, fields, take, time.monotonic())
        if parked is not None:
            try:
                done.wait(timeout_s)
            finally:
                with self._lock:
                    if not answers:
                        self._table.forget(parked)
        return answers[0] if answers else (wire.LATE, 0, sorted(parked.missing) if parked else [])

    def wait_for_all(self, timeout_s: float) -> bool:
        """Whether every rank has come, or comes within that many seconds."""
        with self._lock:
            return self._came.wait_for(lambda: self._seats.complete or bool(self._over), timeout_s) and not self._over

    def describe_missing(self) -> str:
        """The ranks that have not come, in words."""
        with self._lock:
            return self._seats.describe_missing()

    def retire(self) -> None:
        """Let nobody in any more, and end when the last one has gone; the port is free at once."""
        with self._lock:
            self._retired = True
            self._close_listener()
        self._wake()

    def end(self, why: str = "rank 0 has left") -> None:
        """Tell everybody who waits why it is in vain, close all connections, and end the thread."""
        with self._lock:
            if not self._over:
                self._over = why
                self._close_listener()
                self._table.end(why)
                for _, guest in self._waiting_for_all:
                    self._reply(guest, wire.FAILED, 0, [why.encode()])
                self._waiting_for_all.clear()
                self._came.notify_all()
            self._stopped = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(LINGER_S)

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        pause: float | None = 0.0
        try:
            while True:
                ready = self._selector.select(pause)
                with self._lock:
                    now = time.monotonic()
                    for key, events in ready:
                        self._attend(key, events, now)
                    if self._stopped or (self._retired and not self._guests):
                        return
                    pause = self._look_at_the_clock(time.monotonic())
        finally:
            with self._lock:
                self._stopped = True
                self._over = self._over or "rank 0 has left"
                self._close_listener()
                for guest in [*self._strangers.values(), *self._guests.values()]:
                    self._dismiss(guest)
                self._selector.close()
                self._wake_read.close()
                self._wake_write.close()

    def _attend(self, key: selectors.SelectorKey, events: int, now: float) -> None:
        if key.fileobj is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif key.fileobj is self._listener:
            self._accept(now)
        elif isinstance(key.data, _Guest) and key.data.sock.fileno() >= 0:
            if events & selectors.EVENT_WRITE:
                self._push(key.data)
            else:
                self._hear(key.data, now)

    def _look_at_the_clock(self, now: float) -> float | None:
        """Send away who has waited or kept silent too long; how many seconds until the next one has."""
        until = self._table.expire(now)
        for deadline, guest in list(self._waiting_for_all):
            if deadline <= now:
                self._waiting_for_all.remove((deadline, guest))
                self._reply(guest, wire.LATE, 0, [self._seats.describe_missing().encode()])
            until = min(until, deadline)
        for guest in list(self._strangers.values()):
            if guest.deadline <= now:
                self._send_away(guest, f"was silent for {PATIENCE_S:.0f} s")
            else:
                until = min(until, guest.deadline)
        if self._deaf_until and self._listener is not None:
            if self._deaf_until <= now:
                self._deaf_until = 0.0
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                until = min(until, self._deaf_until)
        return None if until == math.inf else max(0.0, until - now)

    def _accept(self, now: float) -> None:
        for _ in range(64):
            if self._listener is None:
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # Too many open files, most likely. The kernel's queue keeps who comes until there is room again.
                self._selector.unregister(self._listener)
                self._deaf_until = now + DEAF_S
                return
            if len(self._strangers) >= MOST_STRANGERS:
                sock.close()
                continue
            sock.setblocking(False)
            guest = _Guest(sock, str(address[0]), greeting(), now + PATIENCE_S)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE.items():
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._strangers[sock.fileno()] = guest
            self._selector.register(sock, selectors.EVENT_READ, guest)
            self._send(guest, guest.greeted)

    def _hear(self, guest: _Guest, now: float) -> None:
        try:
            data = guest.sock.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(guest)
            return
        guest.data += data
        try:
            if guest.claim is None and not self._judge(guest):
                return
            self._read_requests(guest, now)
        except NoProof:
            self._send_away(guest, "sent no proof that it belongs to the job")
        except wire.Malformed as error:
            self._send_away(guest, f"sent no request ({error})")

    def _read_requests(self, guest: _Guest, now: float) -> None:
        while guest.data:
            if guest.waits or guest.out:
                raise wire.Malformed("it asks before it has been answered")
            length = wire.length_of(guest.data)
            if length is None or len(guest.data) < length:
                return
            code, number, fields = wire.unpack(guest.data, length)
            del guest.data[:length]
            if code == wire.EVERYBODY:
                self._await_everybody(guest, number, now)
                continue
            parked = self._table.handle(code, number, fields, functools.partial(self._reply, guest), now)
            if parked is not None:
                guest.parked, guest.waits = parked, True

    def _await_everybody(self, guest: _Guest, number: int, now: float) -> None:
        guest.waits = True
        self._waiting_for_all.append((now + number / 1000 if number > 0 else math.inf, guest))
        self._look_around()

    # -- who may come in ---------------------------------------------------------------------------

    def _judge(self, guest: _Guest) -> bool:
        """Whether a stranger has become a guest; he is told why, if not."""
        try:
            proven = claimed(self._key, guest.greeted, guest.data)
        except WrongKey:
            # Its own digest tells him that this is so on both sides.
            theirs = bytes(guest.data[len(guest.greeted) - CHALLENGE_BYTES : len(guest.greeted)])
            self._send(guest, verdict(self._key, guest.greeted, theirs, Verdict("refused", "another key")))
            self._send_away(guest, f"proves another key than rank 0's ({self._key.source or 'none'})")
            return False
        if proven is None:
            return False
        claim, theirs, used = proven
        del guest.data[:used]
        what = self._seats.judge(claim)
        if what.word == "welcome":
            guest.claim = claim
            self._guests[guest.sock.fileno()] = self._strangers.pop(guest.sock.fileno())
            self._send(guest, verdict(self._key, guest.greeted, theirs, what))
            self._look_around()
            return True
        self._send(guest, verdict(self._key, guest.greeted, theirs, what))
        if what.word == "refused":
            self._say(f"refused a process: {what.said}")
        self._dismiss(guest)
        return False

    def _look_around(self) -> None:
        """Tell whoever waits for all ranks, if all have come."""
        if self._seats.complete:
            for _, waiting in self._waiting_for_all:
                self._reply(waiting, wire.DONE, 0, ())
            self._waiting_for_all.clear()
            self._came.notify_all()

    def _send_away(self, guest: _Guest, why: str) -> None:
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            more = "; others are not told of" if self._complaints == MOST_COMPLAINTS else ""
            self._say(f"refused a connection from {guest.peer}, which {why}{more}")
        self._dismiss(guest)

    def _dismiss(self, guest: _Guest) -> None:
        """Close a connection, and forget what it waits for."""
        descriptor = guest.sock.fileno()
        if descriptor < 0:
            return
        if guest.parked is not None:
            self._table.forget(guest.parked)
        self._waiting_for_all = [entry for entry in self._waiting_for_all if entry[1] is not guest]
        self._guests.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)
        guest.sock.close()
        if guest.claim is None or self._over or self._seats.complete:
            return
        rank = guest.claim.rank
        if not any(other.claim is not None and other.claim.rank == rank for other in self._guests.values()):
            self._seats.leave(rank)  # it may be started again
            self._say(f"rank {rank} ({guest.claim.name}) has left again before everybody had come")

    # -- sending -----------------------------------------------------------------------------------

    def _reply(self, guest: _Guest, code: int, number: int, fields: Sequence[bytes]) -> None:
        guest.parked, guest.waits = None, False
        if guest.sock.fileno() < 0:
            return
        try:
            message = wire.pack(code, number, fields)
        except (ValueError, OverflowError) as error:
            message = wire.pack(wire.FAILED, 0, [str(error).encode()])
        self._send(guest, message)

    def _send(self, guest: _Guest, data: bytes) -> None:
        guest.out += data
        self._push(guest)

    def _push(self, guest: _Guest) -> None:
        """Send what the network takes; wait for it with the rest, and hear nothing more meanwhile."""
        try:
            while guest.out:
                del guest.out[: guest.sock.send(guest.out)]
        except BlockingIOError:
            pass
        except OSError:
            guest.out.clear()  # it has gone, which is noticed when it is heard
        if bool(guest.out) != guest.stuck:
            guest.stuck = bool(guest.out)
            self._selector.modify(guest.sock, selectors.EVENT_WRITE if guest.stuck else selectors.EVENT_READ, guest)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _close_listener(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # -- the end of the process, and forks ---------------------------------------------------------

    def linger(self, until: float) -> None:
        """Serve who is still connected, until that time, then end."""
        self.retire()
        self._thread.join(max(0.0, until - time.monotonic()))
        self.end()

    def let_go(self) -> None:
        """In a forked child: close what belongs to the parent, whose thread is not here."""
        self._lock = threading.RLock()
        self._over = "the store belongs to the process that this one was forked from"
        # Closed without the selector, which the parent shares.
        for guest in (*self._strangers.values(), *self._guests.values()):
            guest.sock.close()
        for sock in (self._listener, self._wake_read, self._wake_write):
            if sock is not None:
                sock.close()
        self._listener = None
        self._strangers.clear()
        self._guests.clear()
        self._selector.close()
        _servers.discard(self)


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _at_exit() -> None:
    # Before the interpreter ends, which would stop the thread between two bytes of an answer.
    until = time.monotonic() + LINGER_S
    for server in list(_servers):
        server.linger(until)


def _after_fork() -> None:
    for server in list(_servers):
        server.let_go()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
