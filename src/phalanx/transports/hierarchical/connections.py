"""Connections between ranks of different hosts, for the messages of their groups.

Each direction between two ranks of a group has a connection of its own, which its sender dials when it has the first
message. Both sides prove the job's key (``wire/``), and then the core has the socket. A process listens at one address
for all its groups, on one thread, which knows each by a token. The others have address and token when all have
joined the group. So a rank that is not there, or refuses, has left or is gone.

==============  =======================  ==========================  =====================
state           written by               read by                     guarded by
==============  =======================  ==========================  =====================
``_listener``   groups that open, close  the same                    ``_making``
``_groups``     groups that open, close  the listener's thread       one step of Python's
``_dialling``   who dials; its thread    who leaves                  one step of Python's
==============  =======================  ==========================  =====================
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable

from phalanx.errors import BackendError
from phalanx.membership.abort import GroupAbort, address_key
from phalanx.native.core import Status
from phalanx.system.foreign_values import read_json
from phalanx.system.interfaces import outward_address
from phalanx.system.threads import start
from phalanx.transports.shm.mailbox import Mailbox
from phalanx.wire.dial import dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.key import job_key
from phalanx.wire.proof import NoProof, WrongKey
from phalanx.wire.sockets import KeepAlive, listen

__all__ = ["Connections"]

ROLE = "messages"
WELCOME, NO = b"welcome", b"no"
KEEP_ALIVE = KeepAlive(idle_s=10, interval_s=5, probes=6)
DIALLING_S = 3.0  # how long connecting may take, and then the handshake as long again
AGAIN_S = 0.1
_ENDING_S = 2.0
_LONGEST_STEP_S = 10.0

Admit = Callable[[int, int], bool]


class _Listener:
    """The thread of this process that lets in who dials for one of its groups."""

    def __init__(self) -> None:
        self._groups: dict[str, Admit] = {}
        self._selector = selectors.DefaultSelector()
        listener = listen(outward_address(), 0)
        self.where: tuple[str, int] = listener.getsockname()[:2]
        self._door = Door(listener, job_key(), ROLE, KEEP_ALIVE, self._selector, self._admit)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, self._end)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="phalanx-messages", daemon=True)
        try:
            start(self._thread)
        except BaseException:
            self.let_go()
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
        os.eventfd_write(self._bell, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)

    def let_go(self) -> None:
        """Close what it has; in a forked child that is the parent's, and no thread uses it."""
        self._door.let_go()
        self._selector.close()
        os.close(self._bell)

    def _run(self) -> None:
        while not self._ended:
            wait_s = self._door.tend(time.monotonic()) - time.monotonic()
            for key, _ in self._selector.select(min(max(0.0, wait_s), _LONGEST_STEP_S)):
                key.data()
        self.let_go()

    def _end(self) -> None:
        self._ended = True

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


_listener: _Listener | None = None
_making = threading.RLock()  # a signal handler may close a group while its thread makes one


class Connections:
    """The connections of one rank of one group.

    Args:
        group: tells the ranks their addresses as they join.
        mailbox: gets the connections.

    Raises:
        OSError: this process cannot listen, as for want of descriptors.
    """

    _has_left: Callable[[int], bool]

    def __init__(self, group: GroupAbort, mailbox: Mailbox) -> None:
        global _listener
        self._group, self._mailbox = group, mailbox
        self._dialling: set[threading.Thread] = set()
        self._over = threading.Event()
        with _making:
            if _listener is None:
                _listener = _Listener()
            self._listener = _listener
            self._token = _listener.add(self._admit)
        group.say_address(ROLE, json.dumps([*self._listener.where, self._token]).encode())

    def begin(self, has_left: Callable[[int], bool]) -> None:
        """Have what is needed to dial others.

        Args:
            has_left: whether a rank has left the group, so that it refuses to be dialled.
        """
        self._has_left = has_left

    def dial(self, peer: int, must: bool = True) -> None:
        """Connect to a rank, on a thread, until it lets this one in or is known not to.

        Raises:
            BackendError: there is no thread for it, and it must be.
        """
        thread = threading.Thread(target=self._dial, args=(peer,), name="phalanx-messages-dial", daemon=True)
        self._dialling.add(thread)
        try:
            start(thread)
        except BackendError:
            self._dialling.discard(thread)
            if must:
                raise

    def threads(self) -> list[threading.Thread]:
        """Those that dial."""
        return [*self._dialling]

    def await_dialled(self, patience_s: float) -> None:
        """Wait until all ranks that are being dialled have let this one in, and have what waited for that."""
        until = time.monotonic() + patience_s
        for thread in self.threads():
            thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Let nobody in any more, and dial nobody. Safe to call twice."""
        global _listener
        self._over.set()
        last = None
        with _making:
            if self._listener.remove(self._token) and _listener is self._listener:
                last, _listener = _listener, None
        if last is not None:
            last.close()

    def _admit(self, rank: int, socket: int) -> bool:
        return self._hand_over(rank, socket, incoming=True)

    def _hand_over(self, rank: int, socket: int, incoming: bool) -> bool:
        with self._mailbox as comm:
            return bool(comm) and self._mailbox.core.phx_messages_connect(comm, rank, socket, incoming) == Status.OK

    def _dial(self, peer: int) -> None:
        try:
            if not self._reach(peer):
                left = self._has_left(peer)
                with self._mailbox as comm:
                    if comm:
                        self._mailbox.core.phx_messages_refused(comm, peer, left)
        finally:
            self._dialling.discard(threading.current_thread())

    def _reach(self, peer: int) -> bool:
        """Dial until the rank has let this one in, or this one leaves; False if that will not be."""
        address, port, token = json.loads(self._group.addresses(ROLE).get(address_key(peer)))
        claim = json.dumps({"to": token, "from": self._group.rank}).encode()
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
    _making = threading.RLock()
    if _listener is not None:
        _listener.let_go()
        _listener = None


os.register_at_fork(after_in_child=_after_fork)
