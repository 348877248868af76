"""Processes that wait for each other on one thread, for tests of their seats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import Store

from phalanx.errors import InitializationError
from phalanx.transports import seat
from phalanx.transports.seat import Seat

__all__ = [
    "MANY_LOOKS",
    "Clock",
    "Death",
    "Waiting",
    "check_next_world",
    "clock",
    "everybody",
    "nobody_sees_the_others",
    "wait_on",
]

MANY_LOOKS = 30


class Waiting:
    """A process that has come and waits: it looks whenever another one, which shares the test's thread, sleeps."""

    def __init__(self, store: Store, rank: int, size: int, others: list[Waiting]) -> None:
        self.seat = Seat(store, rank, size)
        self.error: InitializationError | None = None
        self.has_come = self.is_over = self.is_busy = False
        others.append(self)

    def act(self, act: Callable[[], None]) -> None:
        """One step of it, in which it may raise and then gives its seat back."""
        if self.is_over or self.is_busy:
            return
        self.is_busy = True
        try:
            act()
        except InitializationError as error:
            self.error = error
            self.give_up()
        finally:
            self.is_busy = False

    def come(self) -> None:
        self.has_come = True
        self.act(self.seat.take)

    def look(self) -> None:
        if self.has_come:
            self.act(self.seat.check)

    def give_up(self) -> None:
        self.seat.give_back()
        self.is_over = True

    def meet(self) -> None:
        """All have come, as far as this one is concerned."""
        if not self.is_over and not self.is_busy:
            self.seat.leave()
            self.is_over = True

    def die(self) -> None:
        """The process ends here, without a further request."""
        seat._made_here.discard(self.seat._own.number)
        self.is_over = True


class Death(BaseException):
    """The end of a process, which makes no further request."""


class Clock:
    """The seconds by which seats wait: they pass while one sleeps, and the others look meanwhile."""

    def __init__(self, everybody: list[Waiting]) -> None:
        self.now, self._everybody = 0.0, everybody

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for each in list(self._everybody):
            each.look()


@pytest.fixture
def everybody() -> list[Waiting]:
    return []


@pytest.fixture
def clock(everybody: list[Waiting], monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(everybody)
    monkeypatch.setattr(seat, "time", made)
    return made


def wait_on(clock: Clock, until: Callable[[], bool] = lambda: False, looks: int = MANY_LOOKS) -> None:
    for _ in range(looks):
        if until():
            return
        clock.sleep(0.1)


@contextlib.contextmanager
def nobody_sees_the_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each is on a host of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(seat, "own_sight", lambda: "")
        yield


def check_next_world(store: Store, everybody: list[Waiting], clock: Clock, size: int) -> None:
    """A world in the same store is made, at once, and leaves nothing."""
    everybody.clear()
    began = clock.now
    ranks = [Waiting(store, rank, size, everybody) for rank in range(size)]
    for rank in ranks:
        rank.come()
    for rank in ranks:
        rank.meet()
    assert [rank.error for rank in ranks] == [None] * size
    assert clock.now == began
    for number in range(size):
        assert not store.check([str(number)])
