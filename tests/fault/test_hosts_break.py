"""A rank of one of several hosts is killed, late, or makes another call: every survivor says which and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.connecting import over_hosts
from tests.support.ranks import Member, run_ranks

from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.transports.contract import Communicator

SUM = dist.ReduceOp.SUM.value
SMALL, LARGE = 8, 3_000_000

OPERATIONS: dict[str, Callable[[Communicator, int], None]] = {
    "all_reduce": lambda c, count: c.all_reduce(torch.ones(count), SUM),
    "broadcast": lambda c, count: c.broadcast(torch.ones(count), 0),
    "all_gather": lambda c, count: c.all_gather([torch.empty(count) for _ in range(c.size)], torch.ones(count)),
    "reduce_scatter": lambda c, count: c.reduce_scatter(torch.empty(count), [torch.ones(count)] * c.size, SUM),
    "barrier": lambda c, count: c.barrier(),
}


def halves(rank: int, size: int) -> int:
    return rank * 2 // size


def group(member: Member) -> Communicator:
    return over_hosts(member.store(), member.rank, member.size, halves, timedelta(seconds=60))


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 2), (4, 0), (4, 2), (4, 3)])
def test_survivors_name_a_rank_that_is_killed(size: int, victim: int, operation: str, count: int) -> None:
    def body(member: Member) -> Any:
        communicator = group(member)
        communicator.barrier()
        if member.rank == victim:
            time.sleep(0.2)  # the others are in the operation
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            while True:
                OPERATIONS[operation](communicator, count)
        with pytest.raises(PeerLost):
            communicator.barrier()  # it stays broken
        communicator.close()
        return caught.value.group_rank, str(caught.value)

    for outcome in run_ranks(body, size):
        if outcome.rank != victim:
            assert outcome.error is None, outcome.traceback
            rank, text = outcome.value
            assert rank == victim, text
            assert f"rank {victim} of the group" in text
            assert f"host {halves(victim, size)}" in text or "pid" in text


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_calls_that_differ_between_hosts_are_shown_from_both(odd: int) -> None:
    def body(member: Member) -> str:
        communicator = group(member)
        with pytest.raises(CollectiveMismatch) as caught:
            communicator.all_reduce(torch.ones(3 if member.rank == odd else 4), SUM)
        communicator.close()
        return str(caught.value)

    for outcome in run_ranks(body, 4):
        assert outcome.error is None, outcome.traceback
        assert "all_reduce(float32[4], sum)" in outcome.value
        assert f"rank {odd}: all_reduce(float32[3], sum)" in outcome.value


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_rank_that_does_not_come_ends_the_wait_of_all(late: int) -> None:
    def body(member: Member) -> str:
        communicator = group(member)
        communicator.barrier()
        communicator.set_timeout(timedelta(seconds=3))  # not before: to make the group may take longer
        if member.rank == late:
            return (member.folder / "over").as_posix() if wait_for(member, 3) else ""
        with pytest.raises(CollectiveTimeout) as caught:
            communicator.barrier()
        (member.folder / f"over{member.rank}").touch()
        communicator.close()
        return str(caught.value)

    for outcome in run_ranks(body, 4):
        assert outcome.error is None, outcome.traceback
        if outcome.rank != late:
            assert str(late) in outcome.value


def wait_for(member: Member, others: int) -> bool:
    until = time.monotonic() + 120
    while len(list(member.folder.glob("over*"))) < others and time.monotonic() < until:
        time.sleep(0.05)
    return True
