"""A training loop with Lightning Fabric, as its introduction has it.

Usage: fabric_loop.py FOLDER [NAME]; NAME is DDPStrategy's process_group_backend. Each rank leaves what it has trained.
"""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from tests.frameworks.programs.leaving import leave
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    folder, *backend = sys.argv[1:]
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend[0]) if backend else "ddp"
    )
    fabric.launch()
    fabric.seed_everything(0)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8))
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    gathered = fabric.all_gather(torch.tensor(float(fabric.global_rank)))
    mean = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="mean")
    with fabric.rank_zero_first():  # a barrier without a timeout, over gloo
        pass
    leave(
        folder,
        fabric.global_rank,
        fabric.world_size,
        losses,
        model.parameters(),
        gathered=gathered.tolist(),
        mean=mean.item(),
    )


if __name__ == "__main__":
    main()
