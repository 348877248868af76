"""torch's own DistributedDataParallel, as its tutorial has it: asks for gloo, and for a second group over gloo.

Usage: plain_ddp.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import torch
import torch.distributed as dist
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
    torch.save(
        {
            "rank": rank,
            "world_size": dist.get_world_size(),
            "backend": dist.get_backend(),
            "group": type(dist.group.WORLD).__name__,
            "second_group": type(checks).__name__,
            "losses": losses,
            "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        },
        f"{sys.argv[1]}/{rank}.pt",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
