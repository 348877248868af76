"""The ranks of one host talk through shared memory: they listen on no port, and have none of Gloo's threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member
from tests.support.worlds import every_rank
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LISTEN = "0A"

pytestmark = pytest.mark.filterwarnings("ignore")


def ports() -> list[int]:
    """The ports on which this process listens."""
    held = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(f"/proc/self/fd/{name}"))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and f"socket:[{inode}]" in held:
                listening.append(int(address.rpartition(":")[2], 16))
    return listening


def sums(member: Member) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [float(member.size**2)] * 3


def every_call(member: Member) -> None:
    one, flat = torch.ones(2), torch.zeros(2 * member.size)
    parts = [torch.ones(2) for _ in range(member.size)]
    dist.broadcast(one, 0)
    dist.reduce(one.clone(), 0)
    dist.all_gather_into_tensor(flat, one)
    dist.reduce_scatter_tensor(one.clone(), flat)
    dist.all_to_all_single(flat, flat.clone())
    dist.gather(one, parts if member.rank == 0 else None)
    dist.scatter(one, parts if member.rank == 0 else None)
    dist.all_gather_object([None] * member.size, "object")
    dist.new_group(list(range(member.size)), timeout=timedelta(seconds=30))
    group: Any = dist.group.WORLD
    functional.all_reduce(one, "sum", group).sum().item()


def trains_and_shards(member: Member) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    sharded = torch.nn.Linear(4, 6)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (member.size,)))
    sharded(torch.ones(1, 4)).sum().backward()


@every_rank(size=[1, 3], joins=False)
def test_no_rank_listens(member: Member) -> None:
    before, inherited = len(os.listdir("/proc/self/task")), ports()  # another test's store may listen in this process
    member.join()
    assert len(os.listdir("/proc/self/task")) == before
    for program in (sums, every_call, trains_and_shards):
        program(member)
        assert ports() == inherited, program.__name__


def sparse(member: Member) -> bool:
    tensor = torch.eye(2).to_sparse()
    dist.all_reduce(tensor)
    return torch.equal(tensor.to_dense(), torch.eye(2) * member.size)


def by_backend(member: Member) -> bool:
    pg: Any = dist.group.WORLD
    tensor = torch.ones(2)
    pg._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
    return tensor.tolist() == [float(member.size)] * 2


def with_a_timeout(member: Member) -> bool:
    pg: Any = dist.group.WORLD
    pg.set_timeout(timedelta(seconds=44))
    before = pg._get_backend(torch.device("cpu")).options._timeout
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33), pg)
    pg.split_group(list(range(member.size)))
    return bool((before, pg._gloo.timeout) == (timedelta(seconds=44), timedelta(seconds=33)))


@pytest.mark.parametrize("program", [sparse, by_backend, with_a_timeout])
@every_rank(joins=False)
def test_gloo_is_made_where_it_is_needed(member: Member, program: Callable[[Member], bool]) -> None:
    member.join()
    before = len(ports())
    assert program(member)
    assert len(ports()) - before == 1
    sums(member)
