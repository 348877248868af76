"""Seats of a world that is being made: two processes of one rank, at every point between requests to the store."""

from __future__ import annotations

import contextlib
import os
import threading
from itertools import count

import pytest
from tests.support.interrupted import Interrupted
from tests.support.waiting_seats import (
    Clock,
    Death,
    Waiting,
    check_next_world,
    clock,
    everybody,
    nobody_sees_the_others,
    wait_on,
)
from torch._C._distributed_c10d import HashStore

from phalanx.errors import InitializationError
from phalanx.transports.seat import Seat

__all__ = ["clock", "everybody"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_world_costs_two_requests_a_rank_and_leaves_nothing(size: int, clock: Clock) -> None:
    store = Interrupted()
    for _ in range(3):
        store.log.clear()
        ranks = [Seat(store, rank, size) for rank in range(size)]
        for rank in ranks:
            rank.take()
        for rank in ranks:
            rank.leave()
            rank.give_back()
            rank.check()
        assert len(store.log) == 2 * size
        assert store.num_keys() == 0
    assert clock.now == 0.0


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_wait_for_each_other_leave_nothing(size: int, everybody: list[Waiting], clock: Clock) -> None:
    store = Interrupted()
    ranks = [Waiting(store, rank, size, everybody) for rank in range(size)]
    for rank in ranks:
        rank.come()
        wait_on(clock, looks=3)
    for rank in ranks:
        rank.meet()
    assert [rank.error for rank in ranks] == [None] * size
    assert store.num_keys() == 0


@pytest.mark.parametrize("claimants", [2, 3, 5])
def test_all_processes_of_a_rank_are_told(claimants: int, everybody: list[Waiting], clock: Clock) -> None:
    store = Interrupted()
    bystander = Waiting(store, 0, 9, everybody)
    bystander.come()
    ranks = [Waiting(store, 1, 9, everybody) for _ in range(claimants)]
    for rank in ranks:
        rank.come()
        rank.is_busy = True  # until all have come
    for rank in ranks:
        rank.is_busy = False
    began = clock.now
    wait_on(clock, lambda: all(rank.error for rank in ranks))
    assert clock.now < began + 1.0
    for rank in ranks:
        assert str(rank.error).startswith("rank 1 is there "), rank.error
        assert rank.error is not None
        assert (rank.error.rank, rank.error.pid) == (1, os.getpid())
    assert bystander.error is None
    bystander.give_up()
    check_next_world(store, everybody, clock, 3)


@pytest.mark.parametrize("sees", [True, False])
def test_two_of_a_rank_are_told_whenever_the_first_one_looks(
    sees: bool, everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.nullcontext() if sees else nobody_sees_the_others(monkeypatch):
        for number in count():
            everybody.clear()
            store = Interrupted()
            first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
            first.come()
            store.something, store.requests_until = first.look, number
            second.come()
            wait_on(clock, lambda: bool(first.error and second.error))  # noqa: B023 - it is called now
            assert first.error is not None, number
            assert second.error is not None, number
            assert str(first.error).startswith("rank 1 is there twice: pid "), number
            assert str(second.error).startswith("rank 1 is there twice: pid "), number
            if store.requests_until >= 0:
                break
            store.requests_until = -1
    assert number > 4


@pytest.mark.parametrize("sees", [True, False])
def test_a_process_that_comes_while_the_other_has_met_all_is_told_or_has_an_empty_seat(
    sees: bool, everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    with contextlib.nullcontext() if sees else nobody_sees_the_others(monkeypatch):
        for number in count():
            everybody.clear()
            store = Interrupted()
            first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
            first.come()
            store.something, store.requests_until = first.meet, number
            second.come()
            if store.requests_until >= 0 or first.error is not None:
                break
            store.requests_until = -1
            told.append(second.error is not None)
            if second.error is None:
                wait_on(clock)
                second.meet()
            assert second.error is None or "One of them has met the other ranks, and this one has not" in str(
                second.error
            )
            assert store.num_keys() == 0, number
    assert True in told
    assert told == sorted(told)  # from the request on by which it takes the seat
    assert told.index(True) <= 2


def test_a_process_that_comes_while_the_other_gives_up_has_the_seat(everybody: list[Waiting], clock: Clock) -> None:
    for number in count():
        everybody.clear()
        store = Interrupted()
        first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
        first.come()

        def give_up(first: Waiting = first) -> None:
            if not first.is_over:
                first.give_up()

        store.something, store.requests_until = give_up, number
        second.come()
        if store.requests_until >= 0 or first.error is not None:
            break
        store.requests_until = -1
        wait_on(clock)
        assert second.error is None, number
        second.meet()
        assert store.check(["1"]) is False
    assert number > 2


@pytest.mark.parametrize("sees", [True, False])
def test_the_seat_of_a_process_that_has_died_is_taken(
    sees: bool, everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if it is seen dead, else a second later; then the error of a meeting that is late names it."""
    store = Interrupted()
    with contextlib.nullcontext() if sees else nobody_sees_the_others(monkeypatch):
        first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
        first.come()
        first.die()
        second.come()
        assert (clock.now == 0.0) is sees
        assert clock.now < 1.5
        wait_on(clock)
        assert second.error is None
        doubt = second.seat.doubt()
        if sees:
            assert doubt is None
        else:
            assert f"Before it another process came as this rank, pid {os.getpid()} on " in str(doubt)
        second.meet()
        assert second.seat.doubt() is None
    assert store.num_keys() <= 1  # the world's size was asked for in the name of one that is dead
    check_next_world(store, everybody, clock, 3)


def test_a_process_that_looks_only_later_tells_both(
    everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Interrupted()
    first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
    first.come()
    first.is_busy = True  # it is stopped, or opens a device
    second.come()
    assert clock.now >= 1.0
    assert second.error is None
    first.is_busy = False
    wait_on(clock, looks=3)
    assert str(first.error).startswith("rank 1 is there twice")
    assert str(second.error).startswith("rank 1 is there twice")


def test_a_second_process_that_dies_before_it_is_told_disturbs_nobody(everybody: list[Waiting], clock: Clock) -> None:
    store = Interrupted()
    first, second, third = [Waiting(store, 1, 3, everybody) for _ in range(3)]
    first.come()
    for wrong in (second, third):
        first.is_busy = True
        wrong.come()
        wrong.die()
        first.is_busy = False
        wait_on(clock, looks=3)
    assert first.error is None
    first.meet()
    assert store.num_keys() == 0


def test_a_process_with_another_size_is_told_when_the_one_that_tells_it_has_gone(
    everybody: list[Waiting], clock: Clock
) -> None:
    store = Interrupted()
    first, second = Waiting(store, 0, 2, everybody), Waiting(store, 1, 3, everybody)
    first.come()
    wait_on(clock, looks=2)
    second.come()
    second.look()
    second.is_busy = True  # it does something else, for longer than the first one waits for it
    wait_on(clock, lambda: first.is_over)
    assert first.error is not None
    second.is_busy = False
    second.look()
    assert "came with WORLD_SIZE 2" in str(second.error)


@pytest.mark.parametrize("victim", ["first", "second"])
@pytest.mark.parametrize("sees", [True, False])
def test_a_process_of_two_that_dies_before_any_of_its_requests_leaves_the_seat_to_the_next(
    sees: bool, victim: str, everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.nullcontext() if sees else nobody_sees_the_others(monkeypatch):
        for number in count():
            everybody.clear()
            store = Interrupted()
            first, second = [Waiting(store, 1, 3, everybody) for _ in range(2)]
            dying = first if victim == "first" else second

            def die() -> None:
                raise Death

            store.something = die
            with contextlib.suppress(Death):
                if dying is first:
                    store.requests_until = number
                first.come()
                if dying is second:
                    store.requests_until = number
                    first.is_busy = True  # its requests are not counted
                second.come()
                first.is_busy = False
                wait_on(clock, lambda: bool(first.error and second.error))  # noqa: B023 - it is called now
            died, store.requests_until = store.requests_until < 0, -1
            dying.die()
            first.is_busy = second.is_busy = False
            other = second if dying is first else first
            wait_on(clock)
            if not other.is_over:
                other.give_up()
            everybody.clear()
            third = Waiting(store, 1, 3, everybody)
            third.come()
            wait_on(clock)
            assert third.error is None, number
            third.meet()
            if not died:
                break
    assert number >= 3


# -- processes -------------------------------------------------------------------------------------


def test_threads_of_one_process_are_told_by_their_names() -> None:
    store = HashStore()
    said: dict[str, str] = {}

    def claim() -> None:
        mine = Seat(store, 1, 3)
        try:
            mine.take()
            while True:
                mine.check()
        except InitializationError as error:
            said[threading.current_thread().name] = str(error)
            mine.give_back()

    threads = [threading.Thread(target=claim, name=f"worker-{number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(said) == ["worker-0", "worker-1"]
    for text in said.values():
        assert "(thread worker-0)" in text
        assert "(thread worker-1)" in text


@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_that_are_ranks_have_a_seat_each(size: int) -> None:
    store = HashStore()
    failed = []

    def be(rank: int, all_here: threading.Barrier) -> None:
        try:
            for _ in range(20):
                mine = Seat(store, rank, size)
                mine.take()
                mine.check()
                all_here.wait(60)
                mine.leave()
        except Exception as error:
            failed.append(error)
            all_here.abort()

    all_here = threading.Barrier(size)
    threads = [threading.Thread(target=be, args=(rank, all_here)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert [key for key in map(str, range(size)) if store.check([key])] == []


def test_what_another_release_has_written_is_taken_for_a_process_that_nobody_knows(
    everybody: list[Waiting], clock: Clock
) -> None:
    store = Interrupted()
    store.set("1", "a seat")
    mine = Waiting(store, 1, 2, everybody)
    mine.come()
    assert mine.error is None
    store.set("1", '[{"of": "another release"}]')
    mine.look()
    assert str(mine.error).startswith("rank 1 is there twice: another process and pid ")
