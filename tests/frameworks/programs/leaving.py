"""What each rank of a program leaves in the folder that the test reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def leave(
    folder: str, rank: int, size: int, losses: list[float], parameters: Iterable[torch.Tensor], **more: Any
) -> None:
    left = {
        "rank": rank,
        "world_size": size,
        "group": type(dist.group.WORLD).__name__,
        "losses": losses,
        "parameters": torch.cat([parameter.detach().flatten() for parameter in parameters]),
    }
    torch.save({**left, **more}, f"{folder}/{rank}.pt")
