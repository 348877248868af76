"""Generators across workers: the items come when the caller asks for them, a few ahead.

The generator stays with the callee. The caller asks for the next items while it works on those that it has, so the
callee is at most ``AHEAD`` items before it: a slow caller holds it back, and nothing grows. Each item is sent as soon
as it is there: the generator may wait for something that the caller does with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CallTimeout, ClosedError
from phalanx.rpc import session
from phalanx.rpc.codec import keep
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member
from phalanx.rpc.worker import Incoming, Worker
from phalanx.words import tell

__all__ = ["Coming", "Offered", "Stream", "offer", "received"]

AHEAD = 4
_NEXT, _CLOSE = "stream.next", "stream.close"

# An item, whether there is none because the generator has ended, and what it raised: a _Raised, or None. That arrives
# as the exception itself.
_Answer = tuple[Any, bool, Any]


class _Raised:
    """Exception of a generator, as it travels.

    It is taken apart while the answer is pickled, and put together while the answer is read, so that the references in
    it are held on the way like those in an item.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._reduced: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reduced is None:  # pickling may begin anew
            self._reduced = _rebuilt, (Failure.of(self._error), session.worker().me)
        return self._reduced


def _rebuilt(failure: Failure, where: Member) -> BaseException:
    return failure.rebuilt(where)


@dataclass(frozen=True)
class Coming:
    """Description of a stream, which arrives in the place of an :class:`Offered`."""

    number: int
    owner: Member


class Offered:
    """The answer of a call whose function is a generator: which stream it is, at which worker.

    If it ends before the caller has taken the answer, such as one that has given up, the generator ends with it.
    """

    def __init__(self, number: int, worker: Worker) -> None:
        self._number, self._owner = number, worker.me
        self._ending = weakref.finalize(self, worker.run_later, _drop, number)
        self._ending.atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        keep(self, self._ending.detach)
        return Coming, (self._number, self._owner)


class _Source:
    """A generator, and the requests for its items that wait for it. One thread at a time runs it."""

    def __init__(
        self, number: int, peer: Member, worker: Worker, items: Any, loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self.peer, self.worker = peer, worker
        self._number = number
        self._items = items
        self._loop = loop
        self._lock = threading.Lock()
        self._asked: dict[int, Future[_Answer]] = {}
        self._at = 0  # the item that is next
        self._running = self._ended = self._closed = False

    def take(self, at: int) -> _Answer | Future[_Answer]:
        """Return the item of a number, now or later; requests for items may come in any order."""
        with self._lock:
            if self._closed or self._ended:
                return None, True, None
            if self._running or at != self._at:
                return self._asked.setdefault(at, Future())
            self._running = True
        answer = self._produce()
        with self._lock:
            goes_on = self._ended or self._closed or self._at in self._asked
            self._running = goes_on
        if goes_on:
            self.worker.run(self._go_on)
        return answer

    def close(self) -> None:
        """End the generator; if it runs, as soon as it has made its item."""
        with self._lock:
            self._closed = True
            if self._running:
                return
            self._running = True
        self._go_on()

    def _go_on(self) -> None:
        while True:
            with self._lock:
                over = self._ended or self._closed
                asked = list(self._asked.values())
                if not over and self._at not in self._asked:
                    self._running = False
                    return
                if not over:
                    asked = [self._asked.pop(self._at)]
            if over:
                if not self._ended:
                    self._end()
                for future in asked:
                    future.set_result((None, True, None))
                return
            for future in asked:
                future.set_result(self._produce())

    def _produce(self) -> _Answer:
        try:
            if isinstance(self._items, AsyncIterator):
                coming: Any = anext(self._items)
                item = asyncio.run_coroutine_threadsafe(coming, self._loop()).result()
            else:
                item = next(self._items)
        except BaseException as error:
            self._ended = True
            _sources.pop(self._number, None)
            ran_out = isinstance(error, (StopIteration, StopAsyncIteration))
            return None, True, None if ran_out else _Raised(error)
        self._at += 1
        return item, False, None

    def _end(self) -> None:
        try:
            if isinstance(self._items, AsyncIterator):
                closing: Any = self._items
                asyncio.run_coroutine_threadsafe(closing.aclose(), self._loop()).result()
            else:
                self._items.close()
        except BaseException as error:
            tell(f"warning: a generator that {self.peer} called could not be closed: {error!r}")


_sources: dict[int, _Source] = {}
_numbers = itertools.count(1)


def offer(peer: Member, items: Any, loop: Callable[[], asyncio.AbstractEventLoop]) -> Offered:
    """Keep a generator for the worker that called it."""
    number, worker = next(_numbers), session.worker()
    _sources[number] = _Source(number, peer, worker, items, loop)
    return Offered(number, worker)


def received(value: Any, timeout_s: float | None = None) -> Any:
    """Return the value of a call for its caller: an iterator in the place of a stream's description."""
    return Stream(value, timeout_s) if isinstance(value, Coming) else value


class Stream(Iterator[Any]):
    """The items of a generator on another worker. What the generator raises is raised here, after its last item.

    An item that does not come within the call's timeout raises ``CallTimeout``; the next attempt waits for it again.
    """

    def __init__(self, coming: Coming, timeout_s: float | None) -> None:
        worker = session.worker()
        self._number, self._owner = coming.number, coming.owner
        self._timeout_s = worker.timeout_s if timeout_s is None else timeout_s
        self._coming: deque[Future[_Answer]] = deque()
        self._asked = 0
        self._ended = False
        self._closing = weakref.finalize(self, worker.run_later, _close_there, worker, self._owner, self._number)
        self._closing.atexit = False

    def __next__(self) -> Any:
        while not self._ended and len(self._coming) < AHEAD:
            self._ask()
        if not self._coming:
            raise StopIteration
        try:
            item, ended, failure = self._coming[0].wait(self._timeout_s)
        except TimeoutError as error:
            if isinstance(error, CallTimeout):
                raise
            late = session.worker().overdue(self._coming[0], self._timeout_s)
            if late is None:  # it has come meanwhile
                return next(self)
            raise late from None
        except Exception:
            self.close()
            raise
        self._coming.popleft()
        if not ended:
            return item
        self._ended = True
        self._coming.clear()
        self._closing.detach()
        if failure is not None:
            raise failure
        raise StopIteration

    def close(self) -> None:
        """End the generator, which then runs its ``finally``."""
        self._ended = True
        self._coming.clear()
        self._closing()

    def _ask(self) -> None:
        future = session.worker().request(
            self._owner, _NEXT, (self._number, self._asked), math.inf, asked="the next item of a generator"
        )
        self._coming.append(future)
        self._asked += 1


def _close_there(worker: Worker, owner: Member, number: int) -> None:
    with contextlib.suppress(ClosedError):  # then the owner learns that this worker has left
        worker.notify(owner, _CLOSE, number)


def _on_next(incoming: Incoming, wanted: tuple[int, int]) -> Any:
    number, at = wanted
    source = _sources.get(number)
    if source is None or source.peer.incarnation != incoming.peer.incarnation:
        return None, True, None  # it has ended
    return source.take(at)


def _on_close(incoming: Incoming, number: int) -> None:
    source = _sources.get(number)
    if source is not None and source.peer.incarnation == incoming.peer.incarnation:
        _drop(number)


def _drop(number: int) -> None:
    source = _sources.pop(number, None)
    if source is not None:
        source.close()


def _equip(worker: Worker) -> None:
    worker.serve(_NEXT, _on_next)
    worker.serve(_CLOSE, _on_close)

    def changed(member: Member, _: str) -> None:
        for number, source in list(_sources.items()):
            if source.peer.incarnation == member.incarnation:
                worker.run(_drop, number)

    def end() -> None:
        for number, source in list(_sources.items()):
            if source.worker is worker:
                _drop(number)

    worker.on_change(changed)
    worker.on_close(end)


session.on_init(_equip)
