"""This process as a worker: the ways to the others, the calls under way, and the services that others may ask for.

Everything above (verbs, remote objects, distributed autograd, torch's names) is written with five calls: ``request``,
``notify``, ``serve``, ``member`` and ``members``.

A call is made at most once: it is sent on one link, and if that link ends before the answer, the caller is told, and
the call is not sent again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from phalanx.errors import CallTimeout, ClosedError, PhalanxError, WorkerLost
from phalanx.rpc import in_transit
from phalanx.rpc.calls import Call, Calls
from phalanx.rpc.encoding import decode, encode
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.links.contract import Link, LinkEnded
from phalanx.rpc.links.own import OwnLink
from phalanx.rpc.links.socket import SocketLink
from phalanx.rpc.members import Member, Members, shared_key
from phalanx.rpc.message import Kind, Message
from phalanx.rpc.network import Network
from phalanx.watch.call_site import capture
from phalanx.wire.door import Arrival
from phalanx.wire.key import Key
from phalanx.wire.proof import NoProof, PassedOn, WrongKey
from phalanx.words import tell

__all__ = ["Agent", "Incoming", "Member"]

# An honest worker answers a connection at once, unless its machine is very busy.
DIAL_S = 10.0
# How many calls one worker may have under way at another; a further one waits for an answer.
MOST_CALLS = 4096
# The services of the agent itself. The second is also the mark of an answer whose receiver is to say that it has it.
CANCEL, RECEIPT = "cancel", "receipt"


@dataclass(frozen=True)
class Incoming:
    """What a service's handler learns about a request beside its value.

    Attributes:
        peer: who asks.
        cancelled: whether the caller has given the call up since.
    """

    peer: Member
    cancelled: Callable[[], bool]


@dataclass(eq=False)
class _Service:
    handler: Callable[[Incoming, Any], Any]
    quick: bool


class Agent:
    """This process as a worker. One at a time, from ``rpc.init()`` to ``rpc.shutdown()``.

    Args:
        store: the job's store, with a prefix that no other agents use.
        name: this worker's name, unique among the living workers.
        rank: its rank, or -1.
        key: the job's key.
        address: the address of this host at which the others reach it.
        timeout_s: how long a call may take by default, in seconds.
        equip: register services; they are called before other workers can find this one.

    Attributes:
        me: this worker.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        key: Key,
        address: str,
        timeout_s: float = 60.0,
        equip: Sequence[Callable[[Agent], None]] = (),
    ) -> None:
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._peers: dict[Link, Member] = {}
        self._dialling: dict[int, threading.Lock] = {}
        self._serving: dict[tuple[int, int], threading.Event] = {}  # requests under way here: set if given up
        self._kept: dict[tuple[int, int], list[Any]] = {}  # what the receivers of answers rely on
        self._room: dict[int, threading.Semaphore] = {}
        self._services: dict[str, _Service] = {}
        self._watchers: list[Callable[[Member, str], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._closed = False
        self._calls = Calls(self._give_up)
        self._handlers = Handlers()
        self._members = Members(store, self._is_there)
        self._network = Network(address, shared_key(store, key), self._welcome)
        try:
            self.serve(CANCEL, self._on_cancel, quick=True)
            self.serve(RECEIPT, self._on_receipt, quick=True)
            for register in equip:
                register(self)
            self._network.start()
            self.me = self._members.join(name, rank, self._pid, address, self._network.port)
        except BaseException:
            self._network.stop()
            raise
        self._links[self.me.incarnation] = own = OwnLink(self)
        self._peers[own] = self.me

    def member(self, to: str | int | Member) -> Member:
        """The newest worker of this name or rank; it may be gone by now.

        Raises:
            RankError: there has been none.
        """
        return to if isinstance(to, Member) else self._members.find(to)

    def members(self) -> list[Member]:
        """All living workers, by rank and name."""
        return self._members.all()

    def say_done(self) -> None:
        """Tell the others that this worker needs them no more, and is there until they need it no more."""
        self._members.say_done(self.me)

    def not_done(self, members: Sequence[Member]) -> list[int]:
        """The ranks of those workers that are still there and have not said so."""
        waited_for = [member for member in members if not self._members.is_done(member)]
        return [member.rank for member in waited_for if not self._members.gone(member)]

    def serve(self, service: str, handler: Callable[[Incoming, Any], Any], *, quick: bool = False) -> None:
        """Let other workers ask for a service.

        Args:
            service: its name.
            handler: gets the request and its value, on one of the agent's threads. What it returns is the answer; if it
                is a :class:`~phalanx.rpc.future.Future`, its value will be. What it raises goes to the caller.
            quick: the handler never waits and is short, so it may run on a thread that receives messages.
        """
        self._services[service] = _Service(handler, quick)

    def on_change(self, callback: Callable[[Member, str], None]) -> None:
        """Have ``callback`` called with a member and ``left`` or ``lost``, when the link to it ends."""
        self._watchers.append(callback)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when this worker stops being one, after its last call."""
        self._at_end.append(callback)

    def request(
        self,
        to: str | int | Member,
        service: str,
        value: Any,
        timeout_s: float | None = None,
        *,
        asked: str = "",
    ) -> Future[Any]:
        """Have ``to`` run a service with ``value``, at most once, and return a future of what it returns.

        Args:
            to: the worker; a ``Member`` is that incarnation only. It may be this process itself.
            service: the service's name.
            value: any value that ``encoding.py`` can encode. Tensors in it are sent beside it.
            timeout_s: until the answer; the agent's default if None; infinity for no limit.
            asked: the call in words, for errors; the service's name by default.

        The future ends with the handler's exception (its own type where it can be, with the remote traceback as its
        cause), ``CallTimeout``, ``WorkerLost``, or ``ClosedError``.

        Raises:
            RankError: there has been no such worker.
            EncodingError: the value cannot be sent.
        """
        self._require_open()
        with in_transit.sending() as kept:
            head, buffers = encode(value)
        return self.request_encoded(to, service, head, buffers, timeout_s, asked=asked, kept=kept)

    def request_encoded(
        self,
        to: str | int | Member,
        service: str,
        head: bytes | memoryview,
        buffers: list[memoryview],
        timeout_s: float | None = None,
        *,
        asked: str = "",
        kept: Sequence[Any] = (),
    ) -> Future[Any]:
        """:meth:`request` with a value that has been encoded, as for many workers; ``kept``: see ``in_transit.py``."""
        self._require_open()
        member = self.member(to)
        allowed = self.timeout_s if timeout_s is None else timeout_s
        number = self._calls.number()
        until = time.monotonic() + allowed
        future: Future[Any] = Future()
        call = Call(number, member, asked or service, until, allowed, future, capture())
        future._help_on = partial(self._help, call)
        future._cancel = partial(self._cancel, call)
        if kept:
            future.companions = kept
        self._calls.add(call)
        try:
            link = call.link = self._link_to(member, until)
            if not self._room_at(member).acquire(timeout=max(0.0, min(allowed, threading.TIMEOUT_MAX))):
                raise TimeoutError
            future.add_done_callback(partial(self._make_room, member))
            link.send(Message(Kind.REQUEST, number, service, head, buffers), until - time.monotonic())
        except (LinkEnded, OSError, NoProof, WrongKey, PassedOn) as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= until:
                if self._calls.take(number) is not None:
                    self._give_up(call)
            elif self._calls.take(number) is not None:
                future.set_exception(self._lost(call, str(error) or type(error).__name__))
        except BaseException:
            self._calls.take(number)
            future.cancel()
            raise
        if call.link is not None and call.link not in self._peers and self._calls.take(number) is not None:
            future.set_exception(self._lost(call, "the way to it ended"))  # it ended before the link stood in the call
        return future

    def notify(self, to: str | int | Member, service: str, value: Any) -> None:
        """Like ``request``, but nothing comes back, and nobody learns of an error.

        Notices and requests from one thread to one worker begin in the order in which they were sent, if all are small
        and their services are quick.
        """
        self._require_open()
        member = self.member(to)
        head, buffers = encode(value)
        with contextlib.suppress(LinkEnded, OSError, NoProof, WrongKey, PassedOn):
            until = time.monotonic() + self.timeout_s
            self._link_to(member, until).send(Message(Kind.NOTICE, 0, service, head, buffers), self.timeout_s)

    def close(self) -> None:
        """Leave: tell the others, end all links and threads. Calls under way end with ``ClosedError``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._peers)
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the store may be gone with its host
            self._members.leave(self.me, "it has left")
        for link in links:
            link.close()
        self._network.stop()
        self._calls.close()
        self._handlers.close()
        for call in self._calls.take_all():
            call.future.set_exception(ClosedError(f"rpc.shutdown() ended a call: {call.describe()}"))
        for callback in self._at_end:
            callback()

    # Links

    def _link_to(self, member: Member, until: float) -> Link:
        link = self._links.get(member.incarnation)
        if link is not None:
            return link
        with self._lock:
            dialling = self._dialling.setdefault(member.incarnation, threading.Lock())
        if not dialling.acquire(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
            raise TimeoutError
        try:
            link = self._links.get(member.incarnation)
            if link is not None:
                return link
            if why := self._members.gone(member):
                raise LinkEnded(why)
            return self._dial(member, until)
        finally:
            dialling.release()

    def _dial(self, member: Member, until: float) -> Link:
        patience = max(0.05, min(DIAL_S, until - time.monotonic()))
        claim = json.dumps({"me": asdict(self.me), "to": member.incarnation}).encode()
        try:
            line, verdict = self._network.dial(member.address, member.port, claim, patience)
        except ConnectionRefusedError as error:
            self._found_gone(member, "nothing listens at its address any more")
            raise LinkEnded("nothing listens at its address any more") from error
        refusal = json.loads(verdict).get("refused", "")
        if refusal:
            line.close()
            raise LinkEnded(refusal)
        link = SocketLink(line.sock, line.session, self, forget=self._network.forget)
        return self._enter(member, link)

    def _welcome(self, arrival: Arrival) -> None:
        """A process that knows the key has come. It is on the network's thread."""
        try:
            claim = json.loads(arrival.proven.claim)
            if "ping" in claim:
                arrival.answer(json.dumps({"incarnation": self.me.incarnation}).encode())
                arrival.sock.close()
                return
            peer, to = Member(**claim["me"]), claim["to"]
        except (ValueError, TypeError, KeyError, AttributeError):
            arrival.sock.close()
            return
        if self._closed or to != self.me.incarnation:
            arrival.answer(json.dumps({"refused": f"another worker is at its address now: {self.me}"}).encode())
            arrival.sock.close()
            return
        link = SocketLink(arrival.sock, arrival.proven.session(), self, arrival.rest, self._network.forget)
        arrival.answer(b"{}")
        self._enter(peer, link)

    def _enter(self, peer: Member, link: SocketLink) -> Link:
        with self._lock:
            self._peers[link] = peer
            chosen = self._links.setdefault(peer.incarnation, link)  # both may have dialled at the same time
        self._network.add(link)
        return chosen

    def _is_there(self, member: Member) -> bool:
        try:
            line, verdict = self._network.dial(member.address, member.port, b'{"ping": 1}', 2.0)
        except (OSError, NoProof, WrongKey, PassedOn):
            return False
        line.close()
        return bool(json.loads(verdict).get("incarnation") == member.incarnation)

    def ended(self, link: Link, why: str) -> None:
        """See :class:`~phalanx.rpc.links.contract.Receiver`."""
        with self._lock:
            peer = self._peers.pop(link, None)
            if peer is not None and self._links.get(peer.incarnation) is link:
                del self._links[peer.incarnation]
        for call in self._calls.take_all(link=link):
            call.future.set_exception(self._lost(call, why))
        if peer is None or self._closed:
            return
        for (incarnation, _), given_up in list(self._serving.items()):
            if incarnation == peer.incarnation:
                given_up.set()
        for key in list(self._kept):
            if key[0] == peer.incarnation:
                self._kept.pop(key, None)
        self._handlers.run(self._tell_of, peer, why)

    def _tell_of(self, peer: Member, why: str) -> None:
        how = "left" if why == "it has left" else "lost"
        with contextlib.suppress(Exception):  # the store may be gone as well
            self._members.leave(peer, why)
        for watcher in list(self._watchers):
            try:
                watcher(peer, how)
            except Exception as error:
                tell(f"warning: what watches the workers failed for {peer}: {error!r}")

    def _found_gone(self, member: Member, why: str) -> None:
        self._handlers.run(self._tell_of, member, why)

    # The caller's side

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("a worker was used after rpc.shutdown()")
        if os.getpid() != self._pid:
            raise ClosedError.of_parent("this worker", os.getpid())

    def _room_at(self, member: Member) -> threading.Semaphore:
        room = self._room.get(member.incarnation)
        return room or self._room.setdefault(member.incarnation, threading.Semaphore(MOST_CALLS))

    def _make_room(self, member: Member, _: Future[Any]) -> None:
        self._room_at(member).release()

    def _help(self, call: Call, done: Callable[[], bool], timeout_s: float) -> None:
        if call.link is not None:
            call.link.wait(done, call.number, min(timeout_s, call.until - time.monotonic()))

    def _cancel(self, call: Call) -> None:
        if self._calls.take(call.number) is not None and call.link is not None:
            self._handlers.run(self._send_cancel, call)

    def _give_up(self, call: Call) -> None:
        call.future.set_exception(
            CallTimeout(
                f"{call.to} did not answer within {call.timeout_s:g} s: {call.describe()}. Is it slow, stopped, or "
                f"waiting for this worker? Give it more time with timeout_s=...",
                worker=call.to.name,
                asked=call.asked,
                timeout_s=call.timeout_s,
            )
        )
        if call.link is not None:
            self._handlers.run(self._send_cancel, call)

    def _send_cancel(self, call: Call) -> None:
        head, buffers = encode(call.number)
        with contextlib.suppress(LinkEnded, OSError):
            if call.link is not None:
                call.link.send(Message(Kind.NOTICE, 0, CANCEL, head, buffers), 1.0)

    def _lost(self, call: Call, why: str) -> WorkerLost:
        to = call.to
        return WorkerLost(
            f"{to} is gone ({why}) while this worker waited for {call.describe()}. Look at that worker's own output "
            f"for the cause",
            worker=to.name,
            rank=to.rank,
            pid=to.pid,
            host=to.host,
            incarnation=to.incarnation,
            asked=call.asked,
            elapsed_s=time.monotonic() - call.began,
        )

    # The callee's side

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        """See :class:`~phalanx.rpc.links.contract.Receiver`."""
        if message.kind in (Kind.ANSWER, Kind.FAILURE):
            self._take_answer(link, message)
            return
        peer = self._peers.get(link)
        service = self._services.get(message.service)
        if peer is None:
            return  # it has gone
        if message.kind is Kind.REQUEST:
            self._serving[peer.incarnation, message.call] = threading.Event()
        if may_block or (service is not None and service.quick):
            self._serve(link, peer, service, message)
        else:
            self._handlers.run(self._serve, link, peer, service, message)

    def _take_answer(self, link: Link, message: Message) -> None:
        call = self._calls.take(message.call)
        if call is None:  # the caller has given up
            if message.service == RECEIPT:
                self._send_receipt(link, message.call)
            return
        try:
            with in_transit.receiving() as to_settle:
                value = decode(message.head, message.buffers)
        except Exception as error:
            call.future.set_exception(error)
            return
        if message.service == RECEIPT:
            self._handlers.run(self._settle_answer, link, call, value, to_settle)
        elif message.kind is Kind.FAILURE:
            call.future.set_exception(value.rebuilt(call.to))
        else:
            call.future.set_result(value)

    def _settle_answer(self, link: Link, call: Call, value: Any, to_settle: list[Callable[[], None]]) -> None:
        for settle in to_settle:
            settle()
        self._send_receipt(link, call.number)
        call.future.set_result(value)

    def _send_receipt(self, link: Link, number: int) -> None:
        head, buffers = encode(number)
        with contextlib.suppress(LinkEnded, OSError):
            link.send(Message(Kind.NOTICE, 0, RECEIPT, head, buffers), self.timeout_s)

    def _on_receipt(self, incoming: Incoming, number: int) -> None:
        self._kept.pop((incoming.peer.incarnation, number), None)

    def _serve(self, link: Link, peer: Member, service: _Service | None, message: Message) -> None:
        given_up = self._serving.get((peer.incarnation, message.call))
        asks = message.kind is Kind.REQUEST
        try:
            if given_up is not None and given_up.is_set():
                return
            if service is None:
                raise PhalanxError(f"{self.me} serves nothing called {message.service!r}")
            incoming = Incoming(peer, given_up.is_set if given_up is not None else bool)
            with in_transit.receiving() as to_settle:
                value = decode(message.head, message.buffers)
            for settle in to_settle:
                settle()
            result = service.handler(incoming, value)
        except BaseException as error:
            if asks:
                self._answer(link, peer, message.call, error, failed=True)
            return
        finally:
            message.head, message.buffers = b"", ()
        if not asks:
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._answer_later, link, peer, message.call))
        else:
            self._answer(link, peer, message.call, result)

    def _answer_later(self, link: Link, peer: Member, number: int, future: Future[Any]) -> None:
        try:
            self._answer(link, peer, number, future.wait(0))
        except BaseException as error:
            self._answer(link, peer, number, error, failed=True)

    def _answer(self, link: Link, peer: Member, number: int, value: Any, *, failed: bool = False) -> None:
        given_up = self._serving.pop((peer.incarnation, number), None)
        if given_up is None or given_up.is_set():
            return
        kept: list[Any] = []
        try:
            with in_transit.sending() as kept:
                head, buffers = encode(Failure.of(value) if failed else value)
        except Exception as error:
            failed = True
            head, buffers = encode(Failure.of(error))
        kind = Kind.FAILURE if failed else Kind.ANSWER
        if kept:
            self._kept[peer.incarnation, number] = kept
        with contextlib.suppress(LinkEnded):
            try:
                link.send(Message(kind, number, RECEIPT if kept else "", head, buffers), math.inf)
            except TimeoutError as error:
                tell(f"warning: {peer} takes no answers: {error}")

    def _on_cancel(self, incoming: Incoming, number: int) -> None:
        given_up = self._serving.get((incoming.peer.incarnation, number))
        if given_up is not None:
            given_up.set()
