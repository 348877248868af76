"""Trainers that stop in step, by the callbacks of docs/frameworks.md.

Usage: stop_in_step.py trainer|lightning. Each rank prints the number of steps, and what there is to go on from.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import phalanx

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
INPUTS = torch.linspace(-1, 1, 64).unsqueeze(1)


class Asked(torch.nn.Linear):
    """A layer in whose sixth step rank 1 is asked to stop."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Asked.steps += 1
        if Asked.steps == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)


def callback_of(name: str, world: phalanx.World) -> Any:
    """The callback of a block of the page."""
    block = re.search(rf"^```python\n# {name}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names["StopInStep"](world)


def by_trainer(world: phalanx.World) -> tuple[int, list[str]]:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Asked(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

    arguments = TrainingArguments(
        output_dir="output", per_device_train_batch_size=1, max_steps=1000, report_to="none", disable_tqdm=True
    )
    data: Any = [{"x": x, "labels": 3 * x} for x in INPUTS]
    trainer = Trainer(
        model=Model(), args=arguments, train_dataset=data, callbacks=[callback_of("trainer_stop.py", world)]
    )
    trainer.train()
    world.barrier()
    return trainer.state.global_step, [path.name for path in Path("output").glob("checkpoint-*")]


def by_lightning(world: phalanx.World) -> tuple[int, list[str]]:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):  # type: ignore[misc] # where it is not installed
        def __init__(self) -> None:
            super().__init__()
            self.layer = Asked(1, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), 3 * batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world.local_world_size,
        strategy="ddp",
        max_steps=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[callback_of("lightning_stop.py", world)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS), batch_size=1))
    return trainer.global_step, [path.name for path in Path().glob("*.ckpt")]


if __name__ == "__main__":
    world = phalanx.init(quiet=True)
    print(*({"trainer": by_trainer, "lightning": by_lightning}[sys.argv[1]](world)), flush=True)
