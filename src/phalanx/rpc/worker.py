"""This process as a worker: the links to the others, the calls under way, and the services that others may ask for.

Everything above (verbs, remote objects, distributed autograd, torch's names) is written above all with: ``request``,
``notify``, ``serve`` and the ``directory``. A call is made at most once: it is sent on one link, and if that link ends
before the answer, the caller is told, and the call is not sent again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from phalanx.diagnosis.call_site import capture
from phalanx.diagnosis.stacks import Mark
from phalanx.errors import CallTimeout, ClosedError, EncodingError, WorkerLost
from phalanx.rpc.codec import NUMBER, PICKLED, Codec, receiving, sending
from phalanx.rpc.connections import Connections, EncryptionMismatch, Unreached
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.inquiry import LONG_S, Finding, Inquiries, place_name, tell_of_long
from phalanx.rpc.links.contract import Kind, Link, LinkEnded, Message
from phalanx.rpc.members import LEFT, Departure, Member, Members, shared_key
from phalanx.rpc.peer import Call, Calls, Peer
from phalanx.rpc.serving import CANCEL, RECEIPT, Incoming, Serving
from phalanx.system.threads import within
from phalanx.wire.key import Key
from phalanx.words import tell

__all__ = ["Incoming", "Member", "Worker"]

LEAVE_S = 5.0  # for the store, when this worker leaves


class Worker:
    """This process as a worker. One at a time, from ``rpc.init()`` to ``rpc.shutdown()``.

    Args:
        store: the job's store, with a prefix that no other workers use.
        name: this worker's name, unique among the living workers.
        rank: its rank, or -1.
        key: the job's key.
        address: the address of this host at which the others reach it.
        timeout_s: how long a call may take by default, in seconds.
        equip: register services; they are called before other workers can find this one.
        typed_only: unpickle nothing, and refuse what would need it.
        long_s: after how long the user is told of a call that is still under way, in seconds.
        encrypt: encrypt what goes over TCP.

    Attributes:
        me: this worker.
        directory: who there is.
        inquiries: why others do not answer.
        active_at: gives when something was last done here for another worker.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        key: Key,
        address: str,
        timeout_s: float = 60.0,
        equip: Sequence[Callable[[Worker], None]] = (),
        *,
        typed_only: bool = False,
        long_s: float = LONG_S,
        encrypt: bool = False,
    ) -> None:
        self.timeout_s = timeout_s
        self._typed_only = typed_only
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._at_end: dict[Callable[[], None], None] = {}
        self._watchers: dict[Callable[[Member, str], None], None] = {}
        self._closed = False
        self._handlers = Handlers()
        self.directory = Members(store)
        try:
            own_key = shared_key(store, key)
            self._connections = Connections(self.directory, address, own_key, self, self._found_gone, encrypt=encrypt)
        except BaseException:
            self._handlers.close()
            self.directory.close()
            raise
        self._calls = Calls(
            self._connections.peers,
            self._connections.wake,
            self.run,
            self._on_late,
            self._tell_of_end,
            self._on_long,
            long_s,
        )
        self._serving = Serving(self._handlers, self._connections.peers, typed_only=typed_only)
        self.active_at = self._serving.active_at
        self.inquiries = Inquiries(self._connections, self.request)
        self._mark: Mark | None = None
        try:
            self.me = self.directory.new(name, rank, self._pid, address, self._connections.port)
            for register in equip:
                register(self)
            self._mark = Mark(place_name(self.me))
            self._connections.start(self.me, self._calls.attend)
            self.directory.join(self.me, self._connections.is_there)
        except BaseException:
            self.close()
            raise

    def serve(
        self, service: str, handler: Callable[[Incoming, Any], Any], *, quick: bool = False, codec: Codec = PICKLED
    ) -> None:
        """Let other workers ask for a service.

        Args:
            service: its name.
            handler: gets the request and its value, on one of this worker's threads. What it returns is the answer; if
                it is a :class:`~phalanx.rpc.future.Future`, its value will be. What it raises goes to the caller.
            quick: the handler never waits and is short, so it may run on a thread that receives messages.
            codec: how requests are read and answers are written.
        """
        self._serving.add(service, handler, quick=quick, codec=codec)

    def on_change(self, callback: Callable[[Member, str], None]) -> Callable[[], object]:
        """Have ``callback`` called with a member and ``left`` or ``lost``, when the link to it ends.

        Returns:
            Ends that.
        """
        self._watchers[callback] = None
        return lambda: self._watchers.pop(callback, None)

    def reach(self, member: Member, patience_s: float) -> Departure | None:
        """Make a link to a worker, so that its end is noticed. Return how it went; None if it is there or not known."""
        peer = self._connections.peer(member)
        try:
            self._connections.link_to(peer, time.monotonic() + patience_s)
        except Unreached:
            self._connections.drop(peer)
            return self.directory.gone(member)
        return None

    def on_close(self, callback: Callable[[], None]) -> Callable[[], object]:
        """Have ``callback`` called when this worker stops being one, after its last call.

        Returns:
            Ends that.
        """
        self._at_end[callback] = None
        return lambda: self._at_end.pop(callback, None)

    def request(
        self,
        to: str | int | Member,
        service: str,
        value: Any,
        timeout_s: float | None = None,
        *,
        asked: str = "",
        made: Callable[[Any], Any] | None = None,
        failed: Callable[[BaseException], BaseException] | None = None,
        codec: Codec = PICKLED,
    ) -> Future[Any]:
        """Have ``to`` run a service with ``value``, at most once, and return a future of what it returns.

        Args:
            to: the worker; a ``Member`` is that incarnation only. It may be this process itself.
            service: the service's name.
            value: any value that the codec can encode. Tensors in it are sent beside it.
            timeout_s: until the answer; this worker's default if None; infinity for no limit.
            asked: the call in words, for errors; the service's name by default.
            made: makes the future's value of the answer.
            failed: makes the future's error of the one that ended the call.
            codec: how the value is written and the answer is read; by pickle unless it says otherwise.

        The future ends with the handler's exception (its own type where it can be, with the remote traceback as its
        cause), ``CallTimeout``, ``WorkerLost``, or ``ClosedError``.

        Raises:
            RankError: there has been no such worker.
            EncodingError: the value cannot be sent.
        """
        self._require_open()
        if self._typed_only and codec.unpickles:
            raise EncodingError(
                f"this worker unpickles nothing (rpc.init(typed_only=True)), so it cannot ask for {asked or service}, "
                f"whose answer is a pickle. It can call typed services: rpc.service(to, name, Interface)"
            )
        (head, buffers), kept = sending(codec.encode, value)
        peer = self._connections.peer(self.directory.find(to))
        allowed = self.timeout_s if timeout_s is None else timeout_s
        call = Call(self._calls, peer, asked or service, allowed, capture(), made, failed, codec, kept)
        number, until = call.number, call.until
        try:
            self._calls.add(call)
            if self._closed:  # since the first look, so close() may have ended all calls before this one
                raise ClosedError("rpc.shutdown() was called meanwhile")
            link = self._connections.link_to(peer, until)
            nbytes = sum(buffer.nbytes for buffer in buffers) if buffers else 0
            self._calls.wait_for_room(call, nbytes)
            if not call.is_under_way():  # its time was over meanwhile, or it was given up, or this worker was closed
                peer.given_up.pop(number, None)
                return call
            link.send(Message(Kind.REQUEST, number, service, head, buffers), until - time.monotonic())
        except Unreached as error:
            taken = self._calls.take(peer, number)
            peer.given_up.pop(number, None)  # nobody has received it, also if it was given up meanwhile
            self._connections.drop(peer)
            if taken is not None and isinstance(error, TimeoutError) and time.monotonic() >= until:
                self._on_late([call])
            elif taken is not None:
                lost = isinstance(error, EncryptionMismatch) and error
                call.set_exception(lost or self._lost(call, str(error) or type(error).__name__))
        except Exception:
            self._calls.take(peer, number)  # nobody has received it
            call.cancel()
            raise
        except BaseException:  # a signal, before or after it was sent
            call.cancel()
            raise
        return call

    def overdue(self, future: Future[Any], timeout_s: float) -> CallTimeout | None:
        """Make the error for a call that goes on, though this process has waited long enough; None if it is over.

        It asks why, which takes a second or two at most.
        """
        if not isinstance(future, Call) or not future.is_under_way():
            return None
        return self.inquiries.overdue(future, timeout_s)

    def notify(self, to: str | int | Member, service: str, value: Any) -> None:
        """Like ``request``, but nothing comes back, and nobody learns of an error.

        Notices from one thread to one worker begin in the order in which they were sent, if all are small and their
        services are quick. A request may begin before a notice that was sent earlier, or after a later one.
        """
        self._require_open()
        peer = self._connections.peer(self.directory.find(to))
        head, buffers = PICKLED.encode(value)
        try:
            link = self._connections.link_to(peer, time.monotonic() + self.timeout_s)
            link.send(Message(Kind.NOTICE, 0, service, head, buffers), self.timeout_s)
        except Unreached:
            self._connections.drop(peer)

    def run(self, task: Callable[..., None], *arguments: Any) -> None:
        """Call ``task(*arguments)`` soon on a thread that may block; at once if this worker has been closed."""
        if not self._handlers.run(task, *arguments):
            task(*arguments)

    def run_later(self, task: Callable[..., None], *arguments: Any) -> None:
        """:meth:`run` for finalizers, which garbage collection calls at any instruction, whatever the thread holds."""
        self._handlers.run_later(task, *arguments)

    def close(self) -> None:
        """Leave: tell the others, end all links and threads. Calls under way end with ``ClosedError``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the store may be gone with its host, or never answer
            within(LEAVE_S, lambda: self.directory.leave(self.me, LEFT))
        peers = self._connections.peers()
        self._connections.close()
        self._handlers.close()
        self.directory.close()
        for peer in {*peers, *self._connections.peers()}:
            for call in self._calls.take_all(peer):
                call.set_exception(self._ended_here(call))
        self.inquiries.close()
        if self._mark is not None:
            self._mark.close()
        for callback in list(self._at_end):
            try:
                callback()
            except Exception as error:
                tell(f"warning: a part of RPC could not be ended: {error!r}")

    # The caller's side

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("a worker was used after rpc.shutdown()")
        if os.getpid() != self._pid:
            raise ClosedError.of_parent("this worker", os.getpid())

    def _tell_of_end(self, call: Call) -> None:
        self._handlers.run(self._notice, call.peer, CANCEL, call.number, 1.0)

    def _on_late(self, calls: list[Call]) -> None:
        self.inquiries.begin(calls, self._give_up)

    def _give_up(self, calls: list[Call], findings: list[Finding]) -> None:
        for call, finding in zip(calls, findings, strict=True):
            call.set_exception(call.late(call.timeout_s, finding.text, finding.cause, finding.at))
            self._tell_of_end(call)

    def _on_long(self, calls: list[Call]) -> None:
        self.inquiries.begin(calls, tell_of_long)

    def _notice(self, peer: Peer, service: str, number: int, timeout_s: float) -> None:
        """Say a number about a call, if the peer is still there."""
        link = peer.link
        if link is not None:
            head, buffers = NUMBER.encode(number)
            with contextlib.suppress(LinkEnded, OSError):
                link.send(Message(Kind.NOTICE, 0, service, head, buffers), timeout_s)

    def _lost(self, call: Call, why: str) -> WorkerLost | ClosedError:
        return self._ended_here(call) if self._closed else call.lost(why)

    def _ended_here(self, call: Call) -> ClosedError:
        return ClosedError(f"rpc.shutdown() ended a call: {call.describe()}")

    # What links call

    def deliver(self, link: Link, message: Message, *, may_block: bool) -> None:
        """See :class:`~phalanx.rpc.links.contract.Receiver`."""
        peer = link.peer
        if peer is None:  # it has gone
            return
        if message.kind in (Kind.ANSWER, Kind.FAILURE):
            self._take_answer(peer, message)
        else:
            self._serving.take(peer, message, may_block=may_block)

    def ended(self, link: Link, why: str, *, left: bool = False) -> None:
        """See :class:`~phalanx.rpc.links.contract.Receiver`."""
        peer = self._connections.ended(link)
        if peer is None or self._closed:
            return  # close() ends all calls
        departure = Departure(left, why)
        self.directory.note_gone(peer.member, departure)
        for call in self._calls.take_all(peer):
            call.set_exception(self._lost(call, why))
        self._serving.forget(peer)
        self._handlers.run(self._tell_watchers, peer.member, departure)
        if not left:  # else it has said so itself
            self._handlers.run(self._tell_store, peer.member, departure)

    def _found_gone(self, member: Member) -> None:
        """Nobody listens at a worker's address; called by whoever has dialled it."""
        departure = self.directory.gone(member)  # it may have left, and said so
        if departure is None:
            departure = Departure(False, "nothing listens at its address any more")
            self.directory.note_gone(member, departure)
            self._handlers.run(self._tell_store, member, departure)
        self._handlers.run(self._tell_watchers, member, departure)

    def _tell_store(self, member: Member, departure: Departure) -> None:
        with contextlib.suppress(Exception):  # the store may be gone as well
            self.directory.leave(member, departure)

    def _tell_watchers(self, member: Member, departure: Departure) -> None:
        for watcher in list(self._watchers):
            try:
                watcher(member, "left" if departure.left else "lost")
            except Exception as error:
                tell(f"warning: what watches the workers failed for {member}: {error!r}")

    def _take_answer(self, peer: Peer, message: Message) -> None:
        call = self._calls.take(peer, message.call)
        wants_receipt, used = message.service == RECEIPT, False
        if call is None:  # the caller has given up
            peer.given_up.pop(message.call, None)
        else:
            try:
                value, to_settle = receiving(call.decode, message)
            except Exception as error:
                call.set_exception(error)
            else:
                if wants_receipt and to_settle:
                    self.run(self._settle_answer, call, message.kind, value, to_settle)
                    return
                call.complete(message.kind, value)
                used = True
        if wants_receipt:
            self._handlers.run(self._send_receipt, peer, message.call, used)

    def _settle_answer(self, call: Call, kind: Kind, value: Any, to_settle: list[Callable[[], None]]) -> None:
        try:
            for settle in to_settle:
                settle()
            self._send_receipt(call.peer, call.number, True)
        finally:
            call.complete(kind, value)

    def _send_receipt(self, peer: Peer, number: int, used: bool) -> None:
        self._notice(peer, RECEIPT, 2 * number + used, self.timeout_s)
