"""A rank is killed, and the others leave it out and go on, in the same processes: torch's way, and torchft's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.constellations import WAYS, accumulated, summed
from tests.support.inventory import held_by, shared_memory_files
from tests.support.islands import pretend_host
from tests.support.ranks import Member, run_ranks, values

from phalanx.errors import PeerLost

ways = pytest.mark.parametrize("way", WAYS)
places = pytest.mark.parametrize("hosts", [1, 2], ids=["one-host", "two-hosts"])
Way = Callable[[Member], Any]


def meet(member: Member, name: str, ranks: Sequence[int]) -> None:
    member.say(f"{name}-{member.rank}")
    member.await_said(*(f"{name}-{rank}" for rank in ranks))


@pytest.mark.parametrize(
    ("size", "lost"),
    [(4, [1, 3]), *(pytest.param(size, lost, marks=pytest.mark.long) for size, lost in [(3, [1]), (2, [0]), (5, [4])])],
)
@places
@ways
def test_survivors_go_on_without_the_lost_ranks(way: Way, hosts: int, size: int, lost: list[int]) -> None:
    """They are in a collective when these are killed, of two hosts a whole one, and have another one queued."""
    others = [rank for rank in range(size) if rank not in lost]

    def body(member: Member) -> tuple[list[str], dict[str, int]]:
        if hosts > 1:
            pretend_host(member.rank % hosts)
        mine = way(member)
        mine.change(1, range(size))
        assert summed(mine.group, 1.0) == [float(size)] * 4
        member.meet("all")
        if member.rank in lost:
            os.kill(os.getpid(), signal.SIGKILL)
        works = [mine.group.allreduce([torch.ones(9)], dist.AllreduceOptions()) for _ in range(2)]
        texts = []
        for work in works:
            with pytest.raises(PeerLost) as caught:
                work.wait()
            texts.append(str(caught.value))
            del caught
        del works, work
        before: Any = None
        for number in range(2, 12):
            mine.change(number, others)
            assert (mine.group.rank(), mine.group.size()) == (others.index(member.rank), len(others))
            assert summed(mine.group, 1.0) == [float(len(others))] * 4
            meet(member, str(number), others)
            before = before or held_by(os.getpid())
        found = accumulated(before, os.getpid(), 9, hosts)
        meet(member, "counted", others)
        mine.end()
        return texts, found

    files = shared_memory_files()
    outcomes = run_ranks(body, size)
    assert [outcomes[rank].signal for rank in lost] == [signal.SIGKILL] * len(lost)
    for texts, left in values([outcomes[rank] for rank in others]):
        assert left == {}
        assert all(any(f"rank {rank} of the group" in text for rank in lost) for text in texts), texts
    assert shared_memory_files() <= files


@places
@ways
def test_new_process_takes_the_place_of_a_lost_one(way: Way, hosts: int) -> None:
    """The one that comes is started after the loss, and has a number of its own in the job."""
    others, lost, newcomer = [0, 1], 2, 3

    def body(member: Member) -> list[float]:
        if member.rank == newcomer:
            member.await_said("found-0", "found-1")
        if hosts > 1:
            pretend_host(member.rank % hosts)
        mine = way(member)
        if member.rank != newcomer:
            mine.change(1, [*others, lost])
            assert summed(mine.group, 1.0) == [3.0] * 4
            meet(member, "summed", [*others, lost])
            if member.rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerLost, match="rank 2 "):
                mine.group.barrier(dist.BarrierOptions()).wait()
            member.say(f"found-{member.rank}")
        mine.change(2, [*others, newcomer])
        found = summed(mine.group, member.rank + 1.0)
        meet(member, "done", [*others, newcomer])
        mine.end()
        return found

    outcomes = run_ranks(body, 4)
    assert outcomes[lost].signal == signal.SIGKILL
    assert values([*outcomes[:2], outcomes[newcomer]]) == [[7.0] * 4] * 3
