"""A world of processes that ``torch.multiprocessing`` starts, from a program that has left a world of its own."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from tests.differential.program import program
from tests.support.ranks import Member


def train(rank: int, size: int, backend: str, folder: Path) -> None:
    # The ranks that started these wait for them, and can say only that.
    faulthandler.dump_traceback_later(60)
    dist.init_process_group(backend, init_method=f"file://{folder}/started", rank=rank, world_size=size)
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


# Spawned processes import torch, each for itself; forked ones have it.
@program(cases=["fork", "spawn"], tolerance=1e-6, alone=True, long=["spawn"])
def trained(member: Member, start: str) -> Any:
    arguments = (member.size, dist.get_backend(), member.folder)
    dist.destroy_process_group()
    if member.rank:
        return None
    multiprocessing.start_processes(train, arguments, nprocs=member.size, start_method=start)
    return [torch.load(path) for path in sorted(member.folder.glob("trained*"))]
