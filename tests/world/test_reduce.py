"""The root of a reduction gets the sum, and the others keep what they gave."""

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank


@pytest.mark.parametrize("root", [0, 2])
@every_rank(size=3, place=["one host", "two hosts"], backend=["phalanx", "mpi"])
def test_only_the_root_of_a_reduction_gets_the_sum(member: Member, root: int) -> None:
    tensor = torch.full((1000,), 10.0**member.rank)
    dist.reduce(tensor, root)
    assert tensor.unique().tolist() == ([111.0] if member.rank == root else [10.0**member.rank])
