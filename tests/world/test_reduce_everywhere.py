"""A collective in several worlds, as CONTRIBUTING.md shows it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import ANYWHERE, Ranks, every_rank, in_worlds


@pytest.mark.parametrize("root", [0, 2])
@every_rank(size=3, place=ANYWHERE, backend=["phalanx", "mpi"])
def test_only_the_root_gets_the_sum(member: Member, root: int) -> None:
    tensor = torch.full((1000,), 10.0**member.rank)
    dist.reduce(tensor, root)
    assert tensor.unique().tolist() == ([111.0] if member.rank == root else [10.0**member.rank])


@in_worlds(place="two hosts", backend=["phalanx", "replaced", "gloo"])
def test_the_sum_has_the_same_bits_on_all_ranks(world: Ranks) -> None:
    def body(member: Member) -> list[float]:
        tensor = torch.full((1000,), 0.1 + member.rank / 3)
        dist.all_reduce(tensor)
        return tensor.tolist()

    first, *others = world.run(body)
    assert others == [first] * 2
