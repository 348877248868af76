"""Two processes of one rank, and processes with different world sizes, in a store of torch's: both sides are told soon.

The store is one that a launcher keeps, as torchrun's agent does, or rank 0's own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fault.test_gone_in_first_init import LIMIT_S, fall_at, join, leave, ranks_of, under_launcher
from tests.support.ranks import Member, values

from phalanx.errors import InitializationError
from phalanx.membership import store_protocol
from phalanx.membership.registration import Registration
from phalanx.system.host import machine_name
from phalanx.system.processes import own_sight
from phalanx.transports.shm import segment

long = pytest.mark.long
Places = Sequence[tuple[int, int]]  # the rank of each process, and the world size that it comes with


def refusal(by: str = "torch") -> tuple[str, int]:
    """What this process is told as it joins, long before the timeout, and its process id."""
    began, said = time.monotonic(), ""
    try:
        join(by)
    except InitializationError as error:
        said = str(error)
    assert time.monotonic() - began < LIMIT_S, said
    return said, os.getpid()


def come_together(member: Member, places: Places) -> None:
    """Let nobody come after the failure, and so take it for one of an earlier attempt."""
    own = Registration._come

    def come(registration: Registration) -> None:
        member.say(f"comes-{member.rank}")
        member.await_said(*(f"comes-{number}" for number in range(len(places))))
        own(registration)

    pytest.MonkeyPatch().setattr(Registration, "_come", come)


def on_host(number: int) -> None:
    """This process sees none of the processes of other hosts."""
    pytest.MonkeyPatch().setattr(store_protocol, "own_sight", lambda: f"{own_sight()}-{number}")


@pytest.mark.parametrize(
    ("by", "rank", "hosts", "torchrun"),
    [
        ("init", 2, 2, True),
        ("torch", 0, 1, True),
        ("torch", 2, 1, False),
        pytest.param("init", 1, 1, True, marks=long),
        pytest.param("torch", 2, 2, True, marks=long),
    ],
)
def test_both_processes_of_a_rank_name_each_other(by: str, rank: int, hosts: int, torchrun: bool) -> None:
    """And a world is made in that store afterwards, unless it is rank 0's."""
    places = [(0 if rank else 1, 3), (rank, 3), (rank, 3)]

    def body(member: Member) -> tuple[str, int]:
        come_together(member, places)
        if hosts > 1:
            on_host(member.rank % hosts)
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

    told = values(under_launcher(places, body, torchrun=torchrun))
    (_, a), (_, b) = told[1:]
    for (text, _), (own, _) in zip(told, places, strict=True):
        if torchrun or own == rank:
            first, second = (f"pid {pid} on {machine_name()}" for pid in (a, b))
            assert f"rank {rank} is there twice: {first} and {second}. Give each" in text or (
                f"rank {rank} is there twice: {second} and {first}. Give each process its own RANK" in text
            )
            assert text.startswith(f"rank {rank} is there twice") or own != rank, text


@pytest.mark.parametrize(
    ("places", "hosts", "torchrun"),
    [
        ([(0, 3), (1, 3), (2, 2)], 1, True),
        ([(0, 2), (1, 3)], 1, False),
        pytest.param([(0, 2), (1, 3)], 2, True, marks=long),
    ],
)
def test_processes_with_different_world_sizes_name_each_other(places: Places, hosts: int, torchrun: bool) -> None:
    def body(member: Member) -> tuple[str, int]:
        come_together(member, places)
        if hosts > 1:
            on_host(member.rank % hosts)
        return refusal()

    told = values(under_launcher(places, body, torchrun=torchrun))
    pids = [pid for _, pid in told]
    for (text, pid), (rank, size) in zip(told, places, strict=True):
        assert " came with WORLD_SIZE " in text
        assert ". Give all processes the same" in text
        others = [f"pid {pids[number]} on " for number, (_, other) in enumerate(places) if other != size]
        assert any(other in text for other in others), text
        if len(others) == len(places) - 1:
            assert f"rank {rank} (pid {pid} on " in text
            assert f" {size}" in text.partition("came with")[2]


@pytest.mark.parametrize("seen", [False, pytest.param(True, marks=long)])
def test_rank_that_was_killed_as_it_waited_is_replaced_in_the_same_store(seen: bool) -> None:
    """The others come when it has been replaced; if it was alone on its host, nobody sees that it has gone."""

    def body(member: Member) -> float:
        own: Callable[..., bytes] = segment._await_offer

        def come(*arguments: Any) -> bytes:
            member.say("has come again")
            return own(*arguments)

        def fall() -> None:
            member.say("over-3")
            os.kill(os.getpid(), signal.SIGKILL)

        if not seen:
            on_host(member.rank)
        if member.rank == 3:
            fall_at(segment, "_await_offer", fall)
        elif member.rank == 2:
            member.await_said("over-3")
            pytest.MonkeyPatch().setattr(segment, "_await_offer", come)
        else:
            member.await_said("has come again")
        join("torch")
        ones = torch.ones(4)
        dist.all_reduce(ones)
        leave("torch")
        return ones[0].item()

    *ranks, killed = under_launcher([*ranks_of(3), (2, 3)], body)
    assert killed.signal == signal.SIGKILL
    assert values(ranks) == [3] * 3
