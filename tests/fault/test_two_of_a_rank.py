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
from tests.fault.test_gone_in_first_init import LIMIT_S, as_launched, fall_at, join, leave
from tests.support.golden import check_told
from tests.support.ports import held_port
from tests.support.ranks import Member, Outcome, run_ranks
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from phalanx.errors import InitializationError
from phalanx.system.host import machine_name
from phalanx.system.sight import own_sight
from phalanx.transports import attendance, seat
from phalanx.transports.shm import segment

Body = Callable[[Member, int], Any]


def as_ranks(places: Sequence[tuple[int, int]], body: Body, *, torchrun: bool = True) -> list[Outcome]:
    """Run processes with these ranks and world sizes in their environments; ``body`` is told which of them it is.

    Under ``torchrun`` a further process keeps their store.
    """
    with held_port() as port:

        def started(member: Member) -> Any:
            if member.rank == len(places):
                store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
                member.say("kept")
                while any(not (member.folder / f"over-{number}").exists() for number in range(len(places))):
                    time.sleep(0.01)
                del store
                return None
            if torchrun:
                member.await_said("kept")
            number, (rank, size) = member.rank, places[member.rank]
            as_launched(Member(rank, size, member.folder), size, port, torchrun)
            try:
                return body(member, number)
            finally:
                member.say(f"over-{number}")

        outcomes = run_ranks(started, len(places) + torchrun)[: len(places)]
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


def two_of(rank: int, size: int) -> list[tuple[int, int]]:
    """As many processes as ranks, of which two are the same."""
    others = [other for other in range(size) if other != rank][: size - 2]
    return [*((other, size) for other in others), (rank, size), (rank, size)]


def check_twice(text: str, rank: int, size: int, pids: Sequence[int]) -> None:
    """This is what a process is told if these two are the same rank of a world of this size."""
    a, b = pids
    check_told("twice.store", text, {"rank": rank, "a": a, "b": b, "host": machine_name(), "last rank": size - 1})


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


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (5, 3)])
@pytest.mark.parametrize("by", ["init", "torch"])
def test_both_processes_of_a_rank_name_each_other(by: str, size: int, rank: int, hosts: int) -> None:
    places = two_of(rank, size)

    def body(member: Member, number: int) -> tuple[str, float, int]:
        if hosts > 1:
            on_host(str(number % hosts))
        return refusal(by)

    values = [outcome.value for outcome in as_ranks(places, body)]
    pids = [values[number][2] for number, (own, _) in enumerate(places) if own == rank]
    for (text, took_s, _), (own, _) in zip(values, places, strict=True):
        assert took_s < LIMIT_S, text
        check_twice(text, rank, size, pids)
        assert text.startswith(f"rank {rank} is there twice: ") or own != rank


@pytest.mark.parametrize("size", [3, 5])
def test_they_do_where_rank_0_has_the_store(size: int) -> None:
    places = two_of(size - 1, size)
    values = [outcome.value for outcome in as_ranks(places, lambda *_: refusal(), torchrun=False)]
    for text, took_s, _ in values[-2:]:
        assert took_s < LIMIT_S
        assert text.startswith(f"rank {size - 1} is there twice: ")
        check_twice(text, size - 1, size, [pid for _, _, pid in values[-2:]])


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    "places",
    [[(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 3), (1, 3), (2, 2)], [(0, 5), (1, 5), (2, 6), (3, 5), (4, 5)]],
)
def test_processes_with_different_world_sizes_name_each_other(places: list[tuple[int, int]], hosts: int) -> None:
    def body(member: Member, number: int) -> tuple[str, float, int]:
        if hosts > 1:
            on_host(str(number % hosts))
        return refusal()

    values = [outcome.value for outcome in as_ranks(places, body)]
    for (text, took_s, pid), (rank, size) in zip(values, places, strict=True):
        assert took_s < LIMIT_S, text
        others = [f"pid {value[2]} on " for value, (_, other) in zip(values, places, strict=True) if other != size]
        assert any(other in text for other in others), text
        check_sizes(text, places, [pid for _, _, pid in values])
        if len(others) == len(places) - 1:
            assert f"and rank {rank} (pid {pid} on " in text
            assert f") has {size}. Give all processes the same" in text


def test_they_do_where_one_of_them_has_the_store() -> None:
    values = [outcome.value for outcome in as_ranks([(0, 2), (1, 3)], lambda *_: refusal(), torchrun=False)]
    (of_0, _, pid_0), (of_1, _, pid_1) = values
    assert of_0.startswith(f"rank 1 (pid {pid_1} on ")
    assert of_1.startswith(f"rank 0 (pid {pid_0} on ")
    for text, took_s, _ in values:
        check_sizes(text, [(0, 2), (1, 3)], [pid_0, pid_1])
        assert took_s < LIMIT_S


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("by", ["init", "torch"])
def test_a_world_is_made_in_the_store_in_which_two_of_a_rank_met(by: str, size: int) -> None:
    places = two_of(size - 1, size)

    def body(member: Member, number: int) -> float:
        text, _, _ = refusal(by)
        assert f"rank {size - 1} is there twice" in text
        member.say(f"told-{number}")
        member.await_said(*(f"told-{other}" for other in range(size)))
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        join(by)
        ones = torch.ones(4)
        dist.all_reduce(ones)
        leave(by)
        return ones[0].item()

    assert [outcome.value for outcome in as_ranks(places, body)] == [size] * size


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_was_killed_as_it_waited_is_replaced_in_the_same_store(size: int, seen: bool) -> None:
    """The others come when it has been replaced; if it was alone on its host, nobody sees that it has gone."""

    def body(member: Member, number: int) -> float:
        if not seen:
            on_host(str(number))
        own = segment._await_offer

        def come(*arguments: Any) -> bytes:
            member.say("has come again")
            return own(*arguments)

        if number == size:
            fall_at(segment, "_await_offer", lambda: kill_oneself(member, number))
        elif number == size - 1:
            member.await_said(f"over-{size}")
            pytest.MonkeyPatch().setattr(segment, "_await_offer", come)
        else:
            member.await_said("has come again")
        join("torch")
        ones = torch.ones(4)
        dist.all_reduce(ones)
        leave("torch")
        return ones[0].item()

    def kill_oneself(member: Member, number: int) -> None:
        member.say(f"over-{number}")
        os.kill(os.getpid(), signal.SIGKILL)

    *ranks, killed = as_ranks([*((rank, size) for rank in range(size)), (size - 1, size)], body)
    assert killed.signal == signal.SIGKILL
    assert [outcome.value for outcome in ranks] == [size] * size


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_worlds_in_one_store_come_and_go_with_other_ranks_and_leave_no_seats(kind: str, size: int) -> None:
    """Each process has another rank in each world, as when programs go on after a loss."""
    worlds = 10

    def store_of(member: Member, port: int) -> Store:
        if kind == "file":
            return FileStore(str(member.folder / "store"), size)
        return TCPStore("127.0.0.1", port, is_master=member.rank == 0, wait_for_workers=False)

    def body(member: Member, port: int) -> int:
        if member.rank:
            member.await_said("opened")
        store = store_of(member, port)
        member.say("opened")
        for number in range(worlds):
            dist.init_process_group(
                "phalanx",
                store=store,
                rank=(member.rank + number) % size,
                world_size=size,
                timeout=timedelta(seconds=LIMIT_S),
            )
            ones = torch.ones(4)
            dist.all_reduce(ones)
            assert ones.tolist() == [size] * 4
            dist.destroy_process_group()
        member.meet("done")
        left = [rank for rank in range(size) if store.check([f"default_pg//phalanx/0/seats/{rank}"])]
        member.meet("counted")
        return len(left)

    with held_port() as port:
        outcomes = run_ranks(lambda member: body(member, port), size)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
    assert [outcome.value for outcome in outcomes] == [0] * size
