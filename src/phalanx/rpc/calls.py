"""The calls of this process that are under way: who is asked, until when, and what the caller waits for."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.diagnosis.call_site import CallSite, shown, text_of
from phalanx.diagnosis.stacks import publish
from phalanx.errors import CallTimeout, ClosedError, WorkerLost
from phalanx.rpc.codec import Codec
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.links.contract import Link
from phalanx.rpc.members import Member
from phalanx.rpc.message import Kind, Message
from phalanx.system.threads import start

__all__ = ["Call", "Calls", "facts_of"]

_SEEN_S = 1.0  # after which the launcher knows of a call


class Call:
    """A request without an answer yet.

    Args:
        calls: all of them.
        run: calls a function with arguments on a thread that may block.

    Attributes:
        number: unique in this process.
        to: who is asked.
        asked: what, for people.
        until: the time of ``time.monotonic`` at which the caller gives up.
        timeout_s: how long that was.
        future: gets the answer.
        link: the way that the request took, once it has been sent.
        site: where the program made the call.
        made: makes the future's value of the answer.
        codec: how the answer is read.
        began: when.
        kept: what the callee relies on until it answers; see ``codec.py``.
        note_at: the time at which the user is told that it takes long.
        nbytes: of its arguments, as far as they count for the room of its worker.
        is_seen: the launcher knows of it, as of all that are under way for a second.
    """

    __slots__ = (
        "_calls",
        "asked",
        "began",
        "codec",
        "future",
        "is_seen",
        "kept",
        "link",
        "made",
        "nbytes",
        "note_at",
        "number",
        "site",
        "timeout_s",
        "to",
        "until",
    )

    def __init__(
        self,
        calls: Calls,
        run: Callable[..., None],
        to: Member,
        asked: str,
        timeout_s: float,
        site: CallSite | None,
        made: Callable[[Any], Any] | None,
        codec: Codec,
    ) -> None:
        self._calls = calls
        self.number = calls.number()
        self.to, self.asked, self.timeout_s, self.site, self.made, self.codec = to, asked, timeout_s, site, made, codec
        self.began = now = time.monotonic()
        self.until = now + timeout_s
        self.link: Link | None = None
        self.kept: Sequence[Any] = ()
        self.note_at = math.inf
        self.nbytes = 0
        self.is_seen = False
        self.future: Future[Any] = Future(self._help, self._cancel, run)

    def _help(self, done: Callable[[], bool], timeout_s: float) -> None:
        if os.getpid() != self._calls.pid:
            raise ClosedError.of_parent("this call", os.getpid())
        calls, number = self._calls, self.number
        if self.link is not None:  # when the answer has come, another thread may still settle what is in it
            self.link.wait(lambda: number not in calls, number, min(timeout_s, self.until - time.monotonic()))

    def _cancel(self) -> None:
        self._calls.cancel(self)

    def decode(self, message: Message) -> Any:
        """What an answer says: a value, or an exception."""
        if message.kind is Kind.FAILURE:
            return Failure.decode(message.head).rebuilt(self.to, unpickle=self.codec.unpickles)
        return self.codec.decode(message.head, message.buffers)

    def complete(self, kind: Kind, value: Any) -> None:
        """Complete the future with what has been made of the answer: its value, or an exception."""
        if kind is Kind.FAILURE:
            self.future.set_exception(value)
        elif self.made is None:
            self.future.set_result(value)
        else:
            try:
                self.future.set_result(self.made(value))
            except Exception as error:
                self.future.set_exception(error)

    def describe(self) -> str:
        """The call for people: ``add (train.py:12), 3.1 s ago``."""
        where = shown(text_of(self.site))
        return f"{self.asked}{f' ({where})' if where else ''}, {time.monotonic() - self.began:.1f} s ago"

    def waiting(self) -> str:
        """What a caller waits for, for people: ``worker1 (rank 1, ...) in add (train.py:12)``."""
        where = shown(text_of(self.site))
        return f"{self.to} in {self.asked}{f' ({where})' if where else ''}"

    def lost(self, why: str) -> WorkerLost:
        """The error for the end of the worker that is asked; ``why`` says how it was noticed."""
        elapsed_s = time.monotonic() - self.began
        return WorkerLost.while_waiting(
            str(self.to), why, self.describe(), elapsed_s=elapsed_s, **facts_of(self.to, self.asked, text_of(self.site))
        )

    def late(self, timeout_s: float, why: str, cause: str, at: str) -> CallTimeout:
        """The error for a call whose time is over; see :class:`~phalanx.errors.CallTimeout`."""
        return CallTimeout.not_answered(
            str(self.to),
            self.describe(),
            timeout_s,
            why,
            cause=cause,
            at=at,
            **facts_of(self.to, self.asked, text_of(self.site)),
        )


def facts_of(worker: Member, asked: str, line: str) -> dict[str, Any]:
    """What the errors of calls know of a worker, what it was asked, and where."""
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
    """All of them, with one thread that ends those whose time is over.

    Args:
        late: is called with those whose time is over, which are no longer in the table.
        cancelled: is called with each that the caller has given up, which is no longer in the table either.
        long: is called with those that are under way for long. Each is told again when it has taken twice as long.
        long_s: how long that is, in seconds.

    Attributes:
        pid: the process that they belong to.
    """

    def __init__(
        self,
        late: Callable[[list[Call]], None],
        cancelled: Callable[[Call], None],
        long: Callable[[list[Call]], None],
        long_s: float,
    ) -> None:
        self.pid = os.getpid()
        self._late, self._cancelled, self._long, self._long_s = late, cancelled, long, long_s
        self._seen_s = min(_SEEN_S, long_s)
        self._calls: dict[int, Call] = {}
        self._given_up: dict[int, Call] = {}  # for what their callees rely on until they answer
        self._to: dict[int, dict[int, Call]] = {}  # the same, by worker
        self.number = itertools.count(1).__next__  # a number that no other call of this process has
        self._changed = threading.Condition()
        self._next = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False
        self._shown: Call | None = None  # what the launcher knows of
        self._room = threading.Condition()
        self._waiting = 0  # for room; guarded by _room, and read without it
        self._nbytes: Counter[int] = Counter()  # of the calls under way to each worker; guarded by _room

    def add(self, call: Call) -> None:
        """Enter a call, before it is sent."""
        call.note_at = call.began + self._seen_s
        self._to.setdefault(call.to.incarnation, {})[call.number] = call  # first: it may be taken as soon as it is in
        self._calls[call.number] = call
        due = min(call.until, call.note_at)
        if due < self._next:
            with self._changed:
                if self._thread is None and not self._closed:
                    thread = threading.Thread(target=self._watch, name="phalanx-rpc-timeouts", daemon=True)
                    start(thread)
                    self._thread = thread
                self._next = min(self._next, due)
                self._changed.notify()

    def take(self, number: int) -> Call | None:
        """Remove a call, for whoever completes it; None if somebody has done so."""
        call = self._calls.pop(number, None)
        if call is not None:
            self._to.get(call.to.incarnation, {}).pop(number, None)
            if call is self._shown:
                self._show()
            if call.nbytes or self._waiting:
                self._leave(call)
        return call

    def give_up(self, number: int) -> Call | None:
        """:meth:`take` for a call whose answer nobody waits for any more. Call :meth:`answered` when it comes."""
        call = self._calls.get(number)
        if call is None:
            return None
        if call.kept:  # before it is taken, so that its answer finds it here or there
            self._given_up[number] = call
        if self.take(number) is None:
            self.answered(number)
            return None
        return call

    def answered(self, number: int) -> None:
        """The callee of a call that was given up relies on nothing any more."""
        self._given_up.pop(number, None)

    def cancel(self, call: Call) -> None:
        """Remove a call that nobody waits for any more."""
        if self.give_up(call.number) is None:
            return
        if call.link is None:  # it was not sent
            self.answered(call.number)
        else:
            self._cancelled(call)

    def take_all(self, link: Link | None = None) -> list[Call]:
        """Remove all calls that took a link; all if none is given."""
        chosen = [call for call in list(self._calls.values()) if link is None or call.link is link]
        taken = [call for call in chosen if self.take(call.number) is not None]
        for call in list(self._given_up.values()):
            if link is None or call.link is link:
                self.answered(call.number)
        return taken

    def forget(self, worker: Member) -> None:
        """A worker is gone, and so are all calls to it."""
        self._to.pop(worker.incarnation, None)

    def of(self, future: Future[Any]) -> Call | None:
        """The call that completes a future, if it is under way."""
        return next((call for call in list(self._calls.values()) if call.future is future), None)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def wait_for_room(self, call: Call, nbytes: int, most: int, most_bytes: int) -> None:
        """Wait until there is room for a call to its worker, whose only call always has room.

        Args:
            call: the call, which is in the table.
            nbytes: of its arguments.
            most, most_bytes: how many calls to the worker, and how many bytes of theirs, may be under way.

        Raises:
            TimeoutError: that takes longer than the call may.
        """
        to = call.to.incarnation

        def has_room() -> bool:
            if call.number not in self._calls:
                return True  # it has ended, as all do whose worker is lost
            if self._nbytes[to] and self._nbytes[to] + nbytes > most_bytes:
                return False
            return len(self._to.get(to, ())) <= most

        with self._room:
            self._waiting += 1
            try:
                left = min(call.until - time.monotonic(), threading.TIMEOUT_MAX)
                if not self._room.wait_for(has_room, max(0.0, left)):
                    raise TimeoutError
            finally:
                self._waiting -= 1
            call.nbytes = nbytes
            self._nbytes[to] += nbytes
        if call.number not in self._calls:  # it may have been removed before its bytes counted
            self._leave(call)

    def _leave(self, call: Call) -> None:
        with self._room:
            nbytes, call.nbytes = call.nbytes, 0
            self._nbytes[call.to.incarnation] -= nbytes
            if not self._nbytes[call.to.incarnation]:
                del self._nbytes[call.to.incarnation]
            self._room.notify_all()

    def _show(self) -> None:
        """Let the launcher know of the oldest of the calls that have taken a while."""
        self._shown = shown = next((call for call in list(self._calls.values()) if call.is_seen), None)
        publish(shown.waiting() if shown is not None else "")
        if shown is not None and shown.number not in self._calls:  # it has returned meanwhile
            self._show()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if self._next > time.monotonic():
                    self._changed.wait(min(max(0.0, self._next - time.monotonic()), 3600.0))
                if self._closed:
                    return
                now = time.monotonic()
                if self._next > now:
                    continue
                self._next = math.inf
            left = self._attend(now)
            with self._changed:
                self._next = min(self._next, left)

    def _attend(self, now: float) -> float:
        """End the calls whose time is over, and tell of those that take long; when to do so again.

        The thread, which may then sleep for long, keeps none of them.
        """
        over = [call for call in list(self._calls.values()) if call.until <= now]
        if late := [call for call in over if self.give_up(call.number) is not None]:
            self._late(late)
        noted = [call for call in list(self._calls.values()) if call.note_at <= now]
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
        return min((min(call.until, call.note_at) for call in list(self._calls.values())), default=math.inf)
