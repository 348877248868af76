"""Memory that the ranks of one host share beside their segment: all see it, and a rank that dies meanwhile is named."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from tests.support.ranks import Member, on_ranks, run_ranks

from phalanx.errors import PeerLost
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.shared_memory import share_memory

NBYTES = 100_000


def joined(member: Member) -> SharedMemoryCommunicator:
    return SharedMemoryCommunicator(member.store(), member.rank, member.size, timedelta(seconds=60))


def descriptors() -> list[str]:
    """The open files of this process that have no name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the folder's own
            continue
    return [each for each in found if "memfd:phalanx-shared" in each]


def test_what_a_rank_writes_before_a_collective_the_others_read_after_it() -> None:
    def body(member: Member) -> tuple[list[int], int, list[str]]:
        local = joined(member)
        memory = share_memory(local, NBYTES)
        zeros = int(memory.count_nonzero())
        local.barrier()
        memory[member.rank :: member.size] = member.rank + 1
        local.barrier()
        counts = torch.bincount(memory.int(), minlength=member.size + 1).tolist()
        local.close()
        return counts, zeros, descriptors()

    each = len(range(0, NBYTES, 4))
    assert on_ranks(body, 4) == [([0, each, each, each, each], 0, [])] * 4


@pytest.mark.parametrize("opens_after_that", [True, False])
def test_a_rank_that_dies_when_it_has_offered_the_memory_is_named(opens_after_that: bool) -> None:
    def body(member: Member) -> None:
        local = joined(member)
        if member.rank == 0:
            (member.folder / "pid").write_text(str(os.getpid()))
            member.say("written")

            def die() -> None:
                if not opens_after_that:
                    member.await_said("opened-1", "opened-2")
                os._exit(0)

            local.barrier = die  # type: ignore[method-assign]
        else:
            member.await_said("written")
            first = int((member.folder / "pid").read_text())
            broadcast, barrier = local.broadcast, local.barrier

            def broadcast_then_wait(tensor: torch.Tensor, root: int) -> None:
                broadcast(tensor, root)
                until = time.monotonic() + 200
                while opens_after_that and os.path.exists(f"/proc/{first}/fd/0"):
                    assert time.monotonic() < until
                    time.sleep(0.005)

            def say_then_meet() -> None:
                member.say(f"opened-{member.rank}")
                barrier()

            local.broadcast = broadcast_then_wait  # type: ignore[method-assign]
            local.barrier = say_then_meet  # type: ignore[method-assign]
        share_memory(local, NBYTES)

    outcomes = run_ranks(body, 3)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerLost), outcome.traceback
        assert outcome.error.group_rank == 0
