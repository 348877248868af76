"""Other workers as this one sees them: the link to each, the calls to it, and what it has asked for here."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.diagnosis.call_site import CallSite, shown, text_of
from phalanx.diagnosis.stacks import publish
from phalanx.errors import CallTimeout, ClosedError, WorkerLost
from phalanx.rpc.codec import Codec, Kept
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.links.contract import Kind, Link, Message
from phalanx.rpc.members import Member

if TYPE_CHECKING:
    from phalanx.rpc.serving import Incoming

__all__ = ["Call", "Calls", "Peer", "facts_of"]

_SEEN_S = 1.0  # after which the launcher knows of a call
# How many calls one worker may have under way at another, and how many bytes of arguments in those that are not small.
# A further call waits for an answer.
MOST_CALLS = 4096
MOST_BYTES = 1 << 30


@dataclass(eq=False, slots=True)
class Peer:
    """A worker, in one incarnation, and all that goes on with it. It is dropped as a whole when its link ends.

    ===============  ==============================  =================================================
    field            written by                      guard
    ===============  ==============================  =================================================
    ``link``         who dials, welcomes, or ends    lock of ``Connections``; None before and after
    ``calls``        callers, who takes answers      none: one operation of a dict each
    ``given_up``     callers, who takes answers      the same; what callees of calls given up rely on
    ``nbytes``       callers                         room of ``Calls``; arguments of calls under way
    ``requests``     who receives, who answers       none: one operation of a dict each
    ``kept``         who answers, who receives       the same; what receivers of answers rely on
    ===============  ==============================  =================================================
    """

    member: Member
    link: Link | None = None
    connecting: threading.Lock = field(default_factory=threading.Lock)  # held by who makes the link
    calls: dict[int, Call] = field(default_factory=dict)
    given_up: dict[int, Sequence[Kept]] = field(default_factory=dict)
    nbytes: int = 0
    requests: dict[int, Incoming] = field(default_factory=dict)
    kept: dict[int, list[Kept]] = field(default_factory=dict)


class Call(Future[Any]):
    """A request to a peer, and the future of its answer.

    Args:
        calls: all of them.
        peer: who is asked.
        asked: what, for people.
        timeout_s: after how long the caller gives up.
        site: where the program made the call.
        made: makes the future's value of the answer.
        failed: makes the future's error of the one that ended the call.
        codec: how the answer is read.
        kept: what the callee relies on until it answers; see ``codec.py``.

    Attributes:
        number: unique in this process.
        began, until: when the call was made, and when the caller gives up, by ``time.monotonic``.
        note_at: the time at which the user is told that it takes long.
        nbytes: of its arguments, as far as they count for the room of its worker.
        is_seen: the launcher knows of it, as of all that are under way for a second.
    """

    def __init__(
        self,
        calls: Calls,
        peer: Peer,
        asked: str,
        timeout_s: float,
        site: CallSite | None,
        made: Callable[[Any], Any] | None,
        failed: Callable[[BaseException], BaseException] | None,
        codec: Codec,
        kept: Sequence[Kept],
    ) -> None:
        super().__init__()
        self.calls, self.peer, self.asked, self.timeout_s, self.site = calls, peer, asked, timeout_s, site
        self._made, self._failed, self.codec, self.kept = made, failed, codec, kept
        self.number = calls.number()
        self.began = now = time.monotonic()
        self.until = now + timeout_s
        self.note_at = math.inf
        self.nbytes = 0
        self.is_seen = False

    @property
    def to(self) -> Member:
        """The worker that is asked."""
        return self.peer.member

    def is_under_way(self) -> bool:
        """Return whether nobody has completed it, or given it up."""
        return self.number in self.peer.calls

    def _help(self, timeout_s: float) -> None:
        if os.getpid() != self.calls.pid:
            raise ClosedError.of_parent("this call", os.getpid())
        under_way, number, link = self.peer.calls, self.number, self.peer.link
        if link is not None:  # when the answer has come, another thread may still settle what is in it
            link.wait(lambda: number not in under_way, number, min(timeout_s, self.until - time.monotonic()))

    def _run(self, task: Callable[..., None], *arguments: Any) -> None:
        self.calls.run(task, *arguments)

    def _tell_of_cancel(self) -> None:
        self.calls.cancel(self)

    def decode(self, message: Message) -> Any:
        """Read an answer: a value, or an exception."""
        if message.kind is Kind.FAILURE:
            return Failure.decode(message.head).rebuilt(self.to, unpickle=self.codec.unpickles)
        return self.codec.decode(message.head, message.buffers)

    def complete(self, kind: Kind, value: Any) -> None:
        """Complete it with what the answer was: a value, or an exception."""
        if kind is Kind.FAILURE:
            self.set_exception(value)
            return
        try:
            self.set_result(value if self._made is None else self._made(value))
        except Exception as error:
            self.set_exception(error)

    def _complete(self, value: Any, error: BaseException | None) -> bool:
        failed, self._made, self._failed = self._failed, None, None  # whoever keeps the future does not keep those
        return super()._complete(value, failed(error) if failed is not None and error is not None else error)

    def _name(self) -> str:
        where = shown(text_of(self.site))
        return f"{self.asked} ({where})" if where else self.asked

    def describe(self) -> str:
        """Describe the call for people: ``add (train.py:12), 3.1 s ago``."""
        return f"{self._name()}, {time.monotonic() - self.began:.1f} s ago"

    def waiting(self) -> str:
        """Say what a caller waits for: ``worker1 (rank 1, ...) in add (train.py:12)``."""
        return f"{self.to} in {self._name()}"

    def lost(self, why: str) -> WorkerLost:
        """Make the error for the end of the worker that is asked; ``why`` says how it was noticed."""
        facts = facts_of(self.to, self.asked, text_of(self.site))
        elapsed_s = time.monotonic() - self.began
        return WorkerLost.while_waiting(str(self.to), why, self.describe(), elapsed_s=elapsed_s, **facts)

    def late(self, timeout_s: float, why: str, cause: str, at: str) -> CallTimeout:
        """Make the error for a call whose time is over; see :class:`~phalanx.errors.CallTimeout`."""
        facts = facts_of(self.to, self.asked, text_of(self.site))
        return CallTimeout.not_answered(str(self.to), self.describe(), timeout_s, why, cause=cause, at=at, **facts)


def facts_of(worker: Member, asked: str, line: str) -> dict[str, Any]:
    """Return what the errors of calls know of a worker, what it was asked, and where."""
    return {
        "worker": worker.name,
        "rank": worker.rank,
        "pid": worker.pid,
        "host": worker.host,
        "incarnation": worker.incarnation,
        "asked": asked,
        "line": line,
    }


class Calls:
    """The calls to all peers: room for them, and the end of those whose time is over.

    Args:
        peers: returns all peers.
        wake: has the thread that calls :meth:`attend` do so soon.
        run: calls a function with arguments on a thread that may block.
        late: is called with those whose time is over, which are no longer under way.
        cancelled: is called with each that the caller has given up, which is no longer under way either.
        long: is called with those that are under way for long. Each is told again when it has taken twice as long.
        long_s: how long that is, in seconds.

    Attributes:
        pid: the process that they belong to.
        number: makes a number that no other call of this process has.
    """

    def __init__(
        self,
        peers: Callable[[], list[Peer]],
        wake: Callable[[], None],
        run: Callable[..., None],
        late: Callable[[list[Call]], None],
        cancelled: Callable[[Call], None],
        long: Callable[[list[Call]], None],
        long_s: float,
    ) -> None:
        self.pid = os.getpid()
        self.number = itertools.count(1).__next__
        self.run = run
        self._peers, self._wake = peers, wake
        self._late, self._cancelled, self._long, self._long_s = late, cancelled, long, long_s
        self._seen_s = min(_SEEN_S, long_s)
        self._lock = threading.Lock()  # guards the next
        self._next = math.inf
        self._shown: Call | None = None  # what the launcher knows of
        self._room = threading.Condition()
        self._waiting = 0  # for room; guarded by _room, and read without it

    def all(self) -> list[Call]:
        """Return the calls that are under way."""
        return [call for peer in self._peers() for call in list(peer.calls.values())]

    def add(self, call: Call) -> None:
        """Enter a call, before it is sent."""
        call.note_at = call.began + self._seen_s
        call.peer.calls[call.number] = call
        due = min(call.until, call.note_at)
        if due < self._next:
            with self._lock:
                self._next = min(self._next, due)
            self._wake()

    def take(self, peer: Peer, number: int) -> Call | None:
        """Remove a call, for whoever completes it; None if somebody has done so."""
        call = peer.calls.pop(number, None)
        if call is not None:
            call.kept = ()  # whoever keeps the future does not keep that too
            if call is self._shown:
                self._show()
            if call.nbytes or self._waiting:
                self._leave(call)
        return call

    def take_all(self, peer: Peer) -> list[Call]:
        """Remove all calls to a peer."""
        peer.given_up.clear()
        return [call for call in list(peer.calls.values()) if self.take(peer, call.number) is not None]

    def cancel(self, call: Call) -> None:
        """Remove a call that nobody waits for any more."""
        if self._give_up(call):
            self._cancelled(call)

    def _give_up(self, call: Call) -> bool:
        """Remove a call whose callee relies on what it keeps until the answer comes; whether it was under way."""
        if not call.is_under_way():
            return False
        if kept := call.kept:  # before it is taken, so that its answer finds it here or there
            call.peer.given_up[call.number] = kept
        if self.take(call.peer, call.number) is None:
            call.peer.given_up.pop(call.number, None)
            return False
        return True

    def wait_for_room(self, call: Call, nbytes: int) -> None:
        """Wait until there is room for a call to its worker, whose only call always has room.

        Args:
            call: the call, which has been entered.
            nbytes: of its arguments.

        Raises:
            TimeoutError: that takes longer than the call may.
        """
        peer = call.peer
        if nbytes <= Link.SMALL_BYTES and len(peer.calls) <= MOST_CALLS:
            return

        def has_room() -> bool:
            if not call.is_under_way():
                return True  # it has ended, as all do whose worker is lost
            return len(peer.calls) <= MOST_CALLS and (not peer.nbytes or peer.nbytes + nbytes <= MOST_BYTES)

        with self._room:
            self._waiting += 1
            try:
                left = min(call.until - time.monotonic(), threading.TIMEOUT_MAX)
                if not self._room.wait_for(has_room, max(0.0, left)):
                    raise TimeoutError
            finally:
                self._waiting -= 1
            call.nbytes = nbytes
            peer.nbytes += nbytes
        if not call.is_under_way():  # it may have been removed before its bytes counted
            self._leave(call)

    def _leave(self, call: Call) -> None:
        with self._room:
            call.peer.nbytes -= call.nbytes
            call.nbytes = 0
            self._room.notify_all()

    def _show(self) -> None:
        """Let the launcher know of the oldest of the calls that have taken a while."""
        self._shown = oldest = min(
            (call for call in self.all() if call.is_seen), key=lambda call: call.number, default=None
        )
        publish(oldest.waiting() if oldest is not None else "")
        if oldest is not None and not oldest.is_under_way():  # it has returned meanwhile
            self._show()

    def attend(self, now: float) -> float:
        """End the calls whose time is over, and tell of those that take long; return when to do so again."""
        if self._next <= now:
            with self._lock:
                self._next = math.inf
            due = self._attend(now)
            with self._lock:
                self._next = min(self._next, due)
        return self._next

    def _attend(self, now: float) -> float:
        # In a function of its own: the thread, which may then sleep for long, keeps none of the calls.
        if late := [call for call in self.all() if call.until <= now and self._give_up(call)]:
            self._late(late)
        noted = [call for call in self.all() if call.note_at <= now]
        long = [call for call in noted if now - call.began >= self._long_s]
        for call in noted:
            call.is_seen = True
            call.note_at = call.began + self._long_s
        for call in long:
            call.note_at = now + (now - call.began)
        if noted and self._shown is None:
            self._show()
        if long:
            self._long(long)
        return min((min(call.until, call.note_at) for call in self.all()), default=math.inf)
