"""Links from this worker to the others: made when first needed, through shared memory if that can be, else over TCP.

The worker that dials proves the job's key (``wire/door.py``), says who it is, and offers shared memory if the other one
has the same host name. The other one accepts the offer if it can attach that memory, which proves that they share a
host. The first one attaches the other's in turn, and says whether it could. If it could, the connection has done its
work and is closed; otherwise it is the link, and the threads of ``links/readers.py`` read it.

Two workers have one link. If both dial at the same time, the one with the lower incarnation says that it is busy, and
the other one's next attempt finds the link.

If this worker encrypts, claim and verdict also carry the public keys of the two ends (``wire/encryption.py``). A worker
that encrypts and one that does not refuse each other.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from phalanx import settings
from phalanx.errors import InitializationError
from phalanx.rpc.links.contract import Link, LinkEnded, OwnLink, Receiver
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.shared import Offer, SharedHub
from phalanx.rpc.links.socket import END_S, KEEP_ALIVE, SocketLink
from phalanx.rpc.members import Member, Members
from phalanx.rpc.peer import Peer
from phalanx.system.threads import start
from phalanx.wire.dial import Line, NoAnswer, dial
from phalanx.wire.door import Arrival, Door
from phalanx.wire.framing import Malformed
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, PassedOn, WrongKey
from phalanx.wire.session import TAG_BYTES
from phalanx.wire.sockets import LOOK_S, listen
from phalanx.words import tell

__all__ = ["ROLE", "Claim", "Connections", "EncryptionMismatch", "Unreached", "Verdict"]

ROLE = "rpc"
# The kernel of a host answers a connection at once, whatever the worker there does. If the worker then says nothing, it
# is stopped or busy, and is asked again.
DIAL_S = 5.0
_THERE_S = 2.0  # for a worker of the same name to answer
# By what it goes, as the worker that has dialled says after the other one has accepted its offer.
_BY_MEMORY, _BY_TCP = b"m", b"t"
_CHOICE_BYTES = len(_BY_TCP) + TAG_BYTES
# A worker that dies while it is dialled closes the connection, and its listener a moment later or earlier. So it is
# dialled again, and then nothing listens there, unless another worker has come to its address.
_MOST_DIALS = 4
_AGAIN_S = 0.05
_BUSY_S = 0.005
_CLOSED = "this worker has been closed"


class EncryptionMismatch(InitializationError):
    """One of two workers encrypts what goes between them and the other does not, so they do not talk to each other.

    Nothing of a call was sent. All workers of a job have to be started alike.

    Example:
        this worker encrypts what it sends over TCP, and worker1 does not, so nothing was sent to it. Set
        rpc.init(encrypt=...) or PHALANX_RPC_ENCRYPT alike for all workers

    What to do:
        Give every worker the same ``rpc.init(encrypt=...)``, or set PHALANX_RPC_ENCRYPT alike on all hosts.
    """

    def __init__(self, other: str, *, other_encrypts: bool) -> None:
        own, theirs = ("does not", "encrypts") if other_encrypts else ("encrypts", "does not")
        super().__init__(
            f"this worker {own} what it sends over TCP, and {other} {theirs}, so nothing was sent to it. Set "
            f"rpc.init(encrypt=...) or {settings.RPC_ENCRYPT} alike for all workers"
        )


# What dialling and sending raise if the other worker cannot be reached.
Unreached = (LinkEnded, OSError, NoProof, WrongKey, PassedOn, EncryptionMismatch)


class Claim(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Claim of a worker that dials.

    Attributes:
        me: who it is.
        to: the incarnation that it wants.
        offer: of shared memory; None for TCP.
        exchange: its public key; empty if it does not encrypt.
    """

    me: Member
    to: int
    offer: Offer | None = None
    exchange: str = ""


class Verdict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Answer of the worker that listens.

    Attributes:
        refused: why it does not talk to the caller; empty if it does.
        busy: it makes a link to the caller itself.
        encrypts: whether it does, if the caller does not do alike.
        shared: it has accepted the offer.
        exchange: its public key; empty if it does not encrypt.
    """

    refused: str = ""
    busy: bool = False
    encrypts: bool | None = None
    shared: bool = False
    exchange: str = ""


_encode = msgspec.json.Encoder().encode
_NOT_READ = (msgspec.MsgspecError, ValueError, RecursionError)
_claims, _verdicts = msgspec.json.Decoder(Claim), msgspec.json.Decoder(Verdict)


class Connections:
    """All links of one worker, its listening socket, and the thread that accepts. Safe to use from several threads.

    Args:
        members: who there is.
        address: where to listen; an address of this host.
        key: what every worker of the job knows.
        receiver: this worker.
        found_gone: is called with a worker at whose address nobody listens any more.
        encrypt: encrypt what goes over TCP.

    Attributes:
        port: where it listens.
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
        self._members, self._receiver, self._found_gone = members, receiver, found_gone
        self._key, self._encrypt = key, encrypt
        self._me: Member | None = None
        self._attend: Callable[[float], float]  # from start() on
        self._lock = threading.Lock()  # guards the next two, and the link of each peer
        self._closed = False
        self._peers: dict[int, Peer] = {}
        self._welcoming: dict[threading.Thread, socket.socket] = {}  # workers that dial, and are being answered
        listener = listen(address, 0)
        self.port: int = listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._readers = Readers()
        self._door = Door(listener, key, ROLE, KEEP_ALIVE, self._selector, self._welcome)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)  # wakes the thread
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        self._thread = threading.Thread(target=self._run, name="phalanx-rpc-network", daemon=True)
        self._hub: SharedHub | None = None
        try:
            self._hub = SharedHub(receiver)
        except OSError as error:
            tell(f"note: workers of this host talk over TCP: {error}")
        except BaseException:
            self._stop_listening()
            raise

    def start(self, me: Member, attend: Callable[[float], float]) -> None:
        """Accept connections from now on, as this worker.

        Args:
            me: this worker.
            attend: is called on this object's thread, with the time, by ``time.monotonic`` and soon after :meth:`wake`.
                It returns when it is to be called again.
        """
        self._me, self._attend = me, attend
        self._enter(self.peer(me), OwnLink(self._receiver))
        start(self._thread)

    def peers(self) -> list[Peer]:
        """Return the peers with which something goes on."""
        return list(self._peers.values())

    def peer(self, member: Member) -> Peer:
        """Return a worker as a peer."""
        peer = self._peers.get(member.incarnation)
        if peer is None:
            with self._lock:
                peer = self._peers.setdefault(member.incarnation, Peer(member))
        return peer

    def link_now(self, member: Member) -> Link | None:
        """Return the link to a worker, if there is one."""
        peer = self._peers.get(member.incarnation)
        return peer.link if peer is not None else None

    def link_to(self, peer: Peer, until: float) -> Link:
        """Return the link to a peer, which is made if there is none.

        Args:
            peer: the peer.
            until: when to give up, as of ``time.monotonic``.

        Raises:
            Unreached: it is gone, or cannot be reached.
            TimeoutError: it took too long.
        """
        if (link := peer.link) is not None:
            return link
        if not peer.connecting.acquire(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
            raise TimeoutError
        try:
            closed = 0
            while True:
                if (link := peer.link) is not None:
                    return link
                if self._closed:
                    raise LinkEnded(_CLOSED)
                if (departure := self._members.gone(peer.member)) is not None:
                    raise LinkEnded(departure.why)
                if time.monotonic() >= until:
                    raise TimeoutError
                try:
                    if (link := self._dial(peer, until)) is not None:
                        return link
                    time.sleep(_BUSY_S)
                except NoAnswer:
                    pass  # it is stopped or busy
                except ConnectionError:
                    closed += 1
                    if closed == _MOST_DIALS:
                        raise
                    time.sleep(_AGAIN_S)
        finally:
            peer.connecting.release()

    def drop(self, peer: Peer) -> None:
        """Forget a peer that could not be reached, unless something else goes on with it."""
        with self._lock:
            idle = peer.link is None and not peer.calls and not peer.connecting.locked()
            if idle and self._peers.get(peer.member.incarnation) is peer:
                del self._peers[peer.member.incarnation]

    def ended(self, link: Link) -> Peer | None:
        """Forget a link that has ended, and return who is gone with it; None for one that was never used."""
        with self._lock:
            peer, link.peer = link.peer, None
            if peer is not None:
                peer.link = None
                self._peers.pop(peer.member.incarnation, None)
        return peer

    def is_there(self, member: Member) -> bool:
        """Ask whether this incarnation of a worker answers at its address."""
        peer = self.peer(member)
        try:
            self.link_to(peer, time.monotonic() + _THERE_S)
        except EncryptionMismatch:
            return True
        except Unreached:
            self.drop(peer)
            return False
        return True

    def close(self) -> None:
        """End all links and threads."""
        with self._lock:  # nothing is entered any more
            self._closed = True
        until = time.monotonic() + END_S  # for all peers that take nothing, such as those that are stopped, together
        for link in self._links():
            link.close(until) if isinstance(link, SocketLink) else link.close()
        self._stop_listening()
        hub, self._hub = self._hub, None  # its memory is unmapped when its last thread and tensor have gone
        if hub is not None:
            hub.close()

    def _links(self) -> list[Link]:
        return [link for peer in self.peers() if (link := peer.link) is not None]

    def _enter(self, peer: Peer, link: Link) -> None:
        with self._lock:
            if not self._closed:
                link.peer = peer = self._peers.setdefault(peer.member.incarnation, peer)
                peer.link = link
                return
        link.close()
        raise LinkEnded(_CLOSED)

    # -- the side that dials -----------------------------------------------------------------------

    def _dial(self, peer: Peer, until: float) -> Link | None:
        """Make the link to a peer; None if that is busy with doing so."""
        me, hub, member = self._me, self._hub, peer.member
        if me is None:
            raise LinkEnded("this process is no worker yet")
        offer: Offer | None = None
        if hub is not None and member.host == me.host:
            with contextlib.suppress(OSError):  # then it goes by TCP
                offer = hub.offer()
        try:
            patience_s = max(0.05, min(DIAL_S, until - time.monotonic()))
            try:
                claim = Claim(me=me, to=member.incarnation, offer=offer)
                line, said = self._dial_out(member, claim, patience_s)
            except ConnectionRefusedError as error:
                self._found_gone(member)
                raise LinkEnded("nothing listens at its address any more") from error
            except NoAnswer:
                raise
            except TimeoutError as error:
                if time.monotonic() >= until:
                    raise
                raise LinkEnded("its host does not answer") from error
            if said.refused or said.busy:
                line.close()
                if said.busy:
                    return None
                raise LinkEnded(said.refused)
            if said.shared and hub is not None and offer is not None:
                with contextlib.suppress(LinkEnded):  # then it goes by TCP
                    shared = hub.confirm(offer)
                    with contextlib.suppress(OSError), line.sock:  # it is noticed if that process is gone
                        line.sock.sendall(line.session.seal(_BY_MEMORY))
                    self._enter(peer, shared)
                    shared.begin()
                    return shared
            line.sock.sendall(line.session.seal(_BY_TCP))
            return self._add(peer, SocketLink(line.sock, line.session, self._receiver, self._readers))
        finally:
            if hub is not None and offer is not None:
                hub.withdraw(offer)

    def _dial_out(self, member: Member, claim: Claim, patience_s: float) -> tuple[Line, Verdict]:
        """Connect to another worker; its verdict on the claim comes with the connection.

        Raises:
            OSError, NoProof, WrongKey: see :func:`phalanx.wire.dial.dial`.
            EncryptionMismatch: one of the two encrypts, and the other does not.
        """
        exchange = None
        if self._encrypt:
            from phalanx.wire.encryption import Exchange

            exchange = Exchange()
            claim.exchange = exchange.public
        where = member.address, member.port
        line, said = dial(where, self._key, ROLE, _encode(claim), patience_s=patience_s, keep_alive=KEEP_ALIVE)
        try:
            verdict = _verdicts.decode(said)
            if verdict.encrypts is not None:
                raise EncryptionMismatch(str(member), other_encrypts=verdict.encrypts)
            if exchange is not None and not verdict.refused:
                line = Line(line.sock, exchange.session(line.session, verdict.exchange, is_listener=False))
            return line, verdict
        except _NOT_READ as error:  # the answer to a claim that was changed is empty
            line.close()
            raise ConnectionAbortedError("somebody on the way has changed what this worker said") from error
        except Malformed as error:
            line.close()
            raise ConnectionAbortedError(f"it has answered with {error}") from error
        except BaseException:
            line.close()
            raise

    # -- the side that listens ---------------------------------------------------------------------

    def _welcome(self, arrival: Arrival) -> None:
        """Answer a process that has proven the key."""
        me = self._me
        try:
            claim = _claims.decode(arrival.proven.claim)
        except _NOT_READ:
            arrival.sock.close()
            return
        peer = claim.me
        if me is None:
            arrival.sock.close()
        elif bool(claim.exchange) != self._encrypt:
            _refuse(arrival, Verdict(encrypts=self._encrypt))
        elif self._closed or claim.to != me.incarnation:
            _refuse(arrival, Verdict(refused=f"another worker is at its address now: {me}"))
        elif self._members.known(peer.incarnation) not in (None, peer) or peer.incarnation == me.incarnation:
            _refuse(arrival, Verdict(refused="another worker has this number"))
        else:
            thread = threading.Thread(
                target=self._let_in, args=(peer, arrival, claim), name="phalanx-rpc-welcome", daemon=True
            )
            self._welcoming[thread] = arrival.sock
            try:
                start(thread)
            except BaseException:
                del self._welcoming[thread]
                arrival.sock.close()
                raise

    def _let_in(self, member: Member, arrival: Arrival, claim: Claim) -> None:
        """Answer a worker that dials, on a thread of its own, and wait until it says by what it goes."""
        peer, sock, shared = self.peer(member), arrival.sock, None
        holds = peer.connecting.acquire(False)
        try:
            if peer.link is not None or (not holds and claim.to < member.incarnation):
                _refuse(arrival, Verdict(busy=True))
                return
            session, verdict = arrival.proven.session(), Verdict()
            if self._encrypt:
                from phalanx.wire.encryption import Exchange

                exchange = Exchange()
                session = exchange.session(session, claim.exchange, is_listener=True)
                verdict.exchange = exchange.public
            if claim.offer is not None and self._hub is not None:
                shared = self._hub.accept(claim.offer)
            verdict.shared = shared is not None
            arrival.answer(_encode(verdict))
            sock.setblocking(True)
            choice = arrival.rest
            while len(choice) < _CHOICE_BYTES and (data := sock.recv(_CHOICE_BYTES - len(choice))):
                choice += data
            session.check(choice, len(_BY_TCP))
            if choice.startswith(_BY_TCP):
                self._add(peer, SocketLink(sock, session, self._receiver, self._readers))
                return
            sock.close()
            if shared is not None and choice.startswith(_BY_MEMORY):
                link, shared = shared, None
                self._enter(peer, link)
                link.begin()
        except (LinkEnded, OSError, Malformed):  # this worker has been closed, or the caller has gone
            sock.close()
        finally:
            if shared is not None:
                shared.close()
            if holds:
                peer.connecting.release()
            self.drop(peer)
            self._welcoming.pop(threading.current_thread(), None)

    def _add(self, peer: Peer, link: SocketLink) -> Link:
        self._enter(peer, link)
        link.begin()
        self.wake()  # to look at the links from now on
        return link

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = math.inf
        while not self._closed:
            now = time.monotonic()
            links = [link for link in self._links() if isinstance(link, SocketLink)]
            if not links:
                look_at = math.inf
            elif look_at == math.inf or look_at <= now:
                for link in links:
                    link.look()
                look_at = now + LOOK_S
            due = min(self._door.tend(now), look_at, self._attend(now))
            for key, _ in self._selector.select(None if due == math.inf else max(0.0, due - now)):
                try:
                    key.data()
                except Exception as error:  # the other connections go on
                    tell(f"warning: a connection of RPC failed: {error!r}")

    def wake(self) -> None:
        """Have the thread look at what there is to do."""
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _stop_listening(self) -> None:
        self._closed = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for thread, sock in list(self._welcoming.items()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._readers.close()
        self._door.close()
        self._selector.close()
        with self._lock:
            bell, self._bell = self._bell, -1
        os.close(bell)


def _refuse(arrival: Arrival, verdict: Verdict) -> None:
    arrival.answer(_encode(verdict))
    arrival.sock.close()
