"""Worlds of processes that ``torch.multiprocessing`` starts, from a program that has left a world of its own."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from tests.differential.program import program, raised
from tests.support.ranks import Member

# Spawned processes import torch, each for itself; forked ones have it.
STARTS = ("spawn", "fork")


def join(rank: int, size: int, backend: str, folder: Path) -> None:
    # The ranks that started these wait for them, and can say only that.
    faulthandler.dump_traceback_later(60)
    dist.init_process_group(backend, init_method=f"file://{folder}/started", rank=rank, world_size=size)


def train(rank: int, size: int, backend: str, folder: Path) -> None:
    join(rank, size, backend, folder)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(rank + step))).square().sum().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), folder / f"trained{rank}")
    # Or DDP is the last to hold the group: it joins Gloo's threads while it has the interpreter, for which they wait.
    del model
    dist.destroy_process_group()


def fail(rank: int, size: int, backend: str, folder: Path) -> None:
    join(rank, size, backend, folder)
    dist.barrier()
    if rank == size - 1:
        raise KeyError("the last one")
    dist.barrier()


def start_ranks(member: Member, body: Any, start: str) -> None:
    """Have rank 0 start as many ranks as the world had, which ends."""
    arguments = (member.size, dist.get_backend(), member.folder)
    dist.destroy_process_group()
    if member.rank == 0:
        multiprocessing.start_processes(body, arguments, nprocs=member.size, start_method=start)


@program(cases=STARTS, tolerance=1e-6, alone=True, short=2)
def trained(member: Member, start: str) -> Any:
    start_ranks(member, train, start)
    return [torch.load(path) for path in sorted(member.folder.glob("trained*"))] if member.rank == 0 else None


@program(cases=STARTS, alone=True, short=0)
def failed(member: Member, start: str) -> Any:
    return raised(lambda: start_ranks(member, fail, start))
