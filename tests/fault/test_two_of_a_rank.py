"""Two processes of one rank, and processes with different world sizes, in a store of torch's: both sides are told soon.

The store is one that a launcher keeps, as torchrun's agent does, or rank 0's own.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fault.test_gone_in_first_init import LIMIT_S, fall_at, join, leave, ranks_of, under_launcher
from tests.support.golden import check_told
from tests.support.ranks import Member, Outcome, on_ranks
from tests.support.stores import tcp_store

from phalanx.errors import InitializationError
from phalanx.system.host import machine_name
from phalanx.system.sight import own_sight
from phalanx.transports import attendance, seat
from phalanx.transports.shm import segment


def as_ranks(
    places: Sequence[tuple[int, int]], body: Callable[[Member], Any], *, torchrun: bool = True
) -> list[Outcome]:
    outcomes = under_launcher(places, body, torchrun=torchrun)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
    return outcomes


def refusal(by: str = "torch") -> tuple[str, float, int]:
    """What this process is told as it joins, after how many seconds, and its process id."""
    began = time.monotonic()
    try:
        join(by)
    except InitializationError as error:
        return str(error), time.monotonic() - began, os.getpid()
    return "", time.monotonic() - began, os.getpid()


def on_host(name: str) -> None:
    """This process sees none of the processes of other hosts."""
    for place in (attendance, seat):
        pytest.MonkeyPatch().setattr(place, "own_sight", lambda: f"{own_sight()}-{name}")


def two_of(rank: int) -> list[tuple[int, int]]:
    """Three processes of a world of three, of which two are the same rank."""
    return [(0 if rank else 1, 3), (rank, 3), (rank, 3)]


def check_twice(text: str, rank: int, pids: Sequence[int]) -> None:
    """This is what a process is told if these two are the same rank."""
    a, b = pids
    check_told("twice.store", text, {"rank": rank, "a": a, "b": b, "host": machine_name(), "last rank": 2})


def check_sizes(text: str, places: Sequence[tuple[int, int]], pids: Sequence[int]) -> None:
    """This is what a process is told if processes of these ranks and world sizes, with these pids, meet."""
    # The first is a rank that has failed with this before, or the one that the others are about.
    named = [int(rank) for rank in re.findall(r"rank (\d) \(pid", text)]
    failed, its, own = named[0], *named[-2:]
    facts: dict[str, object] = {"host": machine_name()}
    for which, number in {"failed": failed, "its": its, "own": own}.items():
        ((pid, size),) = [(pid, size) for pid, (rank, size) in zip(pids, places, strict=True) if rank == number]
        facts |= {f"{which} rank": number, f"{which} pid": pid, f"{which} size": size, f"{which} last": size - 1}
    assert facts["its size"] != facts["own size"]
    check_told("world-sizes.store", text, facts)


@pytest.mark.parametrize(
    ("by", "rank", "hosts", "torchrun"),
    [
        ("init", 2, 2, True),
        ("torch", 0, 1, True),
        ("torch", 2, 1, False),
        pytest.param("init", 1, 1, True, marks=pytest.mark.long),
        pytest.param("torch", 2, 2, True, marks=pytest.mark.long),
    ],
)
def test_both_processes_of_a_rank_name_each_other(by: str, rank: int, hosts: int, torchrun: bool) -> None:
    """And a world is made in that store afterwards, unless it is rank 0's."""
    places = two_of(rank)

    def body(member: Member) -> tuple[str, float, int]:
        if hosts > 1:
            on_host(str(member.rank % hosts))
        told = refusal(by)
        if torchrun:
            member.say(f"told-{member.rank}")
            member.await_said("told-0", "told-1", "told-2")
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(member.rank)
            join(by)
            dist.all_reduce(ones := torch.ones(4))
            assert ones.tolist() == [3] * 4
            leave(by)
        return told

    values = [outcome.value for outcome in as_ranks(places, body, torchrun=torchrun)]
    pids = [values[number][2] for number, (own, _) in enumerate(places) if own == rank]
    for (text, took_s, _), (own, _) in zip(values, places, strict=True):
        if torchrun or own == rank:
            assert took_s < LIMIT_S, text
            check_twice(text, rank, pids)
            assert text.startswith(f"rank {rank} is there twice: ") or own != rank


@pytest.mark.parametrize(
    ("places", "hosts", "torchrun"),
    [
        ([(0, 3), (1, 3), (2, 2)], 1, True),
        ([(0, 2), (1, 3)], 1, False),
        pytest.param([(0, 2), (1, 3)], 2, True, marks=pytest.mark.long),
    ],
)
def test_processes_with_different_world_sizes_name_each_other(
    places: list[tuple[int, int]], hosts: int, torchrun: bool
) -> None:
    def body(member: Member) -> tuple[str, float, int]:
        if hosts > 1:
            on_host(str(member.rank % hosts))
        return refusal()

    values = [outcome.value for outcome in as_ranks(places, body, torchrun=torchrun)]
    for (text, took_s, pid), (rank, size) in zip(values, places, strict=True):
        assert took_s < LIMIT_S, text
        others = [f"pid {value[2]} on " for value, (_, other) in zip(values, places, strict=True) if other != size]
        assert any(other in text for other in others), text
        check_sizes(text, places, [pid for _, _, pid in values])
        if len(others) == len(places) - 1:
            assert f"and rank {rank} (pid {pid} on " in text
            assert f") has {size}. Give all processes the same" in text


@pytest.mark.parametrize("seen", [True, False])
def test_rank_that_was_killed_as_it_waited_is_replaced_in_the_same_store(seen: bool) -> None:
    """The others come when it has been replaced; if it was alone on its host, nobody sees that it has gone."""

    def body(member: Member) -> float:
        number = member.rank
        if not seen:
            on_host(str(number))
        own = segment._await_offer

        def come(*arguments: Any) -> bytes:
            member.say("has come again")
            return own(*arguments)

        if number == 3:
            fall_at(segment, "_await_offer", lambda: kill_oneself(member))
        elif number == 2:
            member.await_said("over-3")
            pytest.MonkeyPatch().setattr(segment, "_await_offer", come)
        else:
            member.await_said("has come again")
        join("torch")
        ones = torch.ones(4)
        dist.all_reduce(ones)
        leave("torch")
        return ones[0].item()

    def kill_oneself(member: Member) -> None:
        member.say("over-3")
        os.kill(os.getpid(), signal.SIGKILL)

    *ranks, killed = as_ranks([*ranks_of(3), (2, 3)], body)
    assert killed.signal == signal.SIGKILL
    assert [outcome.value for outcome in ranks] == [3] * 3


def test_worlds_in_one_store_come_and_go_with_other_ranks() -> None:
    """Each process has another rank in each world, as when programs go on after a loss."""

    def body(member: Member) -> int:
        store = tcp_store(member)
        for number in range(4):
            rank, timeout = (member.rank + number) % 3, timedelta(seconds=LIMIT_S)
            dist.init_process_group("phalanx", store=store, rank=rank, world_size=3, timeout=timeout)
            ones = torch.ones(4)
            dist.all_reduce(ones)
            assert ones.tolist() == [3] * 4
            dist.destroy_process_group()
        member.meet("done")
        left = [rank for rank in range(3) if store.check([f"default_pg//phalanx/0/seats/{rank}"])]
        member.meet("counted")
        return len(left)

    assert on_ranks(body, 3) == [0] * 3
