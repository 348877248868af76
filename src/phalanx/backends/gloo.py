"""Gloo, torch's own engine: the network transport of groups that do not live on one host.

Every process group also has one attached, for what its communicator does not serve yet and for the C++ virtuals
that cannot be overridden from Python. It connects to a peer when it first has something to send to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOp, Store

from phalanx.backends.communicator import Communicator

__all__ = ["GlooCommunicator", "lazy_gloo"]


def lazy_gloo(store: Store, rank: int, size: int, timeout: timedelta, *, one_host: bool) -> ProcessGroupGloo:
    """A Gloo group that listens on one address and connects when it is used.

    Args:
        store: where its ranks exchange addresses.
        rank, size: this process's place in the group.
        timeout: for connecting and for every operation.
        one_host: listen on loopback, where nobody else can reach it. Otherwise on the address that the host's
            name resolves to, or on the interface that GLOO_SOCKET_IFNAME names.
    """
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [
        ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
        if one_host
        else ProcessGroupGloo.create_default_device(lazy_init=True)
    ]
    return ProcessGroupGloo(store, rank, size, options)


class GlooCommunicator(Communicator):
    """Collectives over Gloo's TCP connections, for ranks that share no memory. Sums are in Gloo's order."""

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self.rank = gloo.rank()
        self.size = gloo.size()
        self._gloo = gloo

    def can_all_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return op == ReduceOp.SUM.value and dtype.is_floating_point

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        self._gloo.allreduce([tensor], AllreduceOptions()).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensor], options).wait()

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self._gloo.allgather([list(outputs)], [tensor]).wait()

    def barrier(self) -> None:
        self._gloo.barrier().wait()

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        """Nothing of its own: the group that owns the engine shuts it down."""
