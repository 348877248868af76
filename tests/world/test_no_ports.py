"""The ranks of one host talk through shared memory: they listen on no port, and have none of Gloo's threads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LISTEN = "0A"

SIZES = [1, 3]
pytestmark = pytest.mark.filterwarnings("ignore")


def ports() -> list[int]:
    """The ports on which this process listens."""
    names = os.listdir("/proc/self/fd")
    held = {int(found[1]) for name in names if (found := re.fullmatch(r"socket:\[(\d+)\]", target(name)))}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and int(inode) in held:
                listening.append(int(address.rpartition(":")[2], 16))
    return listening


def target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def sums(member: Member) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [float(member.size**2)] * 3


def every_call(member: Member) -> None:
    size = member.size
    one, parts = torch.ones(2), [torch.ones(2) for _ in range(size)]
    gathered, flat = [torch.zeros(2) for _ in range(size)], torch.zeros(2 * size)
    dist.broadcast(one, 0)
    dist.reduce(one.clone(), 0)
    dist.all_gather(gathered, one)
    dist.all_gather_into_tensor(flat, one)
    dist.reduce_scatter_tensor(one.clone(), torch.ones(2 * size))
    dist.all_to_all_single(flat, torch.ones(2 * size))
    dist.all_to_all(gathered, parts)
    dist.gather(one, gathered if member.rank == 0 else None)
    dist.scatter(one, parts if member.rank == 0 else None)
    dist.all_gather_object([None] * size, "object")
    dist.barrier()
    dist.new_group(list(range(size)), timeout=timedelta(seconds=30))


def trains(member: Member) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    assert model.module.weight.grad is not None


def shards(member: Member) -> None:
    model = torch.nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (member.size,)))
    model(torch.ones(1, 4)).sum().backward()


def functions(member: Member) -> None:
    group: Any = dist.group.WORLD
    tensor = torch.ones(member.size)
    functional.all_reduce(tensor, "sum", group).sum().item()
    functional.all_gather_tensor(tensor, 0, group).sum().item()
    functional.reduce_scatter_tensor(tensor, "sum", 0, group).sum().item()
    functional.all_to_all_single(tensor, None, None, group).sum().item()
    functional.broadcast(tensor, 0, group).sum().item()


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_listens(size: int) -> None:
    def body(member: Member) -> list[Any]:
        before = threads()
        member.join()
        found: list[Any] = [threads() - before]
        for program in (sums, every_call, trains, shards, functions):
            program(member)
            found += [(program.__name__, port) for port in ports()]
        dist.destroy_process_group()
        return found

    assert on_ranks(body, size) == [[0]] * size


def sparse(member: Member) -> Any:
    tensor = torch.eye(2).to_sparse()
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist() == (torch.eye(2) * member.size).tolist()


def called_by_itself(member: Member) -> Any:
    pg: Any = dist.group.WORLD
    tensor = torch.full((2,), float(member.rank + 1))
    _, work = torch.ops.c10d.broadcast_([tensor], pg.boxed(), 0, 0)
    dist.Work.unbox(work).wait()
    return tensor.tolist() == [1.0] * 2


def into_a_given_tensor(member: Member) -> Any:
    output = torch.zeros(2 * member.size)
    name: Any = dist.group.WORLD
    call = torch.ops._c10d_functional.all_gather_into_tensor_out
    torch.ops._c10d_functional.wait_tensor(call(torch.ones(2), member.size, name.group_name, out=output))
    return output.tolist() == [1.0] * 2 * member.size


def by_backend(member: Member) -> Any:
    pg: Any = dist.group.WORLD
    tensor = torch.ones(2)
    pg._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
    return tensor.tolist() == [float(member.size)] * 2


def with_a_timeout(member: Member) -> Any:
    pg: Any = dist.group.WORLD
    pg.set_timeout(timedelta(seconds=44))
    before = pg._get_backend(torch.device("cpu")).options._timeout
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33), pg)
    pg.split_group(list(range(member.size)))
    return (before, pg._gloo.timeout) == (timedelta(seconds=44), timedelta(seconds=33))


@pytest.mark.parametrize("program", [sparse, called_by_itself, into_a_given_tensor, by_backend, with_a_timeout])
def test_gloo_is_made_where_it_is_needed(program: Callable[[Member], Any]) -> None:
    def body(member: Member) -> tuple[Any, int]:
        member.join()
        before = len(ports())
        right = program(member), len(ports()) - before
        sums(member)
        dist.destroy_process_group()
        return right

    by_itself = program is into_a_given_tensor and torch.__version__ >= "2.15"
    assert on_ranks(body, 3) == [(True, 0 if by_itself else 1)] * 3
