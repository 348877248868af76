"""Mailboxes whose messages also go to ranks of other hosts: those of a group's messages, and of its collectives.

The core matches and moves what is in a mailbox (``native/csrc/messages/``). To a rank of another host each direction
has a TCP connection of its own, which its sender dials when it has the first message. Both sides prove the job's key
(``wire/``), and then the core has the socket. A process listens at one address for all its groups, on one thread, which
knows each mailbox by a token. The others have address and token when all have joined the group. So a rank that is not
there, or refuses, has left or is gone.

==============  ==========================  ==========================  =====================
state           written by                  read by                     guarded by
==============  ==========================  ==========================  =====================
``_listener``   mailboxes that open, close  the same                    ``_making``
``_groups``     mailboxes that open, close  the listener's thread       one step of Python's
``_dialling``   who dials; its thread       who leaves                  one step of Python's
``undialled``   who dials                   who sends                   one step of Python's
==============  ==========================  ==========================  =====================
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from phalanx import settings
from phalanx.errors import BackendError, PeerLost
from phalanx.membership.abort import GroupAbort, address_key
from phalanx.membership.loop import Loop
from phalanx.native.core import Status, library
from phalanx.native.signals import SignalPoll
from phalanx.system.foreign_values import read_json
from phalanx.system.interfaces import outward_address
from phalanx.system.threads import start
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.shm.mailbox import Mailbox
from phalanx.transports.shm.tuning import load_tuning
from phalanx.wire.dial import dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import job_key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.wire.sockets import KeepAlive, listen

__all__ = ["RemoteMail"]

ROLE = "messages"
WELCOME, NO = b"welcome", b"no"
KEEP_ALIVE = KeepAlive(idle_s=10, interval_s=5, probes=6)
DIALLING_S = 3.0  # how long connecting may take, and then the handshake as long again
AGAIN_S = 0.1
_ENDING_S = 2.0

Admit = Callable[[int, int], bool]


class _Listener:
    """The thread of this process that lets in who dials for one of its groups."""

    def __init__(self) -> None:
        self._groups: dict[str, Admit] = {}
        listener = listen(_own_address(), 0)
        self.where: tuple[str, int] = listener.getsockname()[:2]
        self._loop = Loop("phalanx-messages")
        self._door = Door(listener, job_key(), ROLE, KEEP_ALIVE, self._loop.selector, self._admit)
        self._loop.tend = self._door.tend
        try:
            self._loop.start()
        except BaseException:
            self._end()
            raise

    def add(self, admit: Admit) -> str:
        """Let in who dials for a group with the token that this returns; ``admit`` is given the rank and the socket."""
        token = secrets.token_hex(8)
        self._groups[token] = admit
        return token

    def remove(self, token: str) -> bool:
        """Let nobody in any more for a group; return whether it was the last one."""
        self._groups.pop(token, None)
        return not self._groups

    def close(self) -> None:
        self._loop.call(self._end)
        if self._loop.thread is not threading.current_thread():
            self._loop.thread.join(_ENDING_S)

    def _end(self) -> None:
        self._door.close()
        self._loop.stop()

    def _admit(self, arrival: Arrival) -> None:
        with arrival.sock:
            try:
                claim = read_json(arrival.proven.claim)
                admit, rank = self._groups[claim["to"]], int(claim["from"])
            except (ValueError, KeyError, TypeError):
                arrival.answer(NO)
                return
            # Before the answer: a rank that has been let in may send, leave, and say so.
            own = os.dup(arrival.sock.fileno())
            if admit(rank, own):
                arrival.answer(WELCOME)
            else:
                os.close(own)
                arrival.answer(NO)


def _own_address() -> str:
    """The address of the interface that is named for Phalanx, or else for Gloo; or that by which others come here."""
    named = os.environ.get(settings.INTERFACE) or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return outward_address(environment={**os.environ, settings.INTERFACE: named} if named else os.environ)


_listener: _Listener | None = None
_making = threading.RLock()  # a signal handler may close a group while its thread makes one


class RemoteMail:
    """The mailbox of one rank of one group, and its connections. Any thread may use it.

    Args:
        name: under which the ranks find each other's address; equal on all of them.
        layout: where the ranks are.
        group: tells the ranks their addresses as they join, and from then on they can dial each other.
        timeout: how long a message waits for its peer.
        mailbox: that of this host's segment; by default one of its own, for messages to other hosts alone.

    Attributes:
        mailbox: the core's side.
        undialled: the ranks that this one has not dialled yet.

    Raises:
        OSError: this process cannot listen, as for want of descriptors.
    """

    _spin = 100  # how often a wait looks before it yields the core; with 0 it sleeps at once

    def __init__(
        self, name: str, layout: Layout, group: GroupAbort, timeout: timedelta, mailbox: Mailbox | None = None
    ) -> None:
        global _listener
        self._name, self._layout, self._group, self._rank = name, layout, group, group.rank
        self._core, self._size = library(), len(group.ranks)
        self._has_own = mailbox is None
        self.mailbox = mailbox or self._open()
        here = [self._rank] if mailbox is None else layout.here
        if self._core.phx_messages_join(self.mailbox.comm, self._size, (ctypes.c_int32 * len(here))(*here)):
            raise BackendError(f"there is no memory for the messages of a group of {self._size} ranks")
        self.mailbox.names = range(self._size)
        self.set_timeout(timeout)
        self.undialled = {each for each in range(self._size) if each not in layout.here}
        self._dialling: set[threading.Thread] = set()
        self._over = threading.Event()
        try:
            with _making:
                if _listener is None:
                    _listener = _Listener()
                self._listener = _listener
                self._token = _listener.add(self._admit)
        except BaseException:
            self._give_back()
            raise
        group.say_address(name, json.dumps([*self._listener.where, self._token]).encode())

    def _open(self) -> Mailbox:
        """Make a segment of one rank."""
        signals, cookie = SignalPoll(), secrets.token_bytes(16)
        descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        try:
            self._core.phx_segment_format(descriptor, 1, *load_tuning().for_size(1), cookie)
            comm = self._core.phx_open(descriptor, 0, cookie, self._spin, signals.callback)
        finally:
            os.close(descriptor)
        if not comm:
            raise BackendError(f"the core cannot make a mailbox: {os.strerror(ctypes.get_errno())}")
        return Mailbox(comm, signals, PeerLost, [0])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long messages wait from now on; the owner of a segment tells that itself."""
        self._timeout_s = timeout.total_seconds()
        if self._has_own:
            with self.mailbox as comm:
                if comm:
                    self._core.phx_set_timeout(comm, *[int(self._timeout_s * 1e9)] * 2)

    # -- for the mailbox ---------------------------------------------------------------------------

    def dial(self, peer: int) -> None:
        """Connect to a rank, on a thread, until it lets this one in or is known not to.

        Raises:
            BackendError: there is no thread for it.
        """
        self.undialled.discard(peer)
        thread = threading.Thread(target=self._dial, args=(peer,), name="phalanx-messages-dial", daemon=True)
        self._dialling.add(thread)
        try:
            start(thread)
        except BackendError:
            self._dialling.discard(thread)
            raise

    def look_for(self, peer: int | None, *, if_gone: bool = False) -> None:
        """Dial a rank that a message does not come from, or any, to know whether it is there; or if it has gone."""
        for each in [peer] if peer is not None else [*self.undialled]:
            if each in self.undialled and (not if_gone or self._group.is_gone(each)):
                with contextlib.suppress(BackendError):  # who waits has a timeout
                    RemoteMail.dial(self, each)

    # -- the end -----------------------------------------------------------------------------------

    def await_dialled(self, patience_s: float) -> None:
        """Wait until all ranks that are being dialled have let this one in, and have what waited for that."""
        until = time.monotonic() + patience_s
        for thread in self.threads():
            thread.join(max(0.0, until - time.monotonic()))

    def threads(self) -> list[threading.Thread]:
        """Those that dial."""
        return [*self._dialling]

    def stop(self, in_order: bool) -> None:
        """Let no message move any more, let nobody in and dial nobody. Safe to call twice.

        Args:
            in_order: tell the others that this rank has left.
        """
        global _listener
        self.mailbox.end(in_order)
        self._over.set()
        last = None
        with _making:
            if self._listener.remove(self._token) and _listener is self._listener:
                last, _listener = _listener, None
        if last is not None:
            last.close()

    def abort(self) -> None:
        """End every wait for another host, here and there. Any thread may call it."""
        with self.mailbox as comm:
            if comm:
                self._core.phx_messages_cut(comm)
                if self._has_own:
                    self._core.phx_abort(comm)

    def close(self, in_order: bool = False) -> None:
        """Give back all of it but a segment's mailbox. Safe to call twice."""
        self.stop(in_order)
        self._give_back()

    def _give_back(self) -> None:
        if self._has_own and (comm := self.mailbox.take()) and self.mailbox.close():
            self._core.phx_close(comm)

    # -- connections -------------------------------------------------------------------------------

    def _admit(self, rank: int, socket: int) -> bool:
        return self._hand_over(rank, socket, incoming=True)

    def _hand_over(self, rank: int, socket: int, incoming: bool) -> bool:
        with self.mailbox as comm:
            return bool(comm) and self._core.phx_messages_connect(comm, rank, socket, incoming) == Status.OK

    def _dial(self, peer: int) -> None:
        try:
            if not self._reach(peer):
                left = self._group.has_left(peer)
                with self.mailbox as comm:
                    if comm:
                        self._core.phx_messages_refused(comm, peer, left)
        finally:
            self._dialling.discard(threading.current_thread())

    def _reach(self, peer: int) -> bool:
        """Dial until the rank has let this one in, or this one leaves; False if that will not be."""
        address, port, token = json.loads(self._group.addresses(self._name).get(address_key(peer)))
        claim = json.dumps({"to": token, "from": self._rank}).encode()
        while not self._over.is_set():
            try:
                line, verdict = dial(
                    (address, port), job_key(), ROLE, claim, patience_s=DIALLING_S, keep_alive=KEEP_ALIVE
                )
            except (ConnectionRefusedError, NoProof, WrongKey):
                return False  # its process has ended, or all its groups have
            except OSError:  # the network or a process is busy, or out of something; who waits has a timeout
                self._over.wait(AGAIN_S)
                continue
            if verdict != WELCOME:
                line.close()
                return False
            own = line.sock.detach()
            if not self._hand_over(peer, own, incoming=False):
                os.close(own)
            return True
        return True


def _after_fork() -> None:
    global _listener, _making
    _making, _listener = threading.RLock(), None  # the loop has closed the parent's sockets


os.register_at_fork(after_in_child=_after_fork)
