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
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon
from torch.distributed import ReduceOp

from phalanx.errors import PeerLost, PhalanxError
from phalanx.transports.contract import Communicator

SUM = int(ReduceOp.SUM)  # type: ignore[call-overload]
SIZE, LENGTHS = 3, [1, 3_000, 40_000]  # in a frame, through shared memory, and in chunks


def joined(member: Member, name: str) -> Communicator:
    limit = timedelta(seconds=60)
    return over_hosts(member.store(name), member.rank, member.size, PLACEMENTS["two hosts"], limit)


def use(group: Communicator, member: Member) -> None:
    """Every way on which tensors travel."""
    for length in LENGTHS:
        own = torch.full((length,), float(member.rank))
        group.all_to_all([torch.empty(length) for _ in range(SIZE)], [own] * SIZE)
        to, source = (member.rank + 1) % SIZE, (member.rank - 1) % SIZE
        received = torch.empty(length)
        for message in group.send(own, to, 5), group.recv(received, source, 5):
            message.wait()
        assert bool((received == source).all())
        group.all_reduce(own, SUM)
        assert bool((own == sum(range(SIZE))).all())


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx")}


def collected() -> Holdings:
    gc.collect()
    return Holdings.now()


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_closed_group_has_given_back_its_connections_and_threads(how: str) -> None:
    """A broken one has when its errors are gone."""

    def run(member: Member) -> list[str]:
        first = joined(member, "first")  # after which the process has what it keeps for all its groups
        use(first, member)
        first.close()
        assert soon(lambda: ours() <= {"phalanx-spare"}), ours()  # the others still leave the group for good
        gc.collect()
        gc.disable()
        before = Holdings.now()
        group = joined(member, "second")
        use(group, member)
        if how == "broken":
            member.meet("used")
            if member.rank == 0:
                group.abort("ValueError: the last line of its script")
            with pytest.raises(PhalanxError):
                while True:
                    group.all_reduce(torch.ones(1), SUM)
        group.close()
        if how == "closed":
            return before.left_in_time(Holdings.now)  # while the group is there
        del group
        gc.enable()  # an error keeps what its traceback shows
        return before.left_in_time(collected)

    assert on_ranks(run, SIZE) == [[]] * SIZE


def test_rank_that_goes_on_does_not_hold_those_that_have_closed_the_group() -> None:
    """What it sends comes to connections that they give back."""

    def run(member: Member) -> None:
        for number in range(12):
            group = joined(member, str(number))
            use(group, member)
            member.meet(f"used-{number}")  # else the call too many may end a rank that is still in its last one
            if member.rank == SIZE - 1:
                with pytest.raises(PeerLost, match="has left the group in order"):
                    while True:
                        group.all_reduce(torch.ones(LENGTHS[1]), SUM)
            group.close()
        member.meet("closed")  # these ranks end without what an interpreter does at its end

    on_ranks(run, SIZE)
