"""The parts of an all_to_all that one rank sends, or the places of those that it receives: one for each rank.

Most of them are copied by addresses. To make a tensor of a part takes longer than to copy a small one, so only a part
that an engine is to move gets one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Parts", "PartsOfWhole"]


class Parts:
    """The parts, in the order of the ranks.

    Attributes:
        dtype: of all of them.
        addresses: where each begins.
        nbytes: how many bytes each has.
    """

    __slots__ = ("_tensors", "addresses", "dtype", "nbytes")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.dtype = tensors[0].dtype
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.nbytes = [tensor.nbytes for tensor in tensors]

    def tensor(self, rank: int) -> torch.Tensor:
        """A part as a flat tensor."""
        return self._tensors[rank].view(-1)


class PartsOfWhole(Parts):
    """The parts of one contiguous tensor.

    Args:
        whole: the tensor.
        counts: how many elements each part has.
    """

    __slots__ = ("_counts", "_whole")

    def __init__(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        at, itemsize = whole.data_ptr(), whole.itemsize
        self._whole, self._counts = whole, counts
        self.dtype = whole.dtype
        self.nbytes = [count * itemsize for count in counts]
        self.addresses = addresses = []
        for nbytes in self.nbytes:
            addresses.append(at)
            at += nbytes

    def tensor(self, rank: int) -> torch.Tensor:
        return self._whole.view(-1).narrow(0, sum(self._counts[:rank]), self._counts[rank])
