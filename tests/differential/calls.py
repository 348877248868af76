"""Each collective as ``call(tensor, group, async_op)``, which returns torch's work and the tensors that are filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CALLS", "Call", "blanks", "send_and_receive"]

Call = Callable[..., tuple[Any, Any]]


def blanks(x: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    return [torch.zeros(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size(group))]


def parts(x: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    return [(x + i).to(x.dtype) for i in range(dist.get_world_size(group))]


def all_reduce(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    return dist.all_reduce(x, group=group, async_op=async_op), x


def all_reduce_max(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    return dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=async_op), x


def broadcast(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    return dist.broadcast(x, group=group, group_src=0, async_op=async_op), x


def reduce(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    work = dist.reduce(x, group=group, group_dst=0, async_op=async_op)
    return work, x if dist.get_rank(group) == 0 else None


def all_gather(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    outputs = blanks(x, group)
    return dist.all_gather(outputs, x, group=group, async_op=async_op), outputs


def all_gather_into_tensor(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    output = torch.zeros(dist.get_world_size(group) * x.numel(), dtype=x.dtype)
    return dist.all_gather_into_tensor(output, x, group=group, async_op=async_op), output


def gather(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    outputs = blanks(x, group) if dist.get_rank(group) == 0 else None
    return dist.gather(x, outputs, group=group, group_dst=0, async_op=async_op), outputs


def scatter(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    output, inputs = torch.zeros_like(x), parts(x, group) if dist.get_rank(group) == 0 else None
    return dist.scatter(output, inputs, group=group, group_src=0, async_op=async_op), output


def reduce_scatter(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    output = torch.zeros_like(x)
    return dist.reduce_scatter(output, parts(x, group), group=group, async_op=async_op), output


def reduce_scatter_tensor(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    output, whole = torch.zeros_like(x), torch.cat(parts(x, group))
    return dist.reduce_scatter_tensor(output, whole, group=group, async_op=async_op), output


def all_to_all(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    outputs = blanks(x, group)
    return dist.all_to_all(outputs, parts(x, group), group=group, async_op=async_op), outputs


def all_to_all_single(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    whole = torch.cat(parts(x, group))
    output = torch.zeros_like(whole)
    return dist.all_to_all_single(output, whole, group=group, async_op=async_op), output


def barrier(x: torch.Tensor, group: Any = None, async_op: bool = False) -> tuple[Any, Any]:
    return dist.barrier(group=group, async_op=async_op), None


def send_and_receive(x: torch.Tensor) -> torch.Tensor:
    """Pass it on around the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(x.shape, dtype=x.dtype)
    work: Any = dist.isend(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    return received


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        all_reduce, all_reduce_max, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter,
        reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, barrier,
    )
}  # fmt: skip
