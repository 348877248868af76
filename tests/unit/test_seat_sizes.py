"""Processes that come with different world sizes, and at which moment of the meeting who hears of the other."""

from __future__ import annotations

import os
from itertools import count

import pytest
from tests.support.interrupted import Interrupted
from tests.support.waiting_seats import (
    Clock,
    Waiting,
    check_next_world,
    clock,
    everybody,
    nobody_sees_the_others,
    wait_on,
)

__all__ = ["clock", "everybody"]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 2), (2, 2, 3, 3, 3), (2, 3, 4)])
def test_processes_of_different_world_sizes_are_told(
    sizes: tuple[int, ...], everybody: list[Waiting], clock: Clock
) -> None:
    """One of each size; the others of that size hear from it where they meet."""
    store = Interrupted()
    ranks = [Waiting(store, rank, size, everybody) for rank, size in enumerate(sizes)]
    for rank in ranks:
        rank.come()
        wait_on(clock, looks=1)
    began = clock.now

    def told() -> set[int]:
        return {size for rank, size in zip(ranks, sizes, strict=True) if rank.error is not None}

    wait_on(clock, lambda: told() == {*sizes})
    assert told() == {*sizes}
    assert clock.now < began + 1.0
    for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        if rank.error is None:
            rank.give_up()
            continue
        assert f", and rank {number} (pid {os.getpid()} on " in str(rank.error)
        assert f") has {size}. " in str(rank.error)
        assert f"came with WORLD_SIZE {size}" not in str(rank.error)
        assert "came with WORLD_SIZE " in str(rank.error)
        assert rank.error.rank != number
    check_next_world(store, everybody, clock, 3)


@pytest.mark.parametrize("looker", [0, 1])
def test_two_of_different_sizes_are_told_whenever_the_other_one_looks(
    looker: int, everybody: list[Waiting], clock: Clock
) -> None:
    for number in count():
        everybody.clear()
        store = Interrupted()
        ranks = [Waiting(store, 0, 2, everybody), Waiting(store, 1, 3, everybody)]
        for rank in ranks:
            rank.come()
        store.something, store.requests_until = ranks[1 - looker].look, number
        for _ in range(12):
            ranks[looker].look()
            clock.now += 0.1
            if store.requests_until < 0:
                break
        done = store.requests_until >= 0
        store.requests_until = -1
        wait_on(clock, lambda: all(rank.error for rank in ranks))  # noqa: B023 - it is called now
        assert all("came with WORLD_SIZE" in str(rank.error) for rank in ranks), number
        if done:
            break
    assert number > 4


def test_a_size_that_a_dead_process_has_left_is_nobodys(
    everybody: list[Waiting], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Interrupted()
    with nobody_sees_the_others(monkeypatch):
        dead = Waiting(store, 2, 3, everybody)
        dead.come()
        wait_on(clock, looks=3)
        dead.die()
        ranks = [Waiting(store, rank, 2, everybody) for rank in range(2)]
        for rank in ranks:
            rank.come()
            wait_on(clock)
        assert [rank.error for rank in ranks] == [None, None]
        for rank in ranks:
            rank.meet()
    assert store.num_keys() == 1  # the seat of the one that has died
    check_next_world(store, everybody, clock, 2)


@pytest.mark.parametrize("way", ["gives up", "dies"])
def test_one_that_goes_at_once_with_its_wrong_size_disturbs_nobody(
    way: str, everybody: list[Waiting], clock: Clock
) -> None:
    store = Interrupted()
    waiting = Waiting(store, 0, 2, everybody)
    waiting.come()
    wait_on(clock, looks=3)
    wrong = Waiting(store, 1, 3, everybody)
    wrong.come()
    wait_on(clock, looks=3)
    (wrong.give_up if way == "gives up" else wrong.die)()
    right = Waiting(store, 1, 2, everybody)
    right.come()
    wait_on(clock)
    for rank in (waiting, right):
        rank.meet()
        assert rank.error is None
    assert store.num_keys() == 0


def test_a_program_that_tries_a_smaller_world_is_not_refused_for_those_that_are_about_to(
    everybody: list[Waiting], clock: Clock
) -> None:
    store = Interrupted()
    ranks = [Waiting(store, rank, 3, everybody) for rank in range(2)]
    for rank in ranks:
        rank.come()
    wait_on(clock, looks=5)
    ranks[0].give_up()
    again = [Waiting(store, 0, 2, everybody)]
    again[0].come()
    wait_on(clock, looks=3)  # the other one gives up a little later
    ranks[1].give_up()
    again.append(Waiting(store, 1, 2, everybody))
    again[1].come()
    wait_on(clock)
    for rank in again:
        rank.meet()
        assert rank.error is None
    assert store.num_keys() == 0
