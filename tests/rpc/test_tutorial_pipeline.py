"""The pipeline of torch's tutorial "Distributed Pipeline Parallelism Using RPC", over ``phalanx.rpc.torch_api``.

As there, the master passes references from stage to stage, so that activations go between the stages, and each stage
has its parameters referred to by torch's ``DistributedOptimizer``.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import DistributedOptimizer

import phalanx.rpc.autograd.engine  # noqa: F401 - once, and not on every forked rank
from tests.rpc.torch_workers import started
from tests.support.ranks import Member, on_ranks

MICRO_BATCHES, STEPS, LR = 4, 3, 0.5


def layers(stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(12, 8), torch.randn(12, 8)


class Shard(nn.Module):
    """A stage, on its owner."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.layers = layers(stage)

    def forward(self, x_rref: Any) -> torch.Tensor:
        x = x_rref.to_here()
        with self._lock:
            out: torch.Tensor = self.layers(x)
        return out

    def parameter_rrefs(self) -> list[Any]:
        from torch.distributed.rpc import RRef

        return [RRef(parameter) for parameter in self.parameters()]


def forward(rpc: Any, shards: list[Any], xs: torch.Tensor) -> torch.Tensor:
    """What the master does."""
    outs = []
    for x in xs.split(len(xs) // MICRO_BATCHES):
        reference = rpc.RRef(x)
        for shard in shards[:-1]:
            reference = shard.remote().forward(reference)
        outs.append(shards[-1].rpc_async().forward(reference))
    return torch.cat(torch.futures.wait_all(outs))


def in_one_process(stages: int) -> tuple[list[float], list[torch.Tensor]]:
    """The losses, and the parameters at the end."""
    model = nn.Sequential(*map(layers, range(stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        loss = nn.functional.mse_loss(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_the_tutorials_pipeline_trains_as_one_process_does() -> None:
    stages = 2

    def body(member: Member) -> Any:
        rpc = started(member)
        if member.rank:
            rpc.shutdown()
            return None
        from torch.distributed import autograd

        shards = [rpc.remote(f"worker{stage + 1}", Shard, (stage,)) for stage in range(stages)]
        parameters = [each for shard in shards for each in shard.remote().parameter_rrefs().to_here()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LR)
        losses = []
        for step in range(STEPS):
            inputs, labels = batch(step)
            with autograd.context() as context_id:
                loss = nn.functional.mse_loss(forward(rpc, shards, inputs), labels)
                autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
                optimizer.step(context_id)
            losses.append(loss.item())
        found = [parameter.to_here().detach() for parameter in parameters]
        del shards, parameters, optimizer
        rpc.shutdown()
        return losses, found

    losses, parameters = on_ranks(body, stages + 1)[0]
    expected_losses, expected = in_one_process(stages)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(parameters, expected)
