"""A group over hosts that has been closed has given back its connections and threads.

So it is while garbage is not collected, and while the script still has the closed group.
"""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
from tests.support.connecting import PLACEMENTS, over_hosts
from tests.support.leaks import Holdings
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import soon
from torch.distributed import ReduceOp

from phalanx.errors import PeerLost, PhalanxError
from phalanx.transports.contract import Communicator

SUM = int(ReduceOp.SUM)  # type: ignore[call-overload]
LENGTHS = [1, 3_000, 40_000]  # in a frame, through shared memory, and in chunks


def joined(member: Member, name: str) -> Communicator:
    limit = timedelta(seconds=60)
    return over_hosts(member.store(name), member.rank, member.size, PLACEMENTS["two hosts"], limit)


def use(group: Communicator, member: Member) -> None:
    """Every way on which tensors travel."""
    rank, size = member.rank, member.size
    for length in LENGTHS:
        tensor = torch.full((length,), float(rank))
        group.all_reduce(tensor, SUM)
        assert bool((tensor == size * (size - 1) / 2).all())
        parts = [torch.full((length,), float(rank)) for _ in range(size)]
        outputs = [torch.empty(length) for _ in range(size)]
        group.all_to_all(outputs, parts)
        assert [float(part[-1]) for part in outputs] == [*range(size)]
        to, source = (rank + 1) % size, (rank - 1) % size
        received = torch.empty(length)
        for message in group.send(torch.full((length,), float(rank)), to, 5), group.recv(received, source, 5):
            message.wait()
        assert bool((received == source).all())


def warmed_up(member: Member) -> Holdings:
    """What this process holds once it has what it keeps for all its groups."""
    first = joined(member, "first")
    use(first, member)
    first.close()
    assert soon(lambda: ours() <= {"phalanx-spare"}), ours()  # the others still leave the group for good
    gc.collect()
    gc.disable()
    return Holdings.now()


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx")}


def left_without_errors_since(before: Holdings) -> list[str]:
    """An error keeps what its traceback shows; a thread that was woken may have the group for a moment."""
    gc.enable()

    def collected() -> Holdings:
        gc.collect()
        return Holdings.now()

    return before.left_in_time(collected)


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("closed", 3),
        ("broken", 3),
        ("one goes on", 3),
        *(pytest.param(how, 5, marks=pytest.mark.long) for how in ("closed", "broken", "one goes on")),
    ],
)
def test_closed_group_has_given_back_its_connections_and_threads(how: str, size: int) -> None:
    """A broken one has when its errors are gone; what a rank that goes on sends comes to closed connections."""

    def run(member: Member) -> list[str]:
        before = warmed_up(member)
        group = joined(member, "second")
        use(group, member)
        if how == "broken":
            member.meet("used")
            if member.rank == 0:
                group.abort("ValueError: the last line of its script")
            with pytest.raises(PhalanxError):
                while True:
                    group.all_reduce(torch.ones(1), SUM)
        elif how == "one goes on" and member.rank == size - 1:
            with pytest.raises(PeerLost, match="has left the group in order"):
                while True:
                    group.all_reduce(torch.ones(LENGTHS[1]), SUM)
        group.close()
        if how == "closed":
            return before.left_in_time(Holdings.now)  # while the group is there
        del group
        return left_without_errors_since(before)

    assert values(run_ranks(run, size)) == [[]] * size
