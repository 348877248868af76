"""From torch's tensors to what a communicator takes: contiguous, real, cut into one piece per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.errors import ArgumentError

__all__ = ["DTYPES", "all_dense", "dense", "even_pieces", "in_place", "into", "pieces", "same_size", "split_counts"]

DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous, else a contiguous copy; without its gradient history."""
    if tensor.is_contiguous() and not tensor.requires_grad:
        return tensor
    return tensor.detach().contiguous()


def all_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a communicator can take them as they are: it reads and writes memory, and knows no gradients."""
    for tensor in tensors:  # noqa: SIM110 - a generator costs more than the question
        if not tensor.is_contiguous():
            return False
    return True


def in_place(tensor: torch.Tensor, body: Callable[[torch.Tensor], None]) -> None:
    """Run ``body`` on the tensor, or on a contiguous stand-in that is copied back."""
    if tensor.is_contiguous():
        body(tensor)
        return
    stand_in = dense(tensor)
    body(stand_in)
    tensor.detach().copy_(stand_in)


def into(outputs: Sequence[torch.Tensor], body: Callable[[list[torch.Tensor]], None]) -> None:
    """Run ``body`` on buffers to be filled: the outputs themselves, or stand-ins that are copied back."""
    buffers = [
        output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype) for output in outputs
    ]
    body(buffers)
    for output, buffer in zip(outputs, buffers, strict=True):
        if buffer is not output:
            output.detach().copy_(buffer)


def even_pieces(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A contiguous tensor as ``size`` flat pieces of equal length."""
    return list(tensor.view(size, -1).unbind()) if tensor.numel() else [tensor.view(-1)] * size


def pieces(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """A contiguous tensor as flat pieces of ``counts`` elements."""
    return list(tensor.view(-1).split(list(counts)))


def split_counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements ``splits`` rows each are, or equally many rows for each rank if there are no splits.

    Raises:
        ArgumentError: the splits are not one per rank, or do not add up to the rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ArgumentError(f"{name}: {rows} rows do not divide equally among {size} ranks; give split sizes")
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise ArgumentError(f"{name}: {len(splits)} split sizes for {size} ranks; there must be one for each")
    if sum(splits) != rows or min(splits) < 0:
        raise ArgumentError(f"{name}: the split sizes {list(splits)} do not add up to the {rows} rows of the tensor")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]


def same_size(name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> None:
    """Check a list with one tensor per rank.

    Raises:
        ArgumentError: there are not ``size`` of them, or one differs from ``like`` in dtype or element count.
    """
    if len(tensors) != size:
        raise ArgumentError(f"{name}: the list has {len(tensors)} tensors, but the group has {size} ranks")
    dtype, count = like.dtype, like.numel()
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype or tensor.numel() != count:
            raise ArgumentError(
                f"{name}: entry {index} of the list is {tensor.dtype}{list(tensor.shape)}, but must have as many "
                f"elements as {like.dtype}{list(like.shape)}, of the same dtype"
            )
