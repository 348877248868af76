"""The names of Accelerate that docs/coming_from/accelerate.md calls, for where it is not installed."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Accelerator:
    """Accelerate's, over torch.distributed."""

    def __init__(self) -> None:
        dist.init_process_group()
        self.process_index, self.num_processes = dist.get_rank(), dist.get_world_size()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> Any:
        batches = [batch for at, batch in enumerate(loader) if at % self.num_processes == self.process_index]
        return DistributedDataParallel(model), optimizer, batches

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "mean"
        dist.all_reduce(tensor)
        return tensor / self.num_processes

    def print(self, *values: object) -> None:
        if self.process_index == 0:
            print(*values)

    def end_training(self) -> None:
        dist.destroy_process_group()
