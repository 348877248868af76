"""Parts of an all_to_all that go from the memory of one host into that of another, beside smaller and larger ones.

Some parts go in the leaders' frames, some by way of that memory, and some straight to their receivers. Every mixture of
them brings each rank what the others have sent it, call after call, and every byte leaves a host once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from tests.support.connecting import PLACEMENTS, over_hosts
from tests.support.ranks import Member, on_ranks

CALLS = 25
# Elements of eight bytes: nothing, what a frame carries, what the memory has room for, with most 2 and 3 ranks on a
# host, and what is too large for it.
COUNTS = (0, 1, 30, 100, 200, 300, 410, 500, 900, 3000)


def part(call: int, source: int, to: int) -> torch.Tensor:
    """What a rank sends another one in a call."""
    chance = random.Random(1_000_000 * call + 1000 * source + to)
    count = chance.choice(COUNTS)
    return torch.arange(count) * 7 + chance.randrange(1 << 40)


def exchange(member: Member, host_of: Callable[[int, int], int]) -> list[str]:
    communicator = over_hosts(member.store(), member.rank, member.size, host_of)
    rank, ranks, wrong = member.rank, range(member.size), []
    late = random.Random(rank)
    for call in range(CALLS):
        inputs = [part(call, rank, to) for to in ranks]
        expected = [part(call, source, rank) for source in ranks]
        outputs = [torch.full_like(each, -1) for each in expected]
        communicator.all_to_all(outputs, inputs)
        if not all(map(torch.equal, outputs, expected)):
            wrong.append(f"call {call}")
        if late.random() < 0.2:  # the others are in later calls when this one comes to the next
            time.sleep(0.02)
        if call % 3 == 0:  # in which nobody waits for the ranks that are not needed
            told = torch.tensor([call])
            communicator.broadcast(told, call % member.size)
    communicator.barrier()  # nobody closes while another one still waits
    communicator.close()
    return wrong


SOME = [(4, "two hosts"), (5, "three hosts")]
MORE = [pytest.param(size, placement, marks=pytest.mark.long) for size in (4, 5, 6) for placement in PLACEMENTS]


@pytest.mark.parametrize(("size", "placement"), [*SOME, *MORE])
def test_parts_of_all_sizes_arrive_in_call_after_call(size: int, placement: str) -> None:
    assert on_ranks(lambda member: exchange(member, PLACEMENTS[placement]), size) == [[]] * size
