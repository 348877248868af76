"""A training loop with PyTorch-Ignite, which wraps models and loaders for the backends whose names it knows.

Usage: ignite_loop.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from tests.frameworks.programs.leaving import leave
from torch.utils.data import TensorDataset


def train(local_rank: int, folder: str) -> None:
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    loader = idist.auto_dataloader(dataset, batch_size=8 * idist.get_world_size())
    model = idist.auto_model(torch.nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        x, y = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(loader, max_epochs=5)
    leave(
        folder,
        idist.get_rank(),
        idist.get_world_size(),
        losses,
        model.parameters(),
        mean=idist.all_reduce(losses[-1]) / idist.get_world_size(),
    )


def main() -> None:
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train, sys.argv[1])


if __name__ == "__main__":
    main()
