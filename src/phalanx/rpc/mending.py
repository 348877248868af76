"""Another connection in place of one that has broken, between the same two processes in the same incarnations.

The worker that had dialled dials again, and names the link, and how many frames it has received. The other one answers
how many it has, and both go on behind those numbers (``links/unacknowledged.py``), so no message is lost, and none
comes twice. Meanwhile the other one asks at the first one's address whether it is still there. Either ends the link

- at once, if nothing listens at the other's address, or another worker does: the process has ended;
- when the other host has not answered for ``UNREACHED_S``;
- if the other worker has ended the link itself;
- if the other worker is there, but has not connected for ``ABSENT_S``: it cannot reach this one.

A process that is busy or stopped is waited for: its kernel still accepts connections. Calls end by their own timeouts.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.errors import BackendError
from phalanx.rpc.links.socket import SocketLink
from phalanx.rpc.members import Member
from phalanx.rpc.network import EncryptionMismatch, Network
from phalanx.system.threads import start
from phalanx.wire.dial import NoAnswer
from phalanx.wire.door import Arrival
from phalanx.wire.framing import Malformed
from phalanx.wire.proof import NoProof, PassedOn, WrongKey
from phalanx.wire.session import Session

__all__ = ["Mender"]

UNREACHED_S = 0.6
ABSENT_S = 5.0
_PAUSE_S = 0.02
_ANOTHER = "another worker is at its address now"


class Mender:
    """Mends the links of one worker.

    Args:
        network: by which it dials.
        me: the number of this worker's incarnation.
    """

    def __init__(self, network: Network, me: int) -> None:
        self._network = network
        self._me = me

    def dialler(self, number: str, to: Member) -> Callable[[SocketLink, str], None]:
        """What mends a link that this worker has dialled.

        Args:
            number: names the link; the other side has it from the first claim.
            to: who is at the other end.
        """
        attempts = iter(range(1, 1 << 62))

        def attempt(link: SocketLink) -> str:
            mend = {"link": number, "attempt": next(attempts), "received": link.received}
            claim = {"mend": mend, "from": self._me, "to": to.incarnation}
            line, said = self._network.dial(to.address, to.port, claim, UNREACHED_S, str(to))
            if "received" not in said:
                line.close()
                return str(said.get("refused", _ANOTHER))
            try:
                link.resume(line.sock, line.session, b"", said["received"])
            except Malformed as error:
                line.close()
                return f"it cannot go on after the connection was lost: {error}"
            return ""

        return self._in_background(attempt, "phalanx-rpc-redial")

    def dialled(self, caller: Member) -> Callable[[SocketLink, str], None]:
        """What waits for the caller of a link to connect again.

        Args:
            caller: who is at the other end.
        """

        def attempt(link: SocketLink) -> str:
            said = self._network.ask(caller.address, caller.port, {"ping": 1}, UNREACHED_S)
            if said.get("incarnation") != caller.incarnation:
                return _ANOTHER
            until, last = time.monotonic() + ABSENT_S, link.attempt
            while link.down and not link.over and link.attempt == last:
                if time.monotonic() > until:
                    return "the connection was lost, and it has not connected again"
                time.sleep(_PAUSE_S)
            return ""

        return self._in_background(attempt, "phalanx-rpc-lost")

    def receive(
        self,
        link: SocketLink,
        arrival: Arrival,
        session: Session,
        verdict: dict[str, Any],
        attempt: int,
        received: int,
    ) -> None:
        """The caller of a link has connected again: go on with that, unless a later connection of it has been.

        Args:
            link: the link.
            arrival: the connection.
            session: what follows on it.
            verdict: what the answer to the caller's claim has beside the number of frames.
            attempt: the number of the caller's attempt.
            received: how many frames the caller has received.
        """

        def resume() -> None:
            if attempt > link.attempt:
                link.suspend()  # also a thread that has not done with an earlier attempt
            with link.mending:
                if attempt <= link.attempt or not link.suspend():
                    arrival.sock.close()
                    return
                link.attempt = attempt
                arrival.answer(json.dumps({**verdict, "received": link.received}).encode())
                try:
                    link.resume(arrival.sock, session, arrival.rest, received)
                except Malformed as error:
                    arrival.sock.close()
                    link.give_up(f"it cannot go on after the connection was lost: {error}")

        try:
            start(threading.Thread(target=resume, name="phalanx-rpc-resume", daemon=True))
        except BackendError:
            arrival.sock.close()  # the caller tries again for ``UNREACHED_S``

    def _in_background(self, attempt: Callable[[SocketLink], str], name: str) -> Callable[[SocketLink, str], None]:
        def mend(link: SocketLink, why: str) -> None:
            until, last = time.monotonic() + UNREACHED_S, link.attempt
            while link.down and not link.over and link.attempt == last:
                try:
                    reason = attempt(link)
                    if reason:
                        link.give_up(reason)
                    return
                except (ConnectionRefusedError, EncryptionMismatch):  # nobody, or another worker, is at its address now
                    link.give_up(why)
                except NoAnswer:
                    until = time.monotonic() + UNREACHED_S  # its kernel has answered
                except (OSError, NoProof, WrongKey, PassedOn, ValueError):
                    if time.monotonic() > until:
                        link.give_up(why)
                    time.sleep(_PAUSE_S)

        def begin(link: SocketLink, why: str) -> None:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=mend, args=(link, why), name=name, daemon=True).start()
                return
            link.give_up(why)  # there can be no more threads

        return begin
