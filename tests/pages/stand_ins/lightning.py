"""The names of Lightning Fabric that docs/coming_from/lightning.md calls, for where it is not installed."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Fabric:
    """Lightning's, over torch.distributed."""

    def __init__(self, *, accelerator: str, devices: int, strategy: str) -> None:
        assert (accelerator, strategy) == ("cpu", "ddp")
        self.devices = devices

    def launch(self) -> None:
        dist.init_process_group()
        self.world_size = dist.get_world_size()
        assert self.world_size == self.devices

    def seed_everything(self, seed: int) -> None:
        torch.manual_seed(seed)

    def setup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return DistributedDataParallel(model), optimizer

    def setup_dataloaders(self, loader: DataLoader[Any]) -> Any:
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=DistributedSampler(loader.dataset))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def all_reduce(self, tensor: torch.Tensor, *, reduce_op: str) -> torch.Tensor:
        assert reduce_op == "mean"
        dist.all_reduce(tensor)
        return tensor / self.world_size

    def print(self, *values: object) -> None:
        if dist.get_rank() == 0:
            print(*values)
