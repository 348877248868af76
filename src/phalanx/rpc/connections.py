"""The ways from this worker to the others: made when first needed, through shared memory if that can be, else TCP.

The worker that dials proves the job's key, says who it is, and offers shared memory if the other one has the same host
name. The other one accepts the offer if it can attach that memory, which proves that they share a host. The first one
attaches the other's in turn, and says whether it could. If it could, the connection has done its work and is closed;
otherwise it is the way.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import msgspec

from phalanx.rpc.links.contract import Link, LinkEnded, Receiver
from phalanx.rpc.links.own import OwnLink
from phalanx.rpc.links.shared import SharedHub, SharedLink
from phalanx.rpc.links.socket import END_S, SocketLink
from phalanx.rpc.members import Member, Members
from phalanx.rpc.network import EncryptionMismatch, Network
from phalanx.wire.dial import NoAnswer
from phalanx.wire.door import Arrival
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, PassedOn, WrongKey
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import LOOK_S
from phalanx.words import tell

__all__ = ["Connections", "Unreached"]

# The kernel of a host answers a connection at once, whatever the worker there does. If the worker then says nothing, it
# is stopped or busy, and is asked again.
DIAL_S = 5.0

# By what it goes, as the worker that has dialled says after the other one has accepted its offer.
_BY_MEMORY, _BY_TCP = b"m", b"t"
_CHOICE_BYTES = len(_BY_TCP) + TAG_BYTES

# A worker that dies while it is dialled closes the connection, and its listener a moment later or earlier. So it is
# dialled again, and then nothing listens there, unless another worker has come to its address.
_MOST_DIALS = 4
_AGAIN_S = 0.05

_CLOSED = "this worker has been closed"

# What dialling and sending raise if the other worker cannot be reached.
Unreached = (LinkEnded, OSError, NoProof, WrongKey, PassedOn, EncryptionMismatch)


class Connections:
    """All links of one agent. Safe to use from several threads.

    Args:
        members: who there is.
        address: where to listen.
        key: what every worker of the job knows.
        receiver: the agent.
        found_gone: is called with a worker at whose address nobody listens any more.
        encrypt: encrypt what goes over TCP.
    """

    def __init__(
        self,
        members: Members,
        address: str,
        key: Key,
        receiver: Receiver,
        found_gone: Callable[[Member], None],
        *,
        encrypt: bool = False,
    ) -> None:
        self._members = members
        self._receiver = receiver
        self._found_gone = found_gone
        self._me: Member | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._peers: dict[Link, Member] = {}
        self._dialling: dict[int, threading.Lock] = {}
        self._network = Network(address, key, self._welcome, self._look_at_links, encrypt=encrypt)
        self._look_at = 0.0
        self._hub: SharedHub | None = None
        try:
            self._hub = SharedHub(receiver)
        except OSError as error:
            tell(f"note: workers of this host talk over TCP: {error}")
        except BaseException:
            self._network.stop()
            raise
        self.port: int = self._network.port

    def start(self, me: Member) -> None:
        """Accept connections from now on, as this worker."""
        self._me = me
        own = OwnLink(self._receiver)
        self._links[me.incarnation] = own
        self._peers[own] = me
        self._network.start()

    def peer_of(self, link: Link) -> Member | None:
        """Who is at the other end; None if the link has ended."""
        return self._peers.get(link)

    @property
    def host(self) -> str:
        """The name of this host, as other workers know it."""
        return self._me.host if self._me is not None else ""

    def link_now(self, member: Member) -> Link | None:
        """The way to a worker, if there is one."""
        return self._links.get(member.incarnation)

    def link_to(self, member: Member, until: float) -> Link:
        """The way to a worker, which is made if there is none.

        Args:
            member: the worker.
            until: when to give up, as of ``time.monotonic``.

        Raises:
            Unreached: it is gone, or cannot be reached.
            TimeoutError: it took too long.
        """
        link = self._links.get(member.incarnation)
        if link is not None:
            return link
        if self._closed:
            raise LinkEnded(_CLOSED)
        with self._lock:
            dialling = self._dialling.setdefault(member.incarnation, threading.Lock())
        if not dialling.acquire(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
            raise TimeoutError
        try:
            closed = 0
            while True:
                link = self._links.get(member.incarnation)
                if link is not None:
                    return link
                if (departure := self._members.gone(member)) is not None:
                    raise LinkEnded(departure.why)
                try:
                    return self._dial(member, until)
                except NoAnswer:
                    if time.monotonic() >= until or self._closed:
                        raise
                except ConnectionError:
                    closed += 1
                    if closed == _MOST_DIALS or time.monotonic() + _AGAIN_S >= until or self._closed:
                        raise
                    time.sleep(_AGAIN_S)
        finally:
            dialling.release()

    def ended(self, link: Link) -> Member | None:
        """Forget a link that has ended, and return who is gone with it; None if another way there goes on."""
        with self._lock:
            peer = self._peers.pop(link, None)
            if peer is None:
                return None
            if self._links.get(peer.incarnation) is link:
                del self._links[peer.incarnation]
            for other, its_peer in self._peers.items():
                if its_peer.incarnation == peer.incarnation:  # both had dialled, and that way goes on
                    self._links.setdefault(peer.incarnation, other)
                    return None
            self._dialling.pop(peer.incarnation, None)
        return peer

    def is_there(self, member: Member) -> bool:
        """Whether this incarnation of a worker answers at its address."""
        try:
            said = self._network.ask(member.address, member.port, {"ping": 1}, 2.0)
        except Unreached:
            return False
        return bool(said.get("incarnation") == member.incarnation)

    def close(self) -> None:
        """End all links and threads."""
        with self._lock:  # nothing is entered any more
            self._closed = True
        until = time.monotonic() + END_S  # for all peers that take nothing, such as those that are stopped, together
        for link in list(self._peers):
            link.close(until) if isinstance(link, SocketLink) else link.close()
        hub, self._hub = self._hub, None  # its memory is unmapped when its last thread and tensor have gone
        if hub is not None:
            hub.close()
        self._network.stop()

    def _dial(self, member: Member, until: float) -> Link:
        me, hub = self._me, self._hub
        if me is None:
            raise LinkEnded("this process is no worker yet")
        offer = b""
        if hub is not None and member.host == me.host:
            with contextlib.suppress(OSError):  # then it goes by TCP
                offer = hub.offer()
        try:
            patience = max(0.05, min(DIAL_S, until - time.monotonic()))
            claim = {"me": asdict(me), "to": member.incarnation, "offer": offer.decode()}
            try:
                line, said = self._network.dial(member.address, member.port, claim, patience, str(member))
            except ConnectionRefusedError as error:
                self._found_gone(member)
                raise LinkEnded("nothing listens at its address any more") from error
            except NoAnswer:
                raise
            except TimeoutError as error:
                if time.monotonic() >= until:
                    raise
                raise LinkEnded("its host does not answer") from error
            if said.get("shared") and hub is not None:
                with contextlib.suppress(LinkEnded):  # then it goes by TCP
                    shared = hub.confirm(offer)
                    with contextlib.suppress(OSError), line.sock:  # it is noticed if that process is gone
                        line.sock.sendall(line.session.seal(_BY_MEMORY))
                    chosen = self._enter(member, shared)
                    shared.begin()
                    return chosen
                line.sock.sendall(line.session.seal(_BY_TCP))
            if "refused" in said:
                line.close()
                raise LinkEnded(said["refused"])
            return self._add(member, SocketLink(line.sock, line.session, self._receiver, readers=self._network.readers))
        finally:
            if hub is not None and offer:
                hub.withdraw(offer)

    def _welcome(self, arrival: Arrival) -> None:
        """A process that knows the key has come. It is on the network's thread."""
        me = self._me
        try:
            claim = json.loads(arrival.proven.claim)
            if claim == {"ping": 1} and me is not None:
                _refuse(arrival, incarnation=me.incarnation)
                return
            following = self._network.session(arrival, claim)
            if following is None:
                return
            session, verdict = following
            peer, to, offer = msgspec.convert(claim["me"], Member), claim["to"], str(claim["offer"]).encode()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgspec.MsgspecError):
            arrival.sock.close()
            return
        if me is None or self._closed or to != me.incarnation:
            _refuse(arrival, refused=f"another worker is at its address now: {me}")
            return
        if self._members.known(peer.incarnation) not in (None, peer) or peer.incarnation == me.incarnation:
            _refuse(arrival, refused="another worker has this number")
            return
        shared = self._hub.accept(offer) if offer and self._hub is not None else None
        if shared is not None:
            arrival.answer(json.dumps({**verdict, "shared": 1}).encode())
            chosen = partial(self._on_choice, peer, shared, arrival, session)
            self._network.hear(arrival, _CHOICE_BYTES, chosen)
            return
        arrival.answer(json.dumps(verdict).encode())
        self._add_arrival(peer, arrival, session)

    def _on_choice(self, peer: Member, shared: SharedLink, arrival: Arrival, session: Session) -> None:
        """The caller has said whether it could attach this worker's memory, or has gone."""
        data = arrival.rest
        try:
            session.check(data, len(_BY_TCP))
        except Malformed:
            data.clear()
        if data.startswith(_BY_MEMORY):
            arrival.sock.close()
            with contextlib.suppress(LinkEnded):
                self._enter(peer, shared)
                shared.begin()
            return
        shared.close()
        if data.startswith(_BY_TCP):
            del data[:_CHOICE_BYTES]
            self._add_arrival(peer, arrival, session)
        else:
            arrival.sock.close()

    def _add_arrival(self, peer: Member, arrival: Arrival, session: Session) -> None:
        link = SocketLink(arrival.sock, session, self._receiver, arrival.rest, self._network.readers)
        with contextlib.suppress(LinkEnded):
            self._add(peer, link)

    def _add(self, peer: Member, link: SocketLink) -> Link:
        chosen = self._enter(peer, link)
        link.begin()
        self._network.wake()  # to look at the links from now on
        return chosen

    def _look_at_links(self, now: float) -> float:
        if self._look_at > now:
            return self._look_at
        links = [link for link in list(self._peers) if isinstance(link, SocketLink)]
        for link in links:
            link.look()
        self._look_at = now + LOOK_S if links else 0.0
        return self._look_at or math.inf

    def _enter(self, peer: Member, link: Link) -> Link:
        with self._lock:
            if not self._closed:
                self._peers[link] = peer
                return self._links.setdefault(peer.incarnation, link)  # both may have dialled at the same time
        link.close()
        raise LinkEnded(_CLOSED)


def _refuse(arrival: Arrival, **verdict: str | int) -> None:
    arrival.answer(json.dumps(verdict).encode())
    arrival.sock.close()
