"""The callee's side: what other workers may ask for, and the requests of theirs that are under way here."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.diagnosis.call_site import running_at
from phalanx.errors import PhalanxError
from phalanx.rpc.backlog import Backlog
from phalanx.rpc.codec import FACTS, NUMBER, PICKLED, Codec, Kept, receiving, sending
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.links.contract import Link, LinkEnded
from phalanx.rpc.members import Member
from phalanx.rpc.message import Kind, Message
from phalanx.words import tell

__all__ = ["CANCEL", "NOBODY", "PROGRESS", "RECEIPT", "Incoming", "Serving"]

# The services of the agent itself. The second is also the mark of an answer whose receiver is to say that it has it;
# the third says how far calls have come (inquiry.py).
CANCEL, RECEIPT, PROGRESS = "cancel", "receipt", "progress"
_MOST_EARLY = 1024
NOBODY, _LATER = 0, -1  # in the place of a thread


class Incoming:
    """What a service's handler learns about a request beside its value.

    Attributes:
        peer: who asks.
        given_up: whether the caller has given the call up since.
        thread: which thread runs the handler; ``NOBODY`` before it has begun, ``_LATER`` if the answer comes later.
        began: when that thread took it.
        message: what has come, if it is a request.
    """

    __slots__ = ("began", "given_up", "message", "peer", "thread")

    def __init__(self, peer: Member) -> None:
        self.peer = peer
        self.given_up = False
        self.thread = NOBODY
        self.began = 0.0
        self.message: Message | None = None

    def cancelled(self) -> bool:
        """Whether the caller has given the call up since."""
        return self.given_up

    def give_up(self) -> None:
        """Nobody waits for the answer any more. What has not begun gives its memory back, though it keeps its turn."""
        self.given_up = True
        if self.thread == NOBODY and self.message is not None:
            self.message.head, self.message.buffers = b"", ()


@dataclass(eq=False, slots=True)
class _Service:
    handler: Callable[[Incoming, Any], Any]
    quick: bool
    codec: Codec


class Serving:
    """The services of one agent.

    Args:
        handlers: the threads on which they run.
        typed_only: refuse requests that would be unpickled.
    """

    def __init__(self, handlers: Handlers, *, typed_only: bool = False) -> None:
        self._handlers = handlers
        self._typed_only = typed_only
        self._services: dict[str, _Service] = {}
        self._backlog = Backlog()
        self._began_at = 0.0  # when the newest request was begun
        self._under_way: dict[tuple[int, int], Incoming] = {}  # by caller and number, in the order in which they came
        # Calls that were given up before they had come, oldest first: a cancellation overtakes a large request.
        self._given_up_early: dict[tuple[int, int], None] = {}
        self._kept: dict[tuple[int, int], list[Kept]] = {}  # what the receivers of answers rely on
        self.add(CANCEL, self._on_cancel, quick=True, codec=NUMBER)
        self.add(RECEIPT, self._on_receipt, quick=True, codec=NUMBER)
        self.add(PROGRESS, self._on_progress, quick=True, codec=FACTS)

    def add(
        self, service: str, handler: Callable[[Incoming, Any], Any], *, quick: bool, codec: Codec = PICKLED
    ) -> None:
        """See :meth:`phalanx.rpc.agent.Agent.serve`."""
        self._services[service] = _Service(handler, quick, codec)

    def take(self, link: Link, peer: Member, message: Message, *, may_block: bool) -> None:
        """Run what a message asks for: on this thread if that is allowed, else soon on another."""
        service = self._services.get(message.service)
        incoming = Incoming(peer)
        if message.kind is Kind.REQUEST:
            incoming.message = message
            key = peer.incarnation, message.call
            self._under_way[key] = incoming
            if self._given_up_early and self._given_up_early.pop(key, False) is None:
                incoming.give_up()
        if service is not None and service.quick:
            self._run(link, incoming, service, message)
            return
        if self._backlog.full:
            begin = partial(self._handlers.run, self._run, link, incoming, service, message)
            if self._backlog.hold(peer.incarnation, begin):
                return
        if may_block:
            self._run(link, incoming, service, message)
        else:
            self._handlers.run(self._run, link, incoming, service, message)

    def active_at(self) -> float:
        """When something was last done here for another worker, on the monotonic clock."""
        return time.monotonic() if self._under_way else self._began_at

    def forget(self, peer: Member) -> None:
        """A worker is gone: nobody waits for what it asked, and it relies on nothing."""
        for (caller, _), incoming in list(self._under_way.items()):
            if caller == peer.incarnation:
                incoming.give_up()
        for noted in (self._kept, self._given_up_early):
            for key in list(noted):
                if key[0] == peer.incarnation:
                    noted.pop(key, None)
        self._backlog.forget(peer.incarnation)

    def _run(self, link: Link, incoming: Incoming, service: _Service | None, message: Message) -> None:
        peer = incoming.peer
        asks = message.kind is Kind.REQUEST
        codec = service.codec if service is not None else PICKLED
        if self._typed_only and codec.unpickles:
            codec = NUMBER  # for what is refused, without pickle
        try:
            if incoming.given_up:
                self._under_way.pop((peer.incarnation, message.call), None)
                self._answer_nobody(link, message.call)
                return
            self._began_at = incoming.began = time.monotonic()
            incoming.thread = threading.get_ident()
            if service is None:
                raise PhalanxError(f"this worker serves nothing called {message.service!r}")
            if self._typed_only and service.codec.unpickles:
                raise PhalanxError(
                    f"this worker unpickles nothing (rpc.init(typed_only=True)), so it refuses "
                    f"{message.service!r}. Its typed services can be called: rpc.service(to, name, Interface)"
                )
            value, to_settle = receiving(codec.decode, message.head, message.buffers)
            for settle in to_settle:
                settle()
            result = service.handler(incoming, value)
        except BaseException as error:
            if asks:
                self._answer(link, peer, message.call, codec, error, failed=True)
            return
        finally:
            message.head, message.buffers = b"", ()
        if not asks:
            return
        if isinstance(result, Future):
            incoming.thread = _LATER
            result.add_done_callback(partial(self._answer_later, link, peer, message.call, codec))
        else:
            self._answer(link, peer, message.call, codec, result)

    def _answer_later(self, link: Link, peer: Member, number: int, codec: Codec, future: Future[Any]) -> None:
        try:
            self._answer(link, peer, number, codec, future.wait(0))
        except BaseException as error:
            self._answer(link, peer, number, codec, error, failed=True)

    def _answer(self, link: Link, peer: Member, number: int, codec: Codec, value: Any, *, failed: bool = False) -> None:
        incoming = self._under_way.pop((peer.incarnation, number), None)
        if incoming is None:
            return
        if incoming.given_up:
            self._answer_nobody(link, number)
            return
        kept: list[Kept] = []
        head: bytes
        buffers: list[memoryview] = []
        try:
            if failed:
                head, kept = sending(_failure, value, codec)
            else:
                (head, buffers), kept = sending(codec.encode, value)
        except Exception as error:
            failed = True
            head, buffers = _failure(error, codec), []
        kind = Kind.FAILURE if failed else Kind.ANSWER
        if kept:
            self._kept[peer.incarnation, number] = kept
        answer = Message(kind, number, RECEIPT if kept else "", head, buffers)
        try:
            if buffers and answer.nbytes > link.SMALL_BYTES:
                self._send_large(link, peer, answer)
            else:
                link.send(answer, math.inf)
        except Exception as error:
            self._kept.pop((peer.incarnation, number), None)  # there will be no receipt
            if isinstance(error, LinkEnded):
                return
            if failed or isinstance(error, TimeoutError):
                tell(f"warning: {peer} takes no answers: {error}")
                return
            self._under_way[peer.incarnation, number] = incoming
            self._answer(link, peer, number, codec, error, failed=True)  # it cannot be sent, but that can

    def _send_large(self, link: Link, peer: Member, answer: Message) -> None:
        nbytes = answer.nbytes
        self._backlog.add(peer.incarnation, nbytes)
        try:
            link.send(answer, math.inf)
        finally:
            self._backlog.remove(peer.incarnation, nbytes)

    def _answer_nobody(self, link: Link, number: int) -> None:
        """Say of a call that was given up that nothing which came with it is relied on any more."""
        with contextlib.suppress(LinkEnded, OSError):
            link.send(Message(Kind.FAILURE, number, "", b"", ()), math.inf)

    def _on_cancel(self, incoming: Incoming, number: int) -> None:
        key = incoming.peer.incarnation, number
        early = self._given_up_early
        early[key] = None  # first: the call may come at this moment
        if (given_up := self._under_way.get(key)) is not None:
            early.pop(key, None)
            given_up.give_up()
        elif len(early) > _MOST_EARLY:  # those that stay had been answered
            early.pop(next(iter(list(early))), None)

    def _on_progress(self, incoming: Incoming, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """How far calls of a worker have come; what is not under way here has an empty entry.

        There is no call 0: its entry says where this process's main thread is.
        """
        found: dict[int, dict[str, Any]] = {}
        waiting = running = 0
        for (caller, number), request in list(self._under_way.items()):
            thread = request.thread
            if caller == incoming.peer.incarnation and number in numbers:
                found[number] = {"for_s": time.monotonic() - request.began, "at": _at(thread)}
                if thread == NOBODY:
                    found[number] = {"behind": waiting}
            waiting += thread == NOBODY
            running += thread != NOBODY
        for entry in found.values():
            if "behind" in entry:
                entry["running"] = running - 1  # but for this request itself
        if 0 in numbers:
            found[0] = {"main": _at(threading.main_thread().ident or 0)}
        return [found.get(number, {}) for number in numbers]

    def _on_receipt(self, incoming: Incoming, receipt: int) -> None:
        number, used = divmod(receipt, 2)
        for _, taken in self._kept.pop((incoming.peer.incarnation, number), ()):
            if used and taken is not None:
                taken()


def _failure(error: BaseException, codec: Codec) -> bytes:
    return Failure.of(error, with_pickle=codec.unpickles).encode()


def _at(thread: int) -> str:
    """Where a thread of this process is in the user's program; empty if it is nowhere there."""
    frame = sys._current_frames().get(thread)
    return running_at(frame) if frame is not None else ""
