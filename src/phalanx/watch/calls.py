"""Calls in words, for errors that name what each rank did."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["call_text", "dtype_name", "listed"]


def call_text(name: str, tensor: torch.Tensor | None, op: int | None = None, **who: int) -> str:
    """A call as its user wrote it: ``all_reduce(float32[4, 2], sum)``."""
    parts = [] if tensor is None else [f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"]
    if op is not None:
        parts.append(dist.ReduceOp.RedOpType(op).name.lower())
    parts += [f"{key}={value}" for key, value in who.items()]
    return f"{name}({', '.join(parts)})"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without its package."""
    return str(dtype).removeprefix("torch.")


def listed(calls: dict[int, str], size: int) -> str:
    """One line per different call, with the ranks that made it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in range(size):
        ranks_of.setdefault(calls.get(rank, "has not called anything yet"), []).append(rank)
    return "\n".join(
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {call}"
        for call, ranks in ranks_of.items()
    )
