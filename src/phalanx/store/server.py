"""Rank 0's side of the store: one listening socket, one thread, and a table of keys.

A connection comes in by a door (``wire/door.py``), which admits only processes that prove the job's key. Then the claim
of the process is judged (``seats.py``): it is refused if its rank has joined already, its world has another size or its
attempt is over. The reason is sent to the process and printed here. Only the bytes of a process that was not refused
are read as requests. One selector serves all connections; a request that has to wait is parked in the table, so no
connection ever delays another.

Rank 0 itself uses the table directly, under the same lock: its requests need no socket and no thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from phalanx.store import requests
from phalanx.store.claim import KEEP_ALIVE, ROLE, Claim
from phalanx.store.company import Company
from phalanx.store.gathering import Gathering
from phalanx.store.guest import Guest
from phalanx.store.seats import Seats
from phalanx.store.table import Table
from phalanx.system.exit_order import Stage, at_exit
from phalanx.system.threads import SLICE_S, AwakeClock, start, wait_awake
from phalanx.wire import door as doors
from phalanx.wire.door import Arrival, Displaced, Door, Silent
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import Address, NoProof, PassedOn, WrongKey
from phalanx.wire.session import TAG_BYTES
from phalanx.words import tell

__all__ = ["StoreServer"]

# Refused connections are reported one by one up to this number: a port scan makes many of them.
MOST_COMPLAINTS = 16
_BLOCK = 1 << 18
# How long rank 0's process, when it ends, waits for ranks that still read its answers.
LINGER_S = 0.3


class StoreServer:
    """The store of one world, served until :meth:`retire` or :meth:`end`.

    Args:
        listener: the bound, listening socket; the server closes it.
        key: the job's key.
        seats: which ranks may join, and which have.
        say: takes a line for rank 0's console.
        announced: addresses and ports at which the other ranks dial this host, and that are not its own.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        seats: Seats,
        say: Callable[[str], None] = tell,
        announced: Sequence[Address] = (),
    ) -> None:
        self._key = key
        self._seats = seats
        self._say = say
        self._table = Table()
        self._clock = AwakeClock()  # by which requests wait
        self._complaints = 0
        self._over = ""
        self._gathering = Gathering()
        self.company = Company(say)
        self._retired = self._stopped = False
        # Guards everything here. No thread waits for anything while holding it.
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._waiting_for_all: list[tuple[float, Guest]] = []
        self._guests: dict[int, Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            listener, key, ROLE, KEEP_ALIVE, self._selector, self._admit, self._on_refused, announced=announced
        )
        self._here = listener.getsockname()[:2]
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._serve, name="phalanx-store", daemon=True)
        try:
            start(self._thread)
        except RuntimeError:
            self._release()
            raise
        _servers.add(self)

    # -- rank 0's own calls ------------------------------------------------------------------------

    def call(
        self, code: int, number: int = 0, fields: Sequence[bytes] = (), timeout_s: float | None = None
    ) -> tuple[int, int, Sequence[bytes]]:
        """Carry out a request of this process itself; return the answer's code, number and fields.

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
                return requests.FAILED, 0, [self._over.encode()]
            if code == requests.MEETING:
                self._gathering.hear(self._seats.own.rank, number, fields)
                return requests.DONE, 0, ()
            number = number if timeout_s is None or code not in requests.WAITING else 0  # this thread ends the wait
            parked = self._table.handle(code, number, fields, take, self._clock.now())
        if parked is not None:
            try:
                wait_awake(partial(self._wait_and_look, done), timeout_s)
            finally:
                with self._lock:
                    if not answers:
                        self._table.forget(parked)
        return answers[0] if answers else (requests.LATE, 0, sorted(parked.missing) if parked else [])

    def _wait_and_look(self, done: threading.Event, slice_s: float) -> bool:
        if done.wait(slice_s):
            return True
        self.company.look()
        return False

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait for every rank to come, at most that many seconds; return whether all have."""
        with self._lock:
            return self._came.wait_for(lambda: self._seats.complete or bool(self._over), timeout_s) and not self._over

    def describe_missing(self) -> str:
        """The ranks that have not come, for people."""
        with self._lock:
            return self._seats.describe_missing()

    def retire(self) -> None:
        """Accept no further connection, and end when the last rank has gone; the port is free at once."""
        with self._lock:
            self._retired = True
            self._door.stop_listening()
            self._lose(self._seats.own)
        self._wake()

    def end(self, why: str = "rank 0 has left") -> None:
        """Answer every waiting request with ``why``, close all connections, and end the thread."""
        with self._lock:
            if not self._over:
                self._over = why
                self._door.stop_listening()
                self._table.end(why)
                for _, guest in self._waiting_for_all:
                    self._reply(guest, requests.FAILED, 0, [why.encode()])
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
                    now = self._clock.now()
                    for key, events in ready:
                        if isinstance(key.data, Guest):
                            self._attend(key.data, events, now)
                        else:
                            key.data()
                    if self._stopped or (self._retired and not self._guests):
                        return
                    pause = self._expire(self._clock.now())
        finally:
            with self._lock:
                self._stopped = True
                self._over = self._over or "rank 0 has left"
                self._release()

    def _release(self) -> None:
        self._door.close()
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _expire(self, now: float) -> float | None:
        """End the waits and the strangers whose time is over; return the seconds until the next one, None for never."""
        until = self._table.expire(now)
        for deadline, guest in list(self._waiting_for_all):
            if deadline <= now:
                self._waiting_for_all.remove((deadline, guest))
                self._reply(guest, requests.LATE, 0, [self._seats.describe_missing().encode()])
            until = min(until, deadline)
        real = time.monotonic()
        pause = min(until - now, self._door.tend(real) - real)
        return None if pause == math.inf else max(0.0, min(pause, SLICE_S))

    def _attend(self, guest: Guest, events: int, now: float) -> None:
        if guest.sock.fileno() < 0:
            return  # it was dismissed after the selector had found its socket ready
        if events & selectors.EVENT_WRITE:
            self._push(guest)
            return
        try:
            data = guest.sock.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(guest)
        elif not guest.told:
            guest.data += data
            self._read_requests(guest, now)

    def _read_requests(self, guest: Guest, now: float) -> None:
        try:
            while guest.data:
                if guest.waits or guest.out:
                    raise Malformed("a request came before the last one was answered")
                length = requests.length_of(guest.data)
                if length is None or len(guest.data) < length + TAG_BYTES:
                    return
                guest.session.check(guest.data, length)
                code, number, fields = requests.unpack(guest.data, length)
                del guest.data[: length + TAG_BYTES]
                if code == requests.EVERYBODY:
                    self._await_everybody(guest, number, now)
                    continue
                if code == requests.MEETING:
                    self._gathering.hear(guest.claim.rank, number, fields)
                    self._reply(guest, requests.DONE, 0, ())
                    continue
                parked = self._table.handle(code, number, fields, partial(self._reply, guest), now)
                if parked is not None:
                    guest.parked, guest.waits = parked, True
        except Malformed as error:
            self._complain(guest.peer, f"sent bytes that are not a request ({error})")
            self._dismiss(guest)

    def _await_everybody(self, guest: Guest, number: int, now: float) -> None:
        guest.waits = True
        self._waiting_for_all.append((now + number / 1000 if number > 0 else math.inf, guest))
        self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        """If every rank has joined, answer those that wait for that, and say whom each may look at from now on."""
        if self._seats.complete:
            for _, waiting in self._waiting_for_all:
                said = [claim.encode() for claim in self._seats.neighbours(waiting.claim.rank)]
                self._reply(waiting, requests.DONE, 0, said)
            if not self._gathering.is_through(self._seats.own.rank):
                self.company.meet(self._seats.neighbours(self._seats.own.rank))
            self._waiting_for_all.clear()
            self._came.notify_all()

    def _lose(self, claim: Claim) -> None:
        """If the rank has gone before it had all that it needs, the others wait in vain for what they need of it.

        They are told now, also those that have not asked for it yet: rank 0's process may be gone when they do. It may
        end as soon as it knows itself, so it is told last.
        """
        if not self._gathering.is_in(claim.rank):
            return
        why = self._gathering.reason(claim)
        for guest in list(self._guests.values()):
            if not self._gathering.is_through(guest.claim.rank) and not guest.told:
                if guest.parked is not None:
                    self._table.forget(guest.parked)
                self._reply(guest, requests.LOST, 0, self._table.lost or why)
                guest.told = True
        self._table.lose(why)

    # -- joining -----------------------------------------------------------------------------------

    def _admit(self, arrival: Arrival) -> None:
        """Judge the claim of a process that has proven the key, and let it use the store if it is welcome."""
        try:
            claim = Claim.decode(arrival.proven.claim)
        except NoProof as error:
            self._on_refused(arrival.peer, error)
            arrival.sock.close()
            return
        verdict = self._seats.judge(claim)
        arrival.answer(verdict.encode())
        if verdict.kind == "welcome":
            guest = Guest(arrival.sock, arrival.peer, claim, arrival.proven.session(), arrival.rest)
            self._guests[guest.sock.fileno()] = guest
            self._selector.register(guest.sock, selectors.EVENT_READ, guest)
            self._answer_if_complete()
            self._read_requests(guest, self._clock.now())
            return
        arrival.sock.close()
        if verdict.kind == "refused":
            self._say(f"refused a process: {verdict.reason}")

    def _on_refused(self, peer: str, why: Exception) -> None:
        if isinstance(why, WrongKey):
            self._complain(peer, f"proves another key than rank 0's ({self._key.source or 'none'})")
        elif isinstance(why, Silent):
            self._complain(peer, f"was silent for {doors.PATIENCE_S:.0f} s")
        elif isinstance(why, Displaced):
            self._complain(peer, "had proven nothing yet when too many others came")
        elif isinstance(why, PassedOn):
            self._complain(
                peer,
                f"was meant for {why.dialled}, not for {self._here[0]} port {self._here[1]}: another process has "
                f"passed it on. If that is a gateway of your own, set MASTER_ADDR to the address that others dial",
            )
        else:
            self._complain(peer, "sent no proof that it belongs to the job")

    def _complain(self, peer: str, why: str) -> None:
        self._complaints += 1
        if self._complaints <= MOST_COMPLAINTS:
            more = "; further ones are not reported" if self._complaints == MOST_COMPLAINTS else ""
            self._say(f"refused a connection from {peer}, which {why}{more}")

    def _dismiss(self, guest: Guest) -> None:
        """Close a connection, and forget what it waits for."""
        descriptor = guest.sock.fileno()
        if descriptor < 0:
            return
        if guest.parked is not None:
            self._table.forget(guest.parked)
        self._waiting_for_all = [entry for entry in self._waiting_for_all if entry[1] is not guest]
        self._guests.pop(descriptor, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)
        guest.sock.close()
        rank = guest.claim.rank
        if self._over or any(other.claim.rank == rank for other in self._guests.values()):
            return
        if self._seats.complete:
            self._lose(guest.claim)
        else:
            self._seats.leave(rank)  # it may be started again
            self._say(f"rank {rank} ({guest.claim.name}) has left again before all ranks had come")

    # -- sending -----------------------------------------------------------------------------------

    def _reply(self, guest: Guest, code: int, number: int, fields: Sequence[bytes]) -> None:
        guest.parked, guest.waits = None, False
        if guest.sock.fileno() < 0:
            return
        try:
            message = requests.pack(code, number, fields)
        except (ValueError, OverflowError) as error:
            message = requests.pack(requests.FAILED, 0, [str(error).encode()])
        guest.out += guest.session.seal(message)
        self._push(guest)

    def _push(self, guest: Guest) -> None:
        """Send what the network takes now; while bytes are left, wait until it takes them and read nothing."""
        try:
            while guest.out:
                del guest.out[: guest.sock.send(guest.out)]
        except BlockingIOError:
            pass
        except OSError:
            guest.out.clear()  # it has gone, which is noticed when receiving
        if bool(guest.out) != guest.stuck:
            guest.stuck = bool(guest.out)
            self._selector.modify(guest.sock, selectors.EVENT_WRITE if guest.stuck else selectors.EVENT_READ, guest)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    # -- the end of the process, and forks ---------------------------------------------------------

    def linger(self, until: float) -> None:
        """Serve the ranks that are still connected, until that time, then end."""
        self.retire()
        self._thread.join(max(0.0, until - time.monotonic()))
        self.end()

    def let_go(self) -> None:
        """In a forked child: close what belongs to the parent, whose thread is not here."""
        self._lock = threading.RLock()
        self._over = "the store belongs to the process that this one was forked from"
        # Closed without the selector, which the parent shares.
        self._door.let_go()
        for guest in self._guests.values():
            guest.sock.close()
        self._wake_read.close()
        self._wake_write.close()
        self._guests.clear()
        self._selector.close()
        _servers.discard(self)


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _at_exit() -> None:
    # The interpreter's end would stop the thread in the middle of an answer, so the servers are ended before it.
    until = time.monotonic() + LINGER_S
    for server in list(_servers):
        server.linger(until)


def _after_fork() -> None:
    for server in list(_servers):
        server.let_go()


at_exit(Stage.END_STORES, _at_exit)
os.register_at_fork(after_in_child=_after_fork)
