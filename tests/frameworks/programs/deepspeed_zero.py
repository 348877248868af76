"""A training loop with DeepSpeed, ZeRO stage 1: each rank keeps a part of the optimizer's state.

Usage: deepspeed_zero.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from tests.frameworks.programs.leaving import leave
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    folder = sys.argv[1]
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
    model = torch.nn.Linear(8, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = []
    for _ in range(12):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    leave(folder, dist.get_rank(), dist.get_world_size(), losses, engine.module.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
