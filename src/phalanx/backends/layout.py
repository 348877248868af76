"""From torch's tensors to what a communicator takes: contiguous, real, cut into one piece per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.errors import ArgumentError

__all__ = [
    "DTYPES",
    "all_dense",
    "apart",
    "apart_from_whole",
    "dense",
    "disjoint",
    "even_pieces",
    "in_place",
    "into",
    "pieces",
    "same_size",
    "separate",
    "split_counts",
]

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


def apart(tensor: torch.Tensor, parts: Sequence[torch.Tensor], own: int) -> bool:
    """Whether a tensor is its rank's own part, or shares no memory with it, and none with any other part.

    All are contiguous and of one size. Where it is so, writing what is one rank's does not change what is yet to be
    read of another's, in whichever order that happens.
    """
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    for index, part in enumerate(parts):
        distance = part.data_ptr() - start
        if -nbytes < distance < nbytes and (distance or index != own):
            return False
    return True


def apart_from_whole(tensor: torch.Tensor, whole: torch.Tensor, own: int) -> bool:
    """The same where the parts are those of one contiguous tensor."""
    at, start, nbytes = tensor.data_ptr(), whole.data_ptr(), tensor.nbytes
    return at >= start + whole.nbytes or at + nbytes <= start or at == start + own * nbytes


def separate(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share no memory."""
    at, other_at = one.data_ptr(), other.data_ptr()
    return at >= other_at + other.nbytes or other_at >= at + one.nbytes


def disjoint(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of one list shares memory with one of the other. All are contiguous."""
    spans = [[(at := t.data_ptr(), at + t.nbytes) for t in tensors if t.numel()] for tensors in (ones, others)]
    if not all(spans):
        return True
    (first, last), (others_first, others_last) = ((min(s)[0], max(end for _, end in s)) for s in spans)
    if last <= others_first or others_last <= first:
        return True
    ends = [0, 0]
    both = sorted((*span, which) for which in (0, 1) for span in spans[which])
    for start, end, kind in both:
        if start < ends[1 - kind]:
            return False
        ends[kind] = max(ends[kind], end)
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
