"""A training loop with Accelerate, as its quick tour has it.

Usage: accelerate_loop.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tests.frameworks.programs.leaving import leave
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(dataset, batch_size=8)
    )
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    gathered = accelerator.gather_for_metrics(torch.full((2,), float(accelerator.process_index)))
    accelerator.wait_for_everyone()
    leave(
        sys.argv[1],
        accelerator.process_index,
        accelerator.num_processes,
        losses,
        model.parameters(),
        gathered=gathered.tolist(),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
