"""DDP over the backend: the same parameters for any number of ranks, the same bits in every run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks

from phalanx.data.loader import sharded_loader
from phalanx.data.sampler import ShardedBatchSampler
from phalanx.parallel.data_parallel import data_parallel

CPU = torch.device("cpu")


class Items(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """96 fixed items of a regression problem."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(96, 10, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def model_of(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))


def train(member: Member, hook: str | None = None, **options: Any) -> torch.Tensor:
    """Three epochs at a global batch of 24; all parameters in one tensor."""
    member.join()
    world = dist.group.WORLD
    assert world is not None
    model = data_parallel(model_of(seed=member.rank), world, CPU, comm_hook=hook, **options)
    loader = sharded_loader(
        Items(), 24 // member.size, rank=member.rank, world_size=member.size, shuffle=True, seed=5, drop_last=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def trained_alone() -> torch.Tensor:
    """The same training without DDP, process groups or sharding: the plain computation."""
    model = model_of(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    items = Items()
    shuffled = ShardedBatchSampler(96, 24, rank=0, world_size=1, shuffle=True, seed=5)
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        for batch in shuffled:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(items.x[batch]), items.y[batch]).backward()
            optimizer.step()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def test_replicas_end_where_one_process_ends() -> None:
    """In every run with the same bits on all ranks, and near by where hooks shorten what travels."""
    alone, runs = trained_alone(), [on_ranks(partial(train, bucket_cap_mb=0.001), 3) for _ in range(2)]
    for parameters in runs[0] + runs[1]:
        assert torch.equal(parameters, runs[0][0])
    torch.testing.assert_close(runs[0][0], alone, rtol=1e-4, atol=1e-6)
    for hook in ("bf16", "fp16"):
        torch.testing.assert_close(on_ranks(partial(train, hook=hook), 2)[1], alone, rtol=0.05, atol=0.01)
