"""A rank is killed, and the others leave it out and go on, in the same processes: torch's way, and torchft's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("size", "lost"),
    [
        (4, [1, 3]),  # of two hosts a whole one
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(3, [1]), (2, [0]), (2, [1]), (5, [0])]),
    ],
)
@places
@ways
def test_survivors_go_on_without_the_lost_rank(
    way: Callable[[Member], Any], hosts: int, size: int, lost: list[int]
) -> None:
    """They are in a collective when it is killed, and have another one queued."""
    everybody = list(range(size))
    others = [rank for rank in everybody if rank not in lost]

    def body(member: Member) -> tuple[list[str], dict[str, int]]:
        if hosts > 1:
            pretend_host(member.rank % hosts)
        mine = way(member)
        mine.change(1, everybody)
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
            member.say(f"{number}-{member.rank}")
            member.await_said(*(f"{number}-{other}" for other in others))
            before = before or held_by(os.getpid())
        found = accumulated(before, os.getpid(), 9, hosts)
        member.say(f"counted-{member.rank}")
        member.await_said(*(f"counted-{other}" for other in others))
        mine.end()
        return texts, found

    files = shared_memory_files()
    outcomes = run_ranks(body, size)
    assert [outcomes[rank].signal for rank in lost] == [signal.SIGKILL] * len(lost)
    for texts, left in values([outcome for outcome in outcomes if outcome.rank not in lost]):
        assert left == {}
        assert all(any(f"rank {rank} of the group" in text for rank in lost) for text in texts), texts
    assert shared_memory_files() <= files


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.long)])
@places
@ways
def test_a_new_process_takes_the_place_of_a_lost_one(way: Callable[[Member], Any], hosts: int, size: int) -> None:
    """The one that comes is started after the loss, and has a number of its own in the job."""
    others, newcomer = list(range(size - 1)), size

    def body(member: Member) -> list[float]:
        if member.rank == newcomer:
            member.await_said(*(f"found-{rank}" for rank in others))
        if hosts > 1:
            pretend_host(member.rank % hosts)
        mine = way(member)
        if member.rank != newcomer:
            mine.change(1, [*others, size - 1])
            assert summed(mine.group, 1.0) == [float(size)] * 4
            member.say(f"summed-{member.rank}")
            member.await_said(*(f"summed-{rank}" for rank in range(size)))
            if member.rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerLost, match=f"rank {size - 1} "):
                mine.group.barrier(dist.BarrierOptions()).wait()
            member.say(f"found-{member.rank}")
        mine.change(2, [*others, newcomer])
        found = summed(mine.group, member.rank + 1.0)
        member.say(f"done-{member.rank}")
        member.await_said(*(f"done-{rank}" for rank in [*others, newcomer]))
        mine.end()
        return found

    outcomes = run_ranks(body, size + 1)
    assert outcomes[size - 1].signal == signal.SIGKILL
    expected = float(sum(rank + 1 for rank in [*others, newcomer]))
    for found in values([outcome for outcome in outcomes if outcome.rank != size - 1]):
        assert found == [expected] * 4
