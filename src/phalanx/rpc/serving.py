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
from phalanx.rpc.codec import FACTS, NUMBER, PICKLED, Codec, Kept, receiving, sending
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.handlers import Handlers
from phalanx.rpc.links.contract import Kind, LinkEnded, Message
from phalanx.rpc.members import Member
from phalanx.rpc.peer import Peer
from phalanx.words import tell

__all__ = ["CANCEL", "NOBODY", "PROGRESS", "RECEIPT", "Incoming", "Serving"]

# The services of this worker itself. The second is also the mark of an answer whose receiver is to say that it has it;
# the third says how far calls have come (inquiry.py).
CANCEL, RECEIPT, PROGRESS = "cancel", "receipt", "progress"
NOBODY, _LATER = 0, -1  # in the place of a thread


class Incoming:
    """A request, as its handler sees it beside its value.

    Attributes:
        peer: who asks.
        caller: the same, with all that goes on with it.
        given_up: whether the caller has given the call up since.
        thread: which thread runs the handler; ``NOBODY`` before it has begun, ``_LATER`` if the answer comes later.
        came, began: when it came, and when that thread took it.
        message: what has come, if it is a request.
    """

    __slots__ = ("began", "caller", "came", "given_up", "message", "thread")

    def __init__(self, caller: Peer) -> None:
        self.caller = caller
        self.given_up = False
        self.thread = NOBODY
        self.came, self.began = time.monotonic(), 0.0
        self.message: Message | None = None

    @property
    def peer(self) -> Member:
        return self.caller.member

    def give_up(self) -> None:
        """Answer nobody. What has not begun gives its memory back, though it keeps its turn."""
        self.given_up = True
        if self.thread == NOBODY and self.message is not None:
            self.message.head, self.message.buffers = b"", ()


@dataclass(eq=False, slots=True)
class _Service:
    handler: Callable[[Incoming, Any], Any]
    quick: bool
    codec: Codec


class Serving:
    """The services of one worker.

    Args:
        handlers: the threads on which they run.
        peers: returns all peers.
        typed_only: refuse requests that would be unpickled.
    """

    def __init__(self, handlers: Handlers, peers: Callable[[], list[Peer]], *, typed_only: bool = False) -> None:
        self._handlers, self._peers = handlers, peers
        self._typed_only = typed_only
        self._services: dict[str, _Service] = {}
        self._began_at = 0.0  # when the newest request was begun
        self.add(CANCEL, self._on_cancel, quick=True, codec=NUMBER)
        self.add(RECEIPT, self._on_receipt, quick=True, codec=NUMBER)
        self.add(PROGRESS, self._on_progress, quick=True, codec=FACTS)

    def add(
        self, service: str, handler: Callable[[Incoming, Any], Any], *, quick: bool, codec: Codec = PICKLED
    ) -> None:
        """See :meth:`phalanx.rpc.worker.Worker.serve`."""
        self._services[service] = _Service(handler, quick, codec)

    def take(self, peer: Peer, message: Message, *, may_block: bool) -> None:
        """Run what a message asks for: on this thread if that is allowed, else soon on another."""
        service = self._services.get(message.service)
        incoming = Incoming(peer)
        if message.kind is Kind.REQUEST:
            incoming.message = message
            peer.requests[message.call] = incoming
        if may_block or (service is not None and service.quick):
            self._run(incoming, service, message)
        else:
            self._handlers.run(self._run, incoming, service, message)

    def active_at(self) -> float:
        """Return when something was last done here for another worker, on the monotonic clock."""
        return time.monotonic() if any(peer.requests for peer in self._peers()) else self._began_at

    def forget(self, peer: Peer) -> None:
        """Give up what a worker has asked for, which is gone and relies on nothing."""
        for incoming in list(peer.requests.values()):
            incoming.give_up()
        peer.kept.clear()

    def _run(self, incoming: Incoming, service: _Service | None, message: Message) -> None:
        peer = incoming.caller
        asks = message.kind is Kind.REQUEST
        codec = service.codec if service is not None else PICKLED
        if self._typed_only and codec.unpickles:
            codec = NUMBER  # for what is refused, without pickle
        try:
            if incoming.given_up:
                peer.requests.pop(message.call, None)
                self._answer_nobody(peer, message.call)
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
                self._answer(peer, message.call, codec, error, failed=True)
            return
        finally:
            message.head, message.buffers = b"", ()
        if not asks:
            return
        if isinstance(result, Future):
            incoming.thread = _LATER
            result.add_done_callback(partial(self._answer_later, peer, message.call, codec))
        else:
            self._answer(peer, message.call, codec, result)

    def _answer_later(self, peer: Peer, number: int, codec: Codec, future: Future[Any]) -> None:
        try:
            self._answer(peer, number, codec, future.wait(0))
        except BaseException as error:
            self._answer(peer, number, codec, error, failed=True)

    def _answer(self, peer: Peer, number: int, codec: Codec, value: Any, *, failed: bool = False) -> None:
        incoming, link = peer.requests.pop(number, None), peer.link
        if incoming is None or link is None:
            return
        if incoming.given_up:
            self._answer_nobody(peer, number)
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
            peer.kept[number] = kept
        answer = Message(kind, number, RECEIPT if kept else "", head, buffers)
        try:
            link.send(answer, math.inf)
        except Exception as error:
            peer.kept.pop(number, None)  # there will be no receipt
            if isinstance(error, LinkEnded):
                return
            if failed or isinstance(error, TimeoutError):
                tell(f"warning: {peer.member} takes no answers: {error}")
                return
            peer.requests[number] = incoming
            self._answer(peer, number, codec, error, failed=True)  # it cannot be sent, but that can

    def _answer_nobody(self, peer: Peer, number: int) -> None:
        """Say of a call that was given up that nothing which came with it is relied on any more."""
        link = peer.link
        if link is not None:
            with contextlib.suppress(LinkEnded, OSError):
                link.send(Message(Kind.FAILURE, number, "", b"", ()), math.inf)

    def _on_cancel(self, incoming: Incoming, number: int) -> None:
        if (given_up := incoming.caller.requests.get(number)) is not None:
            given_up.give_up()

    def _on_progress(self, incoming: Incoming, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Say how far calls of a worker have come; what is not under way here has an empty entry.

        There is no call 0: its entry says where this process's main thread is.
        """
        requests = [each for peer in self._peers() for each in list(peer.requests.values())]
        waiting = [each for each in requests if each.thread == NOBODY]
        found: list[dict[str, Any]] = []
        for number in numbers:
            request = incoming.caller.requests.get(number)
            if number == 0:
                found.append({"main": _at(threading.main_thread().ident or 0)})
            elif request is None:
                found.append({})
            elif request.thread != NOBODY:
                found.append({"for_s": time.monotonic() - request.began, "at": _at(request.thread)})
            else:
                before = [each for each in waiting if each.came < request.came]
                running = len(requests) - len(waiting) - 1  # but for this request itself
                found.append({"behind": len(before), "running": running})
        return found

    def _on_receipt(self, incoming: Incoming, receipt: int) -> None:
        number, used = divmod(receipt, 2)
        for _, taken in incoming.caller.kept.pop(number, ()):
            if used and taken is not None:
                taken()


def _failure(error: BaseException, codec: Codec) -> bytes:
    return Failure.of(error, with_pickle=codec.unpickles).encode()


def _at(thread: int) -> str:
    """Return where a thread of this process is in the user's program; empty if it is nowhere there."""
    frame = sys._current_frames().get(thread)
    return running_at(frame) if frame is not None else ""
