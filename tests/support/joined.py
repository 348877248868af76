"""Ranks that have joined torch's default group, and the tensors that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import Member, on_ranks

__all__ = ["group", "in_world", "mine", "total"]


def in_world(body: Callable[[Member], Any], size: int) -> list[Any]:
    def joined(place: Member) -> Any:
        place.join()
        value = body(place)
        dist.barrier()
        dist.destroy_process_group()
        return value

    return on_ranks(joined, size)


def group() -> Any:
    return dist.group.WORLD


def mine(place: Member, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(place.rank + 1))


def total(size: int) -> float:
    return size * (size + 1) / 2
