"""UCX between hosts: a rank is killed, late, or makes another call, and every survivor says which."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.connecting import PLACEMENTS, needs_ucx, over_hosts, ucx_engine
from tests.support.ranks import Member, run_ranks

from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.lane import TransferFailed, TransferLate

pytestmark = needs_ucx

SUM = dist.ReduceOp.SUM.value
OPERATIONS: dict[str, Callable[[Communicator, int], None]] = {
    "all_reduce": lambda c, count: c.all_reduce(torch.ones(count), SUM),
    "broadcast": lambda c, count: c.broadcast(torch.ones(count), 0),
}


def group(member: Member, timeout_s: float = 60.0) -> Communicator:
    return over_hosts(
        member.store(), member.rank, member.size, PLACEMENTS["two hosts"], timedelta(seconds=timeout_s), ucx_engine
    )


@pytest.mark.parametrize("count", [8, 3_000_000])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 2), (4, 0)])
def test_survivors_name_a_rank_that_is_killed(size: int, victim: int, operation: str, count: int) -> None:
    def body(member: Member) -> tuple[int, str]:
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
            assert outcome.value[0] == victim, outcome.value


def test_a_call_that_differs_inside_a_host_ends_the_connecting_of_the_other() -> None:
    """The host that finds it never publishes an address, for which the other one waits."""

    def body(member: Member) -> float:
        communicator, began = group(member), time.monotonic()
        with pytest.raises(CollectiveMismatch):
            communicator.all_reduce(torch.ones(3 if member.rank == 0 else 4), SUM)
        communicator.close()
        return time.monotonic() - began

    for outcome in run_ranks(body, 4):
        assert outcome.error is None, outcome.traceback
        assert outcome.value < 30.0  # the group's timeout is a minute


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    def body(member: Member) -> str:
        communicator = group(member, timeout_s=3.0)
        communicator.barrier()
        over = member.folder / "over"
        if member.rank == 1:
            while not over.exists():
                time.sleep(0.05)
            communicator.close()
            return ""
        with pytest.raises(CollectiveTimeout) as caught:
            communicator.barrier()
        over.touch()
        communicator.close()
        return str(caught.value)

    outcomes = run_ranks(body, 2)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].traceback or outcomes[1].traceback
    assert "rank 1" in outcomes[0].value


def test_a_transfer_that_nobody_answers_ends_with_the_timeout_or_the_group() -> None:
    def body(member: Member) -> tuple[type, type]:
        engine = ucx_engine(member.store(), member.rank, 2, timedelta(seconds=60))
        peer, memory = 1 - member.rank, torch.zeros(1000)
        coming = engine.recv(memory, peer, 0)
        engine.send(torch.ones(1000), peer, 0).wait()
        coming.wait()
        assert memory.eq(1).all()
        engine.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(TransferLate) as late:
            engine.recv(memory, peer, 5).wait()
        (member.folder / f"late{member.rank}").touch()
        while not (member.folder / f"late{peer}").exists():
            time.sleep(0.01)
        waits = engine.recv(memory, peer, 6)
        engine.abort()
        with pytest.raises(TransferFailed) as aborted:
            waits.wait()
        engine.close()
        return late.type, aborted.type

    for outcome in run_ranks(body, 2):
        assert outcome.error is None, outcome.traceback
        assert outcome.value == (TransferLate, TransferFailed)
