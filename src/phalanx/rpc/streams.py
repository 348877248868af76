"""Generators across workers: the items come when the caller asks for them, a few ahead.

The generator stays with the callee. The caller asks for the next items while it works on those that it has, so the
callee is at most ``AHEAD`` items before it: a slow caller holds it back, and nothing grows.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent, Incoming
from phalanx.rpc.failure import Failure
from phalanx.rpc.future import Future
from phalanx.rpc.members import Member

__all__ = ["Offered", "Stream", "offer", "received"]

AHEAD = 4
_NEXT, _CLOSE = "stream.next", "stream.close"


@dataclass(frozen=True)
class Offered:
    """The answer of a call whose function is a generator: which stream it is, at which worker."""

    number: int
    owner: Member


@dataclass(eq=False)
class _Source:
    peer: Member
    items: Any
    loop: Callable[[], asyncio.AbstractEventLoop]
    lock: threading.Lock = field(default_factory=threading.Lock)


_sources: dict[int, _Source] = {}
_numbers = itertools.count(1)


def offer(peer: Member, items: Any, loop: Callable[[], asyncio.AbstractEventLoop]) -> Offered:
    """Keep a generator for the worker that called it."""
    number = next(_numbers)
    _sources[number] = _Source(peer, items, loop)
    return Offered(number, session.agent().me)


def received(value: Any) -> Any:
    """The value of a call for its caller: an iterator in the place of a stream's description."""
    return Stream(value) if isinstance(value, Offered) else value


class Stream(Iterator[Any]):
    """The items of a generator on another worker. What the generator raises is raised here, after its last item."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._items: deque[Any] = deque()
        self._coming: Future[Any] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._ask()

    def __next__(self) -> Any:
        while not self._items:
            if self._coming is None:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                raise StopIteration
            coming, self._coming = self._coming, None
            items, ended, failure = coming.wait()
            self._items.extend(items)
            self._ended = ended
            if failure is not None:
                self._error = failure.rebuilt(self._offered.owner)
            if not ended:
                self._ask()
        return self._items.popleft()

    def close(self) -> None:
        """End the generator, which then runs its ``finally``."""
        if not self._ended:
            self._ended = True
            self._coming = None
            agent = session.current()
            if agent is not None:
                agent.notify(self._offered.owner, _CLOSE, self._offered.number)

    def __del__(self) -> None:
        self.close()

    def _ask(self) -> None:
        wanted = (self._offered.number, AHEAD)
        self._coming = session.agent().request(
            self._offered.owner, _NEXT, wanted, asked="the next items of a generator"
        )


def _on_next(incoming: Incoming, wanted: tuple[int, int]) -> tuple[list[Any], bool, Failure | None]:
    """Up to so many items, whether the generator has ended, and what it raised."""
    number, most = wanted
    source = _sources.get(number)
    if source is None or source.peer.incarnation != incoming.peer.incarnation:
        raise PhalanxError("this generator was closed")
    items: list[Any] = []
    with source.lock:
        try:
            while len(items) < most:
                items.append(_next(source))
        except (StopIteration, StopAsyncIteration):
            _sources.pop(number, None)
            return items, True, None
        except BaseException as error:
            _sources.pop(number, None)
            return items, True, Failure.of(error)
    return items, False, None


def _next(source: _Source) -> Any:
    if isinstance(source.items, AsyncIterator):
        return asyncio.run_coroutine_threadsafe(anext(source.items), source.loop()).result()  # type: ignore[arg-type]
    return next(source.items)


def _on_close(incoming: Incoming, number: int) -> None:
    source = _sources.get(number)
    if source is not None and source.peer.incarnation == incoming.peer.incarnation:
        _drop(number)


def _drop(number: int) -> None:
    source = _sources.pop(number, None)
    if source is None:
        return
    with source.lock:
        if isinstance(source.items, AsyncIterator):
            closing: Any = source.items
            asyncio.run_coroutine_threadsafe(closing.aclose(), source.loop()).result()
        else:
            source.items.close()


def _equip(agent: Agent) -> None:
    agent.serve(_NEXT, _on_next)
    agent.serve(_CLOSE, _on_close)

    def changed(member: Member, _: str) -> None:
        for number, source in list(_sources.items()):
            if source.peer.incarnation == member.incarnation:
                _drop(number)

    agent.on_change(changed)


session.on_init(_equip)
