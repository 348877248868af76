"""Communicators that the tests make without a process group, as if on several hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Membership
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.communicator import HierarchicalCommunicator
from phalanx.transports.hierarchical.layout import Layout, Sizes
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning

__all__ = ["PLACEMENTS", "over_hosts"]

TIMEOUT = timedelta(seconds=60)
# The large tensors of the tests go through a few chunks.
SIZES = Sizes(frame_bytes=4_000, chunk_bytes=6_000)


# How ranks are placed on hosts.
PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "two hosts": lambda rank, size: rank * 2 // size,
    "two hosts, cyclic": lambda rank, size: rank % 2,
    "three hosts": lambda rank, size: min(rank, 2),
}


def over_hosts(
    store: Store,
    rank: int,
    size: int,
    host_of: Callable[[int, int], int],
    timeout: timedelta = TIMEOUT,
) -> Communicator:
    """As if on several hosts: ranks of one host share memory, and an engine is between them."""
    layout = Layout([host_of(each, size) for each in range(size)], rank)
    own = PrefixStore(f"host{layout.host}", store)
    local = SharedMemoryCommunicator(
        own, layout.local, len(layout.here), timeout, Tuning(4096, stream_bytes=3000), layout.here
    )
    hosts = [host_of(each, size) for each in range(size)]
    membership = Membership.meet(PrefixStore("group", store), rank, hosts, [f"host {host}" for host in hosts], timeout)
    group = GroupAbort(membership, "group", range(size))
    return HierarchicalCommunicator(layout, rank, local, group, timeout, SIZES)
