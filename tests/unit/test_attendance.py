"""What the ranks that meet write into the store, and read there, across meetings that end well and such that fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from tests.support.interrupted import Interrupted
from torch._C._distributed_c10d import HashStore, Store

from phalanx.errors import InitializationError
from phalanx.system.sight import own_sight
from phalanx.transports import attendance
from phalanx.transports.attendance import Attendance

SIZES = [2, 3, 5]


class Fault(Exception):
    """What the script of a rank raises."""


@pytest.fixture(autouse=True)
def no_meeting_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies here leaves no meeting in which the next test's processes would believe themselves to be."""
    monkeypatch.setattr(attendance, "_open", None)


def come(store: Store, size: int) -> list[Attendance]:
    """All ranks have come; here they are one process."""
    ranks = [Attendance(store, rank) for rank in range(size)]
    for rank in ranks:
        rank.__enter__()
    return ranks


def leave(rank: Attendance, error: Exception | None = None) -> None:
    rank.__exit__(type(error) if error else None, error, None)


def leave_all(ranks: list[Attendance]) -> None:
    for rank in ranks:
        leave(rank)


@pytest.mark.parametrize("size", SIZES)
def test_a_meeting_that_ends_well_leaves_no_keys(size: int) -> None:
    store = HashStore()
    leave_all(come(store, size))
    assert store.num_keys() == 0


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_leave_at_the_same_time_leave_no_keys(size: int) -> None:
    """All others leave between two requests of one of them, whichever two these are."""
    for number in count():
        store = Interrupted()
        first, *others = come(store, size)
        store.something = partial(leave_all, others)
        store.requests_until = number
        leave(first)
        if store.requests_until >= 0:
            break  # it has finished with fewer requests
        assert store.all.num_keys() == 0, f"after {number} requests"
    assert number > 3


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_goes_is_believed_after_a_meeting_in_the_same_store_that_failed_for_some(size: int) -> None:
    store = HashStore()
    *others, last = come(store, size)
    leave_all(others)
    leave(last, InitializationError("another rank was late"))
    first, second, *rest = come(store, size)
    leave(first)
    leave(second, Fault("this batch is empty"))
    for rank in rest:
        assert list(rank.gone(range(size))) == [1]


@pytest.mark.parametrize("size", SIZES)
def test_rank_0_does_not_wait_for_a_rank_that_has_its_own_reason_to_fail(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the store, so it waits for those that have no reason yet; that one may live for long."""
    monkeypatch.setattr(attendance, "_LINGER_S", 600.0)
    rank_0, *others, failed = come(HashStore(), size)
    leave(failed, Fault("this batch is empty"))
    for rank in others:
        leave(rank, InitializationError("a rank has failed"))
    leave(rank_0, InitializationError("a rank has failed"))


class Death(BaseException):
    """The end of a process, which runs no handler and makes no further request."""


class Mortal:
    """Processes that may die before any of their requests; all are this one, with a start of its own for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts = count(1)
        self.dead: set[int] = set()
        monkeypatch.setattr(attendance, "start_of", lambda _: next(self.starts))
        monkeypatch.setattr(attendance, "_has_ended", lambda process: process.start in self.dead)
        monkeypatch.setattr(attendance, "_LINGER_S", 0.0)

    def act(self, store: Interrupted, number: int, act: Callable[[], None]) -> int | None:
        """Do something as a process that dies before its request of this number.

        Returns:
            Its start, unless it had one before; None if it has not died, because it has made fewer requests.
        """

        def die() -> None:
            raise Death

        before = next(self.starts)
        store.something, store.requests_until = die, number
        try:
            act()
        except Death:
            pass
        else:
            store.requests_until = -1
            return None
        store.requests_until = -1
        after = next(self.starts)
        self.dead |= set(range(before, after))
        return before


def written(store: HashStore, rank: int) -> bool:
    """Whether an entry of this rank's is there that is not empty."""
    comings = 20
    sight = own_sight()
    keys = [f"attendance/{sight}/{number}" for number in range(1, comings)]
    return any(store.check([key]) and f"[{rank}," in store.get(key).decode() for key in keys)


def check_next_meeting(store: Interrupted, size: int) -> None:
    """All come again, the one that has died as another process; nobody has gone, until one does."""
    first, second, *rest = come(store, size)
    assert [rank.gone(range(size)) for rank in (first, second, *rest)] == [{}] * size
    leave(first)
    leave(second, Fault("this batch is empty"))
    for rank in rest:
        assert list(rank.gone(range(size))) == [1]
        leave(rank, InitializationError("rank 1 has gone"))


LEAVING: dict[str, Exception | None] = {
    "in order": None,
    "by its own fault": Fault("this batch is empty"),
    "by another's fault": InitializationError("another rank was late"),
}


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_dies_while_it_leaves(
    size: int, victim: int, others_first: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before whichever of its requests: the others find it if it had not left, and nobody is misled later."""
    number = 0
    while True:
        mortal, store = Mortal(monkeypatch), Interrupted()
        own = next(mortal.starts) + victim + 1
        ranks = come(store, size)
        others = [rank for at, rank in enumerate(ranks) if at != victim]
        for rank in others:
            rank.read_new()
        if others_first:
            leave_all(others)
        if mortal.act(store, number, partial(leave, ranks[victim], LEAVING[way])) is None:
            break
        mortal.dead.add(own)
        if not others_first:
            said = store.all.check(["attendance/gone"])
            expected = [victim] if said or written(store.all, victim) else []
            for rank in others:
                assert list(rank.gone(range(size))) == expected, f"before request {number}"
            for rank in others:
                leave(rank, InitializationError("a rank has gone") if expected else None)
        check_next_meeting(store, size)
        check_next_meeting(store, size)
        number += 1
    assert number >= 1


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_while_it_comes(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size, number = 3, 0
    while True:
        mortal, store = Mortal(monkeypatch), Interrupted()
        others = [Attendance(store, rank) for rank in range(size) if rank != victim]
        for rank in others:
            rank.__enter__()
        last = Attendance(store, victim)
        if mortal.act(store, number, last.__enter__) is None:
            break
        expected = [victim] if written(store.all, victim) else []
        for rank in others:
            assert list(rank.gone(range(size))) == expected, f"before request {number}"
            leave(rank, InitializationError("a rank did not come"))
        check_next_meeting(store, size)
        number += 1
    assert number >= 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_of_the_two_numbers_that_end_a_meeting_the_one_of_those_that_left_is_never_larger(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later meeting could take itself for over, and delete its keys, while ranks are in it."""
    number = 0
    while True:
        mortal, store = Mortal(monkeypatch), Interrupted()
        *others, last = come(store, size)
        leave_all(others)
        if mortal.act(store, number, partial(leave, last)) is None:
            break
        for came, left in (("comings", "left"), (own_sight(), f"{own_sight()}/left")):
            numbers = [
                int(store.all.get(key)) if store.all.check([key]) else 0
                for key in (f"attendance/{came}", f"attendance/{left}")
            ]
            assert numbers[0] >= numbers[1], f"before request {number}"
        number += 1
    assert number > 3
