"""How ranks take the mean of flat tensors: unchanged, or in a narrower dtype; others are in modules of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

__all__ = ["FP16_LIMIT", "Exchange", "Narrow", "Unchanged", "narrowed"]

# Half of what float16 can hold, so that no sum of shares leaves its range, in whatever order it is rounded.
FP16_LIMIT = 32768.0


class Exchange(ABC):
    """One way to take the mean over the ranks of a group.

    Attributes:
        name: what ``compress=`` calls it.
    """

    name = "none"

    @abstractmethod
    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        """Replace tensors by their means over all ranks, in place. Every rank must call it; it blocks.

        Args:
            flats: real tensors of one dimension, alike on every rank. Each result has the same bits on every rank.
            shapes: for each of ``flats`` the shapes of the tensors that it consists of.
        """

    def settle(self) -> None:  # noqa: B027 - most ways keep nothing between two exchanges
        """Make what is kept from one exchange to the next the same on all ranks, for a checkpoint. All must call it."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept from one exchange to the next, after :meth:`settle`: the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - see settle()
        """Go on from a :meth:`state_dict`, also with another number of ranks; an empty one begins anew."""


class Unchanged(Exchange):
    """The mean by an ``all_reduce`` of the tensors as they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        for flat in flats:
            if flat.dtype == torch.float16:  # its sum could leave the range that its mean is in
                dist.all_reduce(flat.div_(self._group.size()), group=self._group)
            else:
                dist.all_reduce(flat, group=self._group)
                flat.div_(self._group.size())


class Narrow(Exchange):
    """The mean by an ``all_reduce`` of each rank's share, rounded to ``bf16`` or ``fp16``; two bytes an element."""

    DTYPES: ClassVar = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group, self.name = group, name

    def mean_(self, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> None:
        for flat in flats:
            share = narrowed(flat, self._group.size(), self.DTYPES[self.name])
            dist.all_reduce(share, group=self._group)
            flat.copy_(share)


def narrowed(tensor: torch.Tensor, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's share of a mean over ``ranks``, in ``dtype`` if that is narrower than the tensor's own.

    The share is divided before it is rounded, because the sum over many ranks could leave float16's range. What is
    itself beyond half of that range becomes its end; infinities stay, because a gradient scaler looks for them.
    """
    if tensor.element_size() <= dtype.itemsize:
        return tensor.div(ranks)
    if dtype == torch.float16:
        tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-FP16_LIMIT, FP16_LIMIT))
    return tensor.div(ranks).to(dtype)
