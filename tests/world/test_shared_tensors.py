"""Tensors that the ranks of a host share: they sum to the same bits as others, and their memory is given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.waiting import soon
from tests.support.worlds import every_rank
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.parallel.data_parallel import data_parallel


def resident_bytes() -> int:
    """How much of the memory that ranks share has pages."""
    parts = Path("/proc/self/smaps").read_text().split("memfd:phalanx-shared")[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) * 1024 for part in parts)


@pytest.mark.parametrize("count", [10, 200_001, 1_000_000])
@every_rank(size=3, place=["one host", "two hosts"])
def test_shared_tensors_sum_to_the_same_bits(member: Member, count: int) -> None:
    plain = torch.randn(count, generator=torch.Generator().manual_seed(member.rank))
    shared = phalanx.empty((count + member.rank,), dtype=torch.float32)[:count].copy_(plain)
    for turn in range(3):
        mixed = plain.clone() if member.rank == turn else shared  # one rank gives a tensor of its own
        dist.all_reduce(plain)
        dist.all_reduce(mixed)
        assert torch.equal(mixed, plain)
        shared.copy_(plain)


@every_rank(size=2)
def test_buckets_are_shared_and_their_memory_is_given_back(member: Member) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    torch.manual_seed(0)
    same = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    replica = data_parallel(model, group, torch.device("cpu"), bucket_cap_mb=1)
    reference = DistributedDataParallel(same, process_group=group, bucket_cap_mb=1)
    for step in range(3):
        x = torch.randn(8, 400, generator=torch.Generator().manual_seed(10 * step + member.rank))
        for each in (replica, reference):
            each(x).square().sum().backward()
        for one, other in zip(model.parameters(), same.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    if (child := os.fork()) == 0:  # its copies of the buckets go, and the parent's stay
        del replica, each
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    held = resident_bytes()
    assert held >= 2 * sum(p.nbytes for p in model.parameters())  # of both ranks
    dist.barrier()  # both have looked
    del replica, each
    assert soon(lambda: resident_bytes() < held / 10, 30)
