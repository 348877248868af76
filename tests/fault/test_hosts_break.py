"""A rank of one of several hosts is killed, late, or makes another call: every survivor says which and where.

With each engine that there is between hosts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.connecting import ENGINES, PLACEMENTS, EngineOf, gloo_engine, needs_ucx, over_hosts, ucx_engine
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


HALVES = PLACEMENTS["two hosts"]


def group(member: Member, engine: EngineOf, timeout_s: float = 60.0) -> Communicator:
    return over_hosts(member.store(), member.rank, member.size, HALVES, timedelta(seconds=timeout_s), engine)


def kills() -> Iterator[Any]:
    """All of them with Gloo, and some with other engines."""
    for size, victim in [(2, 1), (3, 2), (4, 0), (4, 2), (4, 3)]:
        for operation in OPERATIONS:
            yield size, victim, operation, gloo_engine
            some = operation in ("all_reduce", "broadcast") and (size, victim) not in [(4, 2), (4, 3)]
            marks = [needs_ucx] if some else [needs_ucx, pytest.mark.long]
            yield pytest.param(size, victim, operation, ucx_engine, marks=marks)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize(("size", "victim", "operation", "engine"), list(kills()))
def test_survivors_name_a_rank_that_is_killed(
    size: int, victim: int, operation: str, engine: EngineOf, count: int
) -> None:
    def body(member: Member) -> Any:
        communicator = group(member, engine)
        communicator.barrier()
        member.meet("begun")  # in a barrier that a rank has left, others may still need it
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
            assert f"host {HALVES(victim, size)}" in text or "pid" in text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_calls_that_differ_between_hosts_are_shown_from_both(odd: int, engine: EngineOf) -> None:
    """With UCX, the host that finds it may never publish an address, for which the other one waits."""

    def body(member: Member) -> str:
        communicator = group(member, engine)
        with pytest.raises(CollectiveMismatch) as caught:
            communicator.all_reduce(torch.ones(3 if member.rank == odd else 4), SUM)
        communicator.close()
        return str(caught.value)

    for outcome in run_ranks(body, 4):
        assert outcome.error is None, outcome.traceback
        assert "all_reduce(float32[4], sum)" in outcome.value
        assert f"rank {odd}: all_reduce(float32[3], sum)" in outcome.value


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_rank_that_does_not_come_ends_the_wait_of_all(late: int, engine: EngineOf) -> None:
    hurried = (late + 1) % 4

    def body(member: Member) -> str:
        communicator = group(member, engine)
        communicator.barrier()
        if member.rank == late:
            return (member.folder / "over").as_posix() if wait_for(member, 3) else ""
        others = [rank for rank in range(4) if rank not in (late, hurried)]
        if member.rank == hurried:  # it gives up, and comes when the others are there, or it would miss them too
            member.await_said(*(f"comes-{rank}" for rank in others))
            communicator.set_timeout(timedelta(seconds=6))
        else:
            member.say(f"comes-{member.rank}")
        with pytest.raises(CollectiveTimeout) as caught:
            communicator.barrier()
        (member.folder / f"over{member.rank}").touch()
        communicator.close()
        return str(caught.value)

    for outcome in run_ranks(body, 4):
        assert outcome.error is None, outcome.traceback
        if outcome.rank != late:
            assert re.search(rf"rank {late} of the group .*did not come within", outcome.value), outcome.value


def wait_for(member: Member, others: int) -> bool:
    until = time.monotonic() + 120
    while len(list(member.folder.glob("over*"))) < others and time.monotonic() < until:
        time.sleep(0.05)
    return True
