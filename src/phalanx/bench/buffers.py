"""The memory of one operation on one rank, the values in it, and the check of what it holds after a call.

An operation sends from one buffer and receives into another. They are made once, and every backend uses the same ones.
The values are small whole numbers, so that every dtype holds every sum exactly. They depend on the rank and on the
index with a period of 7; no power of two is a multiple of 7, so blocks that changed places are noticed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Buffers"]

_PERIOD = 7
_POISON = 101


class Buffers:
    """The buffers of one operation on this rank.

    Args:
        rank, size: this process's place in the world.
        dtype: of the elements.
        nbytes: the size that was asked for; rounded down to whole elements and blocks, but to at least one of each.
        sends, receives: how many elements ``send`` and ``recv`` have. Each gets this object, whose ``count``, ``block``
            and ``whole`` are set.
        in_place: the operation's input is in ``recv``, and it has no ``send``.

    Attributes:
        count: the elements of a tensor of the size.
        block: the elements of one block; ``size`` blocks together have the size.
        whole: the elements of all those blocks.
        send: the tensor that this rank gives; None if it gives nothing or works in place.
        recv: the tensor that this rank receives into; None if it receives nothing.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        dtype: torch.dtype,
        nbytes: int,
        *,
        sends: Callable[[Buffers], int],
        receives: Callable[[Buffers], int],
        in_place: bool,
    ) -> None:
        self.rank = rank
        self.size = size
        self.dtype = dtype
        self.in_place = in_place
        elements = nbytes // dtype.itemsize
        self.count = max(1, elements)
        self.block = max(1, elements // size)
        self.whole = self.block * size
        sent, received = sends(self), receives(self)
        self.send = torch.zeros(sent, dtype=dtype) if sent else None
        self.recv = torch.zeros(received, dtype=dtype) if received else None

    @property
    def nbytes(self) -> int:
        """The size that is really used on this rank."""
        return max((len(tensor) for tensor in (self.send, self.recv) if tensor is not None), default=0) * (
            self.dtype.itemsize
        )

    def fill(self) -> None:
        """Write this rank's values into its input, and a value that no result has into a tensor that only receives."""
        if self.send is not None:
            self.send.copy_(self.values(self.rank, 0, len(self.send)))
        if self.recv is not None and self.in_place:
            self.recv.copy_(self.values(self.rank, 0, len(self.recv)))
        elif self.recv is not None:
            self.recv.fill_(_POISON)

    def clear(self) -> None:
        """Write zeros, so that a tensor that is reduced in place again and again does not overflow."""
        for tensor in (self.send, self.recv):
            if tensor is not None:
                tensor.zero_()

    def difference(self, expected: torch.Tensor | None) -> str | None:
        """In words, how ``recv`` differs from ``expected``; None if it does not, or if nothing is expected."""
        if expected is None or self.recv is None or torch.equal(self.recv, expected):
            return None
        index = int((self.recv != expected).nonzero()[0])
        got, wanted = self.recv[index].item(), expected[index].item()
        return f"rank {self.rank}, element {index}: got {got}, expected {wanted}"

    def values(self, rank: int, start: int, count: int) -> torch.Tensor:
        """The values ``start`` to ``start + count`` of a rank's tensor."""
        return self._repeat([(i + 3 * rank) % _PERIOD for i in range(_PERIOD)], start, count)

    def sums(self, start: int, count: int) -> torch.Tensor:
        """The sums of those values over all ranks."""
        period = [sum((i + 3 * rank) % _PERIOD for rank in range(self.size)) for i in range(_PERIOD)]
        return self._repeat(period, start, count)

    def joined(self, start: int) -> torch.Tensor:
        """One block of every rank, in the order of the ranks: the one that begins at ``start``."""
        return torch.cat([self.values(rank, start, self.block) for rank in range(self.size)])

    def blocks(self, tensor: torch.Tensor | None) -> list[torch.Tensor]:
        """A whole buffer as the list of blocks that the list forms take; empty if this rank has no such buffer."""
        if tensor is None:
            return []
        return [tensor[start : start + self.block] for start in range(0, len(tensor), self.block)]

    def _repeat(self, period: list[int], start: int, count: int) -> torch.Tensor:
        offset = start % _PERIOD
        return torch.tensor(period, dtype=self.dtype).repeat(count // _PERIOD + 2)[offset : offset + count]
