"""Workers of Ray Train: here the ranks of ``phalanx.launch()``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import phalanx
from ray.train import ScalingConfig


@dataclass
class TorchConfig:
    """Ray's."""

    backend: str


class TorchTrainer:
    """Ray's."""

    def __init__(self, train: Callable[[], None], torch_config: TorchConfig, scaling_config: ScalingConfig) -> None:
        self.train, self.backend, self.workers = train, torch_config.backend, scaling_config.num_workers

    def fit(self) -> None:
        def work() -> None:
            dist.init_process_group(self.backend)
            self.train()

        phalanx.launch(work, n=self.workers)


def prepare_data_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=DistributedSampler(loader.dataset))


def prepare_model(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)
