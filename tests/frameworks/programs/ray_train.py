"""Training with Ray Train, which starts the ranks itself.

Usage: ray_train.py FOLDER RANKS; each rank leaves what it has trained there.
"""

import sys

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from tests.frameworks.programs.leaving import leave
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, str]) -> None:
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    dataset = TensorDataset(features, features @ torch.randn(8, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, batch_size=8))
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    rank = ray.train.get_context().get_world_rank()
    leave(config["folder"], rank, ray.train.get_context().get_world_size(), losses, model.parameters())


def main() -> None:
    folder, ranks = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[3])
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=False),
        run_config=RunConfig(storage_path=f"{folder}/results"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
