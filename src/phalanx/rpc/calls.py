"""The calls of this process that are under way: who is asked, until when, and what the caller waits for."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.errors import ClosedError
from phalanx.rpc.codecs import Codec
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.links.contract import Link
from phalanx.rpc.members import Member
from phalanx.rpc.message import Kind, Message
from phalanx.watch.call_site import CallSite, text_of

__all__ = ["Call", "Calls"]

_PAUSE_S = 0.001


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
        kept: what the callee relies on until it answers; see ``in_transit.py``.
    """

    __slots__ = (
        "_calls",
        "asked",
        "began",
        "codec",
        "future",
        "kept",
        "link",
        "made",
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
        where = text_of(self.site)
        return f"{self.asked}{f' ({where})' if where else ''}, {time.monotonic() - self.began:.1f} s ago"


class Calls:
    """All of them, with one thread that ends those whose time is over.

    Args:
        late: is called with each of these, which is no longer in the table.
        cancelled: the same for those that the caller has given up.

    Attributes:
        pid: the process that they belong to.
    """

    def __init__(self, late: Callable[[Call], None], cancelled: Callable[[Call], None]) -> None:
        self.pid = os.getpid()
        self._late = late
        self._cancelled = cancelled
        self._calls: dict[int, Call] = {}
        self._given_up: dict[int, Call] = {}  # for what their callees rely on until they answer
        self.number = itertools.count(1).__next__  # a number that no other call of this process has
        self._changed = threading.Condition()
        self._next = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, call: Call) -> None:
        """Enter a call, before it is sent."""
        self._calls[call.number] = call
        if call.until < self._next:
            with self._changed:
                self._next = min(self._next, call.until)
                if self._thread is None and not self._closed:
                    thread = threading.Thread(target=self._watch, name="phalanx-rpc-timeouts", daemon=True)
                    thread.start()
                    self._thread = thread
                self._changed.notify()

    def take(self, number: int) -> Call | None:
        """Remove a call, for whoever completes it; None if somebody has done so."""
        return self._calls.pop(number, None)

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
        taken = [
            call
            for call in list(self._calls.values())
            if (link is None or call.link is link) and self.take(call.number) is not None
        ]
        for call in list(self._given_up.values()):
            if link is None or call.link is link:
                self.answered(call.number)
        return taken

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def wait_for_room(self, to: Member, most: int, until: float) -> None:
        """Wait until fewer than ``most`` calls to a member are under way.

        Raises:
            TimeoutError: that takes longer than until ``until``.
        """
        while sum(call.to.incarnation == to.incarnation for call in list(self._calls.values())) > most:
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(_PAUSE_S)

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
            left = self._end_late(now)
            with self._changed:
                self._next = min(self._next, left)

    def _end_late(self, now: float) -> float:
        """End the calls whose time is over, which this thread must not keep; when that of the next one will be."""
        for call in list(self._calls.values()):
            if call.until <= now and self.give_up(call.number) is not None:
                self._late(call)
        return min((call.until for call in list(self._calls.values())), default=math.inf)
