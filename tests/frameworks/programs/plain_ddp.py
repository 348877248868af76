"""torch's own DistributedDataParallel, as its tutorial has it: asks for gloo, and for a second group over gloo.

Usage: plain_ddp.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import torch
import torch.distributed as dist
from tests.frameworks.programs.leaving import leave
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    checks = dist.new_group(backend="gloo")
    mean = torch.tensor(losses[-1])
    dist.all_reduce(mean, group=checks)
    dist.monitored_barrier()
    leave(sys.argv[1], rank, dist.get_world_size(), losses, model.parameters(), second_group=type(checks).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
