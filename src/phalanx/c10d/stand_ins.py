"""Copies in the place of tensors that a transport cannot take as they are: with gaps, or sharing memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = [
    "all_dense",
    "apart",
    "apart_from_whole",
    "as_it_is",
    "as_real",
    "dense",
    "disjoint",
    "in_place",
    "into",
    "separate",
]


def as_it_is(tensor: torch.Tensor) -> bool:
    """Whether the bytes in the tensor's memory are its elements, in order.

    They are not if the tensor has gaps, or is a view that torch negates or conjugates when it reads it.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers: a communicator sums no complex ones. The tensor must be as it is in memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if a communicator can take it as it is, else a copy; without its gradient history."""
    if as_it_is(tensor) and not tensor.requires_grad:
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def all_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a communicator can take them as they are: it reads and writes memory, and knows no gradients."""
    for tensor in tensors:  # noqa: SIM110 - a generator costs more than this loop
        if not as_it_is(tensor):
            return False
    return True


def apart(tensor: torch.Tensor, parts: Sequence[torch.Tensor], own: int) -> bool:
    """Whether ``tensor`` may be read while ``parts`` are written, in any order: it is ``parts[own]`` itself, or it
    overlaps none of them. All are contiguous and of the same size.
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
    if as_it_is(tensor):
        body(tensor)
        return
    stand_in = dense(tensor)
    body(stand_in)
    tensor.detach().copy_(stand_in)


def into(outputs: Sequence[torch.Tensor], body: Callable[[list[torch.Tensor]], None]) -> None:
    """Run ``body`` on buffers to be filled: the outputs themselves, or stand-ins that are copied back."""
    buffers = [output if as_it_is(output) else torch.empty(output.shape, dtype=output.dtype) for output in outputs]
    body(buffers)
    for output, buffer in zip(outputs, buffers, strict=True):
        if buffer is not output:
            output.detach().copy_(buffer)
