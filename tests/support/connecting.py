"""Communicators that the tests make without a process group: over Gloo, and as if on several hosts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.transports.contract import Communicator
from phalanx.transports.gloo.communicator import GlooCommunicator
from phalanx.transports.gloo.engine import GlooOnDemand, lazy_gloo
from phalanx.transports.hosts.communicator import HostsCommunicator
from phalanx.transports.hosts.gloo_lane import GlooEngine
from phalanx.transports.hosts.lane import Engine
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.ucx_lane import UcxEngine
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning
from phalanx.transports.solo import SoloCommunicator

__all__ = ["gloo_engine", "over_gloo", "over_hosts", "ucx_engine"]

TIMEOUT = timedelta(seconds=60)


class OwnGlooCommunicator(GlooCommunicator):
    """One that also ends its engine, which elsewhere its process group does."""

    def close(self) -> None:
        self._gloo.shutdown()


def over_gloo(store: Store, rank: int, size: int) -> Communicator:
    return OwnGlooCommunicator(lazy_gloo(store, rank, size, TIMEOUT, one_host=True))


def gloo_engine(store: Store, rank: int, size: int, timeout: timedelta) -> Engine:
    """Gloo on loopback."""
    return GlooEngine(GlooOnDemand(lambda limit: lazy_gloo(store, rank, size, limit, one_host=True), timeout), timeout)


def ucx_engine(store: Store, rank: int, size: int, timeout: timedelta) -> Engine:
    """UCX, on this machine's own address."""
    return UcxEngine(store, rank, timeout)


def over_hosts(
    store: Store,
    rank: int,
    size: int,
    host_of: Callable[[int, int], int],
    timeout: timedelta = TIMEOUT,
    engine: Callable[[Store, int, int, timedelta], Engine] = gloo_engine,
) -> Communicator:
    """As if on several hosts: ranks of one host share memory, and an engine is between them."""
    layout = Layout([host_of(each, size) for each in range(size)], rank)
    local: Communicator = SoloCommunicator()
    if len(layout.here) > 1:
        own = PrefixStore(f"host{layout.host}", store)
        local = SharedMemoryCommunicator(
            own, layout.local, len(layout.here), timeout, Tuning(4096, stream_bytes=3000), layout.here
        )
    lanes = engine(PrefixStore("lanes", store), rank, size, timeout)
    messages = over_gloo(PrefixStore("all", store), rank, size)
    return HostsCommunicator(layout, local, lanes, messages, PrefixStore("group", store), timeout)
