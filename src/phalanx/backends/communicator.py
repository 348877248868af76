"""The contract between the c10d adapter and a transport.

A communicator moves contiguous CPU tensors between the ranks of one group, blocking, one call at a time. It
knows nothing of torch's options, tensor lists, futures or process groups: ``adapter.py`` unpacks those, keeps
the order of operations and runs the asynchronous ones on a thread of its own. A new transport is one class
that implements this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

__all__ = ["Communicator"]


class Communicator(ABC):
    """Blocking collectives over one group.

    Every method is called by every rank of the group, in the same order and with matching arguments, by one
    thread at a time. Tensors are contiguous, on the CPU, and may hold no elements. A method returns when this
    rank's part is done: its tensors may be read and reused.

    All methods raise :class:`~phalanx.errors.CollectiveMismatch`, :class:`~phalanx.errors.PeerLost` or
    :class:`~phalanx.errors.CollectiveTimeout`; after any of them the group is out of step, and every further
    call raises the same.

    Attributes:
        rank: this process's rank within the group.
        size: the number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def can_all_reduce(self, dtype: torch.dtype, op: int) -> bool:
        """Whether ``all_reduce`` serves this dtype and operation (``ReduceOp.SUM.value``, …)."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Replace ``tensor`` by the reduction over all ranks, in rank order: the same bits everywhere."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace ``tensor`` by the one of rank ``root``; any dtype, same number of bytes everywhere."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy ``tensor`` of rank r into ``outputs[r]``, each of as many bytes; ``outputs[rank]`` may be it."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def abort(self) -> None:
        """Break the group from any thread: calls under way, here and on the other ranks, raise at once."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and descriptors. Safe to call twice; no call may follow."""
