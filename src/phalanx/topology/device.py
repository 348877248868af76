"""Which device a rank computes on, through ``torch.accelerator``, so that no vendor is named here."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.backends.register import NAME
from phalanx.errors import InitializationError

__all__ = ["choose_device", "default_backend"]


def choose_device(rank: int, local_rank: int, wanted: str | torch.device | None) -> torch.device:
    """The device of one rank: the accelerator with the index of its local rank, or the CPU.

    Args:
        rank: the rank, for the error.
        local_rank: its number on this host.
        wanted: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, …; None takes the machine's accelerator if there is one.

    Raises:
        InitializationError: there are fewer accelerators than ranks on this host.
    """
    if wanted is not None:
        device = torch.device(wanted)
    elif torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator if accelerator is not None else torch.device("cpu")
    else:
        device = torch.device("cpu")
    if device.type == "cpu" or device.index is not None:
        return device
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise InitializationError(
            f"rank {rank} has local rank {local_rank}, but only {count} {device.type} device(s) "
            f"are visible. Start at most {count} ranks on this host, or pass device='cpu' to phalanx.init()"
        )
    return torch.device(device.type, local_rank)


def default_backend(device: torch.device) -> str:
    """The backend for tensors on ``device``: ``phalanx`` on the CPU, the device's own elsewhere."""
    if device.type == "cpu":
        return NAME
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
